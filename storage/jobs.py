"""Job rows: add, read, list. Who may change a job's state: ``claims``, ``outcomes``, ``sweeps``."""

import asyncio
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Row,
    bindparam,
    exists,
    func,
    insert,
    literal_column,
    select,
    text,
)

from contract.errors import GoneError, JobNotFoundError
from contract.jobs import LANES, TERMINAL, JobState, Lane
from storage.database import Transaction, database_now
from storage.ids import create_id
from storage.refs import TensorRef, decode_tensors
from storage.statements import execute, render_hint
from storage.tables import PARKED_AT, RARE, jobs
from storage.tenancy import check_owner

__all__ = [
    "JobRow",
    "NewJob",
    "QueueDepth",
    "RunningJobs",
    "add_jobs",
    "finished_among",
    "get_job",
    "list_jobs",
    "parse_job",
    "queue_depth",
    "read_jobs",
    "read_request",
    "running_jobs",
    "select_jobs",
]

_LARGE_BYTES = 256 * 1024
_IDS_A_STATEMENT = 500
_OPEN = [state.value for state in JobState if state not in TERMINAL]
_RARE = TERMINAL - {JobState.SUCCEEDED}
_PAYLOAD = ("result", "tensors")
_UNREAD: tuple[str, ...] = ("request", "available_at", "lease_until_at", "hinted_at")
_UNREAD += ("expires_after_s", "bulk_chunk", "bulk_lines", "stored_bytes", "cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """What a client submitted. ``request`` is opaque; it is compressed on its way in.

    ``origin`` is JSON of ``contract.origins``, ``cache`` what it does with known scores: ``read``,
    ``refresh`` or nothing.
    """

    tenant: str
    model: str
    lane: Lane
    request: bytes
    item_count: int
    estimated_tokens: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)
    webhook_url: str | None = None
    webhook_events: Sequence[str] | None = None
    queue_deadline_s: float | None = None
    run_timeout_s: float | None = None
    expires_after_s: float | None = None
    origin: str | None = None
    cache: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job as stored, without its request. ``usage``, ``result`` and ``error`` are JSON."""

    id: str
    tenant: str
    model: str
    lane: Lane
    state: JobState
    attempt: int
    generation: int
    version: int
    error_count: int
    crash_count: int
    worker: str | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    cancel_requested_at: float | None
    queue_deadline_at: float | None
    expires_at: float | None
    deleted_at: float | None
    run_timeout_s: float | None
    item_count: int
    scored_count: int
    failed_count: int
    estimated_tokens: int
    metadata: dict[str, str]
    webhook_url: str | None
    webhook_events: list[str] | None
    usage: bytes | None
    error: bytes | None
    receipt_hash: str | None
    blob_key: str | None
    bulk_id: str | None = None
    origin: str | None = None
    result: bytes | None = None
    tensors: list[TensorRef] = field(default_factory=list)

    @property
    def hint(self) -> str:
        """What the queue is told."""
        return render_hint(self.id, self.attempt, self.model)


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """What waits in one lane of one model."""

    model: str
    lane: Lane
    count: int
    tokens: int
    oldest_age_s: float


@dataclass(frozen=True, slots=True)
class RunningJobs:
    """What one worker has in its hands of one model and lane."""

    worker: str
    model: str
    lane: Lane
    count: int


async def add_jobs(tx: Transaction, new: Sequence[NewJob]) -> list[JobRow]:
    """Insert ``new`` as queued, in order; return their rows."""
    if not new:
        return []
    if sum(len(job.request) for job in new) > _LARGE_BYTES:
        rows = await asyncio.to_thread(_render_jobs, new)
    else:
        rows = _render_jobs(new)
    result = await tx.execute(_insert(tx.dialect.name), rows)
    stored = {row.id: parse_job(row) for row in result}
    return [stored[row["id"]] for row in rows]


async def get_job(tx: Transaction, tenant: str, job_id: str) -> JobRow:
    """Return the job with its result.

    Raises ``JobNotFoundError``, also for another tenant's, and ``GoneError`` for a tombstone.
    """
    query = select_jobs(payload=True).where(jobs.c.id == job_id, jobs.c.tenant == tenant)
    row = (await tx.execute(query)).one_or_none()
    if row is None:
        message = f"there is no job {job_id}"
        raise JobNotFoundError(message)
    if row.deleted_at is not None:
        message = f"job {job_id} was deleted, or its retention passed"
        raise GoneError(message)
    return parse_job(row)


async def list_jobs(  # noqa: PLR0913  # a filter each
    tx: Transaction,
    tenant: str,
    *,
    state: JobState | None = None,
    model: str | None = None,
    bulk_id: str | None = None,
    error_code: str | None = None,
    metadata: Mapping[str, str] | None = None,
    after: str | None = None,
    limit: int = 20,
) -> list[JobRow]:
    """Return jobs newest first, without result and tensors; ``after`` is the last id seen."""
    query = select_jobs(payload=False).where(jobs.c.tenant == tenant, jobs.c.deleted_at.is_(None))
    if after is not None:
        query = query.where(jobs.c.id < after)
    if state is not None:
        # Written out, not a parameter: only so do both planners see that a partial index will do.
        query = query.where(jobs.c.state == literal_column(f"'{state.value}'"))
        if state in _RARE:
            query = query.where(text(RARE))
    if model is not None:
        query = query.where(jobs.c.model == model)
    if bulk_id is not None:
        query = query.where(jobs.c.bulk_id == bulk_id)
    if error_code is not None:
        # Stored by msgspec with the code first: no cast to JSON, which SQLite and PostgreSQL spell
        # in different ways.
        query = query.where(jobs.c.error.is_not(None))  # the index's condition
        query = query.where(jobs.c.error.startswith(f'{{"code":"{error_code}"', autoescape=True))
    for key, value in (metadata or {}).items():
        query = query.where(_has_metadata(tx.dialect.name, key, value))
    result = await tx.execute(query.order_by(jobs.c.id.desc()).limit(limit))
    return [parse_job(row) for row in result]


async def read_jobs(tx: Transaction, ids: Collection[str]) -> dict[str, JobRow]:
    """Return the jobs with their results, by id; those that were deleted are missing."""
    found: dict[str, JobRow] = {}
    wanted = sorted(ids)
    for start in range(0, len(wanted), _IDS_A_STATEMENT):
        some = wanted[start : start + _IDS_A_STATEMENT]
        query = select_jobs(payload=True).where(jobs.c.id.in_(some), jobs.c.deleted_at.is_(None))
        found |= {row.id: parse_job(row) for row in await tx.execute(query)}
    return found


async def finished_among(tx: Transaction, ids: Collection[str]) -> set[str]:
    """Return those of ``ids`` that will not change any more: ended, deleted, or never there."""
    open_ids: set[str] = set()
    waited = list(ids)
    for start in range(0, len(waited), _IDS_A_STATEMENT):
        some = waited[start : start + _IDS_A_STATEMENT]
        query = select(jobs.c.id).where(
            jobs.c.id.in_(some), jobs.c.state.in_(_OPEN), jobs.c.deleted_at.is_(None)
        )
        open_ids.update((await tx.execute(query)).scalars())
    return set(ids) - open_ids


async def read_request(tx: Transaction, tenant: str, job_id: str) -> bytes:
    """Return the request as it was submitted. Raises as ``get_job`` does."""
    query = select(jobs.c.request).where(
        jobs.c.id == job_id, jobs.c.tenant == tenant, jobs.c.deleted_at.is_(None)
    )
    compressed = (await tx.execute(query)).scalar_one_or_none()
    if compressed is None:
        await get_job(tx, tenant, job_id)  # says why
        message = f"job {job_id} has no request"
        raise GoneError(message)
    return await asyncio.to_thread(zlib.decompress, compressed)


async def queue_depth(tx: Transaction) -> list[QueueDepth]:
    """Return what waits, by model and lane, without what paused bulks hold back.

    Reads every queued row: cache it.
    """
    result = await execute(tx, _DEPTH, {})
    return [
        QueueDepth(row.model, LANES[row.lane], row.waiting, int(row.tokens), float(row.age))
        for row in result
    ]


async def running_jobs(tx: Transaction) -> list[RunningJobs]:
    """Return what runs, by worker, model and lane; reads only what workers hold."""
    result = await execute(tx, _RUNNING, {})
    return [RunningJobs(row.worker, row.model, LANES[row.lane], row.held) for row in result]


def select_jobs(*, payload: bool) -> Any:  # noqa: ANN401  # a Select of thirty columns
    """Select the columns of ``JobRow``; ``payload`` adds the result and the tensors."""
    skipped = _UNREAD if payload else _UNREAD + _PAYLOAD
    return select(*(column for column in jobs.c if column.name not in skipped))


def parse_job(row: Row[Any]) -> JobRow:
    """Turn a row of ``select_jobs`` into a ``JobRow``."""
    check_owner(row.tenant)
    values = dict(row._mapping)  # noqa: SLF001  # public in spite of its name
    values["lane"] = LANES[values["lane"]]
    values["state"] = JobState(values["state"])
    events = values["webhook_events"]
    values["webhook_events"] = events.split(" ") if events is not None else None
    for name in ("usage", "error", "result"):
        if values.get(name) is not None:
            values[name] = values[name].encode()
    if "tensors" in values:
        values["tensors"] = decode_tensors(values["tensors"])
    return JobRow(**values)


def _has_metadata(dialect: str, key: str, value: str) -> ColumnElement[bool]:
    if dialect != "sqlite":
        named: ColumnElement[bool] = jobs.c.metadata[key].as_string() == value
        return named
    # a JSON path cannot name a key that holds a quotation mark
    pairs = func.json_each(jobs.c.metadata).table_valued("key", "value")
    return exists().where(pairs.c.key == key, pairs.c.value == value)


_DEPTH = f"""
SELECT model, lane, count(*) AS waiting, sum(estimated_tokens) AS tokens,
       {{now}} - min(created_at) AS age
FROM jobs WHERE state = 'queued' AND available_at < {PARKED_AT}
GROUP BY model, lane ORDER BY model, lane
"""  # noqa: S608  # constants of ours


_RUNNING = """
SELECT worker, model, lane, count(*) AS held
FROM jobs WHERE state = 'running' GROUP BY worker, model, lane ORDER BY worker, model, lane
"""


def _render_jobs(new: Sequence[NewJob]) -> list[dict[str, Any]]:
    return [
        {
            "id": create_id("job"),
            "tenant": job.tenant,
            "model": job.model,
            "lane": LANES.index(job.lane),
            "request": (packed := zlib.compress(job.request, 1)),
            "stored_bytes": len(packed),
            "item_count": job.item_count,
            "estimated_tokens": job.estimated_tokens,
            "metadata": dict(job.metadata),
            "webhook_url": job.webhook_url,
            "webhook_events": None if job.webhook_events is None else " ".join(job.webhook_events),
            "deadline_s": job.queue_deadline_s,
            "run_timeout_s": job.run_timeout_s,
            "expires_after_s": job.expires_after_s,
            "origin": job.origin,
            "cache": job.cache,
        }
        for job in new
    ]


def _insert(dialect: str) -> Any:  # noqa: ANN401  # a ReturningInsert of thirty columns
    now = literal_column(database_now(dialect), jobs.c.created_at.type)
    constants = {
        "state": JobState.QUEUED.value,
        "created_at": now,
        "available_at": now,
        "queue_deadline_at": now + bindparam("deadline_s", type_=jobs.c.created_at.type),
    }
    counters = [f"{kind}_count" for kind in ("error", "crash", "scored", "failed")]
    counters += ["attempt", "generation", "version"]
    returned = (column for column in jobs.c if column.name not in _UNREAD + _PAYLOAD)
    return insert(jobs).values(constants | dict.fromkeys(counters, 0)).returning(*returned)
