"""Claims: a worker takes jobs, keeps its lease on them, or gives them back.

Every write here but the claim itself is fenced by ``statements.FENCE``. Leases are judged by the
database's clock alone.
"""

import random
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Row

from contract.jobs import LANES, Lane
from storage.attempts import ATTEMPT, add_attempts
from storage.claiming import CLAIM
from storage.database import Transaction
from storage.events import ENDED, add_events
from storage.refs import TensorRef, decode_tensors
from storage.statements import Claim, execute, pack, pack_claims, parse_hint, render_hint

__all__ = [
    "AGED_EVERY",
    "AGEING_S",
    "Claim",
    "ClaimedJob",
    "KeptScores",
    "Renewal",
    "claim_jobs",
    "mark_hinted",
    "next_tenant",
    "release_jobs",
    "renew_leases",
    "retry_later",
    "unhinted_jobs",
]

#: Jobs that waited longer are served before their lane's turn in one claim of ``AGED_EVERY``.
AGEING_S = 60.0
#: Two in a row would hold up what has just come: who claims again and again counts.
AGED_EVERY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptScores:
    """What an earlier generation scored and a retry keeps. ``result`` and ``usage`` are JSON."""

    blob_key: str
    result: bytes
    usage: bytes | None
    tensors: list[TensorRef]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedJob:
    """A job in a worker's hands."""

    id: str
    tenant: str
    model: str
    lane: Lane
    attempt: int
    crash_count: int
    error_count: int
    item_count: int
    estimated_tokens: int
    run_timeout_s: float | None
    created_at: float
    compressed_request: bytes
    origin: str | None = None
    waited_s: float = 0.0
    kept: "KeptScores | None" = None
    cache: str | None = None

    @property
    def claim(self) -> Claim:
        """What fences every later write."""
        return Claim(self.id, self.attempt)

    @property
    def request(self) -> bytes:
        """The request as it was submitted. Decompresses: call it in the preparing thread."""
        return zlib.decompress(self.compressed_request)


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a heartbeat learnt: jobs no longer ours, and jobs whose client wants them stopped."""

    lost: set[str]
    cancelled: set[str]


async def claim_jobs(  # noqa: PLR0913  # each limits the claim
    tx: Transaction,
    *,
    worker: str,
    models: Collection[str],
    max_jobs: int,
    max_tokens: int,
    lease_s: float,
    aged_first: bool | None = None,
    last_lane: Lane = LANES[-1],
    after_tenant: str = "",
    max_running_tokens: int = 0,
) -> list[ClaimedJob]:
    """Take up to ``max_jobs`` queued jobs of one of ``models``, the most urgent lane first.

    Takes at least one job, and no more than ``max_tokens`` with more than one. Tenants take turns.
    Jobs whose worker died come in groups of 8, then alone. ``aged_first`` is drawn by chance: it
    serves what waited longest, so that a busy lane cannot starve those behind it. Lanes behind
    ``last_lane`` are left alone. Of very many tenants a claim sees a window of names around
    ``after_tenant``: give it what ``next_tenant`` returns, so that the window moves on.
    Tenants with ``max_running_tokens`` running (0: any), or as their own limits say, get no more.
    """
    if aged_first is None:
        aged_first = random.randrange(AGED_EVERY) == 0  # noqa: S311
    parameters = {
        "worker": worker,
        "models": msgspec.json.encode(sorted(models)).decode(),
        "max_jobs": max_jobs,
        "max_tokens": max_tokens,
        "lease_s": lease_s,
        "aged": int(aged_first),
        "ageing_s": AGEING_S,
        "last_lane": LANES.index(last_lane),
        "after_tenant": after_tenant,
        "max_running": max_running_tokens,
    }
    result = await execute(tx, CLAIM[tx.dialect.name], parameters)
    claimed = [
        ClaimedJob(
            id=row.id,
            tenant=row.tenant,
            model=row.model,
            lane=LANES[row.lane],
            attempt=row.attempt,
            crash_count=row.crash_count,
            error_count=row.error_count,
            item_count=row.item_count,
            estimated_tokens=row.estimated_tokens,
            run_timeout_s=row.run_timeout_s,
            created_at=row.created_at,
            compressed_request=row.request,
            origin=row.origin,
            waited_s=max(0.0, float(row.waited_s)),
            kept=_parse_kept(row),
            cache=row.cache,
        )
        for row in result
    ]
    return sorted(claimed, key=lambda job: (LANES.index(job.lane), job.id))


def next_tenant(after_tenant: str, claimed: Collection[ClaimedJob]) -> str:
    """Return where the next claim's window of tenants begins: behind those just served."""
    tenants = {job.tenant for job in claimed}
    later = {tenant for tenant in tenants if tenant > after_tenant}
    return max(later or tenants, default="")


async def renew_leases(
    tx: Transaction, *, worker: str, claims: Sequence[Claim], lease_s: float
) -> Renewal:
    """Prolong the leases of ``claims`` in one statement; say which are lost or to be cancelled."""
    if not claims:
        return Renewal(set(), set())
    parameters = {"rows": pack_claims(claims), "worker": worker, "lease_s": lease_s}
    rows = (await execute(tx, _RENEW, parameters)).all()
    held = {row.id for row in rows}
    cancelled = {row.id for row in rows if row.cancel_requested_at is not None}
    return Renewal({claim.id for claim in claims} - held, cancelled)


async def retry_later(
    tx: Transaction, claims: Sequence[Claim], error: bytes | None, delay_s: float
) -> set[str]:
    """Queue the jobs again, to be taken after ``delay_s``; their ``error_count`` grows.

    Returns the ids that were still ours. One whose client asked to cancel is cancelled instead.
    """
    return await _give_back(tx, claims, {"delay_s": delay_s, "errors": 1}, error)


async def release_jobs(tx: Transaction, claims: Sequence[Claim]) -> set[str]:
    """Queue the jobs again at once, as a worker does that drains; nothing is held against them."""
    return await _give_back(tx, claims, {"delay_s": 0.0, "errors": 0})


async def unhinted_jobs(tx: Transaction, *, older_than_s: float, limit: int) -> list[str]:
    """Return the hints of queued jobs for which none is known to have been sent.

    Who submits does not say that it hinted, so that a job that waits long is hinted once more
    here. A hint that Redis lost after that stays lost: the workers' own sweep finds the job.
    """
    rows = await execute(tx, _UNHINTED, {"older_than_s": older_than_s, "limit": limit})
    return [render_hint(row.id, row.attempt, row.model) for row in rows]


async def mark_hinted(tx: Transaction, hints: Iterable[str]) -> None:
    """Record that the queue knows these jobs."""
    rows = [{"id": claim.id, "attempt": claim.attempt} for claim in map(parse_hint, hints)]
    if rows:
        await execute(tx, _MARK_HINTED, {"rows": pack(rows)})


def _parse_kept(row: Row[Any]) -> KeptScores | None:
    if row.generation == 0 or row.kept_key is None or row.kept_result is None:
        return None
    return KeptScores(
        blob_key=row.kept_key,
        result=row.kept_result.encode(),
        usage=None if row.kept_usage is None else row.kept_usage.encode(),
        tensors=decode_tensors(row.kept_tensors),
    )


async def _give_back(
    tx: Transaction,
    claims: Sequence[Claim],
    parameters: dict[str, object],
    error: bytes | None = None,
) -> set[str]:
    if not claims:
        return set()
    text = None if error is None else error.decode()
    parameters = {"rows": pack_claims(claims), "error": text, **parameters}
    rows = (await execute(tx, _GIVE_BACK, parameters)).all()
    await add_attempts(tx, rows, "failed" if parameters["errors"] else "released", error)
    await add_events(tx, rows)
    return {row.id for row in rows}


_RENEW = """
WITH held AS MATERIALIZED ({held(id text, attempt integer)})
UPDATE jobs SET lease_until_at = {now} + :lease_s, worker = :worker
FROM held WHERE jobs.id = held_id
RETURNING id, cancel_requested_at
"""

_GIVE_BACK = f"""
WITH held AS MATERIALIZED ({{held(id text, attempt integer)}})
UPDATE jobs SET
    state = CASE WHEN cancel_requested_at IS NULL THEN 'queued' ELSE 'cancelled' END,
    finished_at = CASE WHEN cancel_requested_at IS NULL THEN NULL ELSE {{now}} END,
    expires_at = CASE WHEN cancel_requested_at IS NULL THEN NULL ELSE {{now}} + expires_after_s END,
    available_at = {{now}} + :delay_s,
    error_count = error_count + :errors,
    error = CASE WHEN cancel_requested_at IS NULL THEN :error ELSE NULL END,
    lease_until_at = NULL, hinted_at = NULL, version = version + 1
FROM held WHERE jobs.id = held_id
RETURNING {ENDED}, {ATTEMPT}
"""  # noqa: S608  # constants of ours

_UNHINTED = """
SELECT id, attempt, model FROM jobs
WHERE state = 'queued' AND hinted_at IS NULL AND created_at <= {now} - :older_than_s
  AND available_at <= {now}
ORDER BY created_at LIMIT :limit
"""

_MARK_HINTED = """
WITH hinted AS MATERIALIZED (
    SELECT j.id AS hinted_id FROM jobs j JOIN {rows(id text, attempt integer)} c
    ON c.id = j.id AND c.attempt = j.attempt WHERE j.state = 'queued' ORDER BY j.id {skip j})
UPDATE jobs SET hinted_at = {now} FROM hinted WHERE jobs.id = hinted_id
"""
