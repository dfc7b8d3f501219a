"""Webhook deliveries: which are due, who is at them, and what came of every attempt.

Claimed and fenced as jobs are: by an attempt number and a lease of the database's clock. What an
attempt says of its receiver and of its endpoint is recorded in the same transaction.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row, select

from contract.webhooks import EventType
from storage import receivers
from storage.bulk_tables import bulk_events, bulks
from storage.claiming_deliveries import READY, TAKE
from storage.database import Transaction
from storage.endpoints import end_pending, record_failures, record_successes
from storage.jobs import JobRow, parse_job, select_jobs
from storage.statements import execute, pack
from storage.tables import jobs
from storage.tenants import webhook_secrets

__all__ = [
    "AttemptReport",
    "BulkNews",
    "Claimed",
    "DeliveryAttempt",
    "DueDelivery",
    "claim_deliveries",
    "record_attempts",
]

_ANSWER_CHARACTERS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkNews:
    """What an event says of a bulk. ``counts`` (JSON) are as they were, the rest as it is now."""

    id: str
    kind: str
    counts: str
    metadata: dict[str, str]
    errors: str | None
    output_file_id: str | None
    error_file_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DueDelivery:
    """One delivery in a worker's hands. ``attempt`` counts from 1; ``job`` is as it is now.

    It is about ``job``, about ``bulk``, or a test of its endpoint.

    ``failures`` are those since the ladder began, ``receiver_failures`` those of its receiver in a
    row. ``endpoint_id`` is empty where the URL is the job's own. The newest secret is first.
    """

    id: str
    attempt: int
    failures: int
    url: str
    tenant: str
    endpoint_id: str
    receiver: str
    receiver_failures: int
    event_id: str
    event_type: EventType
    event_at: float
    sequence: int
    job: JobRow | None
    bulk: BulkNews | None
    secrets: list[str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim took. ``contended``: another worker was claiming too, look again soon."""

    due: list[DueDelivery]
    contended: bool = False


@dataclass(frozen=True, slots=True)
class _Subjects:
    """What a page of deliveries is about, by id; and the default secrets by tenant."""

    jobs: Mapping[str, JobRow]
    bulks: Mapping[str, BulkNews]
    secrets: Mapping[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryAttempt:
    """What came of one attempt: an HTTP ``status``, or the ``error`` that kept us from one."""

    latency_s: float
    status: int | None = None
    error: str | None = None
    answer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """An attempt, and what is to follow.

    Not delivered, it is tried again after ``next_attempt_s``; with none it is dead, and ``reason``
    says why. ``is_gone`` disables the endpoint. The receiver is left alone for ``pause_s``; none
    means that it works, though it refused this.
    """

    delivery: DueDelivery
    attempt: DeliveryAttempt
    delivered: bool
    next_attempt_s: float | None = None
    reason: str | None = None
    is_gone: bool = False
    pause_s: float | None = None


async def claim_deliveries(  # each limits the claim
    tx: Transaction, *, worker: str, limit: int, lease_s: float, places: int = 8
) -> Claimed:
    """Take up to ``limit`` deliveries that are due; another worker may take them after ``lease_s``.

    ``lease_s`` must exceed the time that one attempt may take. With what any worker has in flight
    no receiver has more than ``places``, and one whose last attempts failed has one. Those of an
    endpoint that is disabled or gone end here.
    """
    bounds = {"places": places, "limit": limit}
    ready = (await execute(tx, READY[tx.dialect.name], bounds)).all()
    own = [{"name": row.name} for row in ready if row.is_locked]
    if not own:
        return Claimed([], contended=bool(ready))
    parameters = bounds | {"rows": pack(own), "worker": worker, "lease_s": lease_s}
    ids = [row.id for row in await execute(tx, TAKE[tx.dialect.name], parameters)]
    return Claimed(await _describe(tx, ids), contended=len(own) < len(ready))


async def _describe(tx: Transaction, claimed: Sequence[str]) -> list[DueDelivery]:
    """Return what was claimed with all that an attempt needs, in the order of the events."""
    if not claimed:
        return []
    ids = pack({"id": each} for each in claimed)
    found = (await execute(tx, _DESCRIBE, {"rows": ids})).all()
    stale = [row for row in found if row.endpoint_id and not row.is_enabled]
    if stale:
        await execute(tx, _END, {"rows": pack({"id": row.id} for row in stale)})
    due = [row for row in found if not row.endpoint_id or row.is_enabled]
    held = await _find_jobs(tx, {row.job_id for row in due if row.job_id})
    bulk_news = await _find_bulks(tx, {row.event_id for row in due if row.bulk_id})
    own = {row.tenant for row in due if not row.endpoint_id}
    secrets = {tenant: await webhook_secrets(tx, tenant) for tenant in sorted(own)}
    subjects = _Subjects(held, bulk_news, secrets)
    return [_parse_due(row, subjects) for row in due]


async def record_attempts(
    tx: Transaction, reports: Sequence[AttemptReport], *, hopeless_s: float
) -> set[str]:
    """Record what came of attempts; return the ids of the deliveries that were still ours.

    An endpoint that answers 410, or has only failed for ``hopeless_s``, is disabled with the
    reason, and what was pending for it ends; so does what is pending for a URL of a job.
    """
    if not reports:
        return set()
    await record_successes(tx, _endpoints_of(reports, delivered=True))
    disabled = await record_failures(
        tx,
        _endpoints_of(reports, delivered=False),
        gone={r.delivery.endpoint_id for r in reports if r.is_gone and r.delivery.endpoint_id},
        hopeless_s=hopeless_s,
    )
    hopeless = await _record_receivers(tx, reports, hopeless_s)
    kept = await _record(tx, reports)
    await end_pending(tx, disabled)
    await receivers.end_hopeless(tx, hopeless)
    return kept


def _endpoints_of(reports: Iterable[AttemptReport], *, delivered: bool) -> set[str]:
    return {
        report.delivery.endpoint_id
        for report in reports
        if report.delivered is delivered and report.delivery.endpoint_id
    }


async def _record_receivers(
    tx: Transaction, reports: Sequence[AttemptReport], hopeless_s: float
) -> list[str]:
    """Clear those that took something, pause those that only failed; return the hopeless ones."""
    well = {report.delivery.receiver for report in reports if report.delivered}
    await receivers.clear_failures(tx, well)
    failures = [
        receivers.Failure(
            report.delivery.receiver, report.delivery.receiver_failures + 1, report.pause_s
        )
        for report in reports
        if report.pause_s is not None and report.delivery.receiver not in well
    ]
    return await receivers.record_failures(tx, failures, hopeless_s=hopeless_s)


async def _record(tx: Transaction, reports: Sequence[AttemptReport]) -> set[str]:
    rows = {report.delivery.id: _render(report) for report in reports}
    kept = set((await execute(tx, _RECORD, {"rows": pack(rows.values())})).scalars())
    if kept:
        fresh = pack(row for key, row in rows.items() if key in kept)
        await execute(tx, _ADD_ATTEMPTS, {"rows": fresh})
    return kept


def _render(report: AttemptReport) -> dict[str, Any]:
    state = "pending"
    if report.delivered:
        state = "delivered"
    elif report.next_attempt_s is None:
        state = "dead"
    return {
        "id": report.delivery.id,
        "attempt": report.delivery.attempt,
        "new_state": state,
        "failed": int(not report.delivered),
        "next_s": report.next_attempt_s or 0.0,
        "new_reason": report.reason if state == "dead" else None,
        "status": report.attempt.status,
        "latency_s": report.attempt.latency_s,
        "error": _clean(report.attempt.error),
        "answer": _clean(report.attempt.answer),
    }


async def _find_jobs(tx: Transaction, ids: set[str]) -> dict[str, JobRow]:
    if not ids:
        return {}
    query = select_jobs(payload=True).where(jobs.c.id.in_(ids))
    return {row.id: parse_job(row) for row in await tx.execute(query)}


async def _find_bulks(tx: Transaction, event_ids: set[str]) -> dict[str, BulkNews]:
    """Return what these events say, by their ids."""
    if not event_ids:
        return {}
    names = ("id", "kind", "metadata", "errors", "output_file_id", "error_file_id")
    query = (
        select(bulk_events.c.id.label("event"), bulk_events.c.data, *(bulks.c[n] for n in names))
        .join(bulks, bulks.c.id == bulk_events.c.bulk_id)
        .where(bulk_events.c.id.in_(event_ids))
    )
    return {
        row.event: BulkNews(counts=row.data, **{name: getattr(row, name) for name in names})
        for row in await tx.execute(query)
    }


def _parse_due(row: Row[Any], subjects: _Subjects) -> DueDelivery:
    own = [row.secret, row.old_secret] if row.old_secret_is_valid else [row.secret]
    return DueDelivery(
        id=row.id,
        attempt=row.attempt,
        failures=row.failures,
        url=row.url,
        tenant=row.tenant,
        endpoint_id=row.endpoint_id,
        receiver=row.receiver,
        receiver_failures=row.receiver_failures,
        event_id=row.event_id,
        event_type=EventType(row.type),
        event_at=row.event_at,
        sequence=row.sequence,
        job=subjects.jobs[row.job_id] if row.job_id else None,
        bulk=subjects.bulks[row.event_id] if row.bulk_id else None,
        secrets=own if row.endpoint_id else subjects.secrets[row.tenant],
    )


def _clean(text: str | None) -> str | None:
    """Cut to what is kept, without the characters that databases refuse."""
    if text is None:
        return None
    plain = text[:_ANSWER_CHARACTERS].replace("\0", "\ufffd")
    return plain.encode(errors="replace").decode()


_DESCRIBE = """
SELECT d.id, d.attempt, d.failures, d.url, d.tenant, d.endpoint_id, d.receiver, d.job_id,
    d.event_id, e.type, e.created_at AS event_at, e.sequence, e.bulk_id,
    p.id IS NOT NULL AND p.disabled_at IS NULL AS is_enabled, p.secret, p.old_secret,
    p.old_secret IS NOT NULL AND p.old_secret_until_at > {now} AS old_secret_is_valid,
    coalesce(r.failures, 0) AS receiver_failures
FROM {rows(id text)} c JOIN deliveries d ON d.id = c.id JOIN events e ON e.id = d.event_id
LEFT JOIN webhook_endpoints p ON p.id = d.endpoint_id
LEFT JOIN receivers r ON r.name = d.receiver
ORDER BY e.sequence
"""

_END = """
UPDATE deliveries SET state = 'dead', worker = NULL, finished_at = {now},
    reason = 'the endpoint is disabled or deleted'
WHERE id IN (SELECT id FROM {rows(id text)} c)
"""

_ROWS = (
    "id text, attempt integer, new_state text, failed integer, next_s real, new_reason text, "
    "status integer, latency_s real, error text, answer text"
)

_RECORD = f"""
WITH held AS MATERIALIZED (
    SELECT d.id AS held_id, c.new_state, c.failed, c.next_s, c.new_reason
    FROM deliveries d JOIN {{rows({_ROWS})}} c ON c.id = d.id AND c.attempt = d.attempt
    WHERE d.state = 'pending' AND d.worker IS NOT NULL  -- none: recorded already
    ORDER BY d.id {{lock d}})
UPDATE deliveries SET state = new_state, failures = failures + failed, worker = NULL,
    due_at = {{now}} + next_s, reason = new_reason,
    finished_at = CASE WHEN new_state = 'pending' THEN NULL ELSE {{now}} END
FROM held WHERE deliveries.id = held_id
RETURNING id
"""  # noqa: S608  # constants of ours

_ADD_ATTEMPTS = f"""
INSERT INTO delivery_attempts (delivery_id, attempt, created_at, status, latency_s, error, answer)
SELECT id, attempt, {{now}}, status, latency_s, error, answer FROM {{rows({_ROWS})}} c
"""  # noqa: S608  # constants of ours
