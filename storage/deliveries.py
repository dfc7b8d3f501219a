"""Webhook deliveries: which are due, who is at them, and every attempt.

Claimed and fenced as jobs are: by an attempt number and a lease of the database's clock.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import select

from contract.webhooks import EventType
from storage.database import Transaction
from storage.jobs import JobRow, parse_job, select_jobs
from storage.statements import execute, pack
from storage.tables import delivery_attempts, jobs

__all__ = [
    "AttemptRow",
    "DeliveryAttempt",
    "DeliveryRow",
    "DueDelivery",
    "claim_deliveries",
    "list_deliveries",
    "record_attempt",
]

_ANSWER_CHARACTERS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class DueDelivery:
    """One delivery in a worker's hands. ``attempt`` counts from 1; ``job`` is as it is now."""

    id: str
    attempt: int
    url: str
    tenant: str
    event_id: str
    event_type: EventType
    event_at: float
    sequence: int
    job: JobRow


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryAttempt:
    """What came of one attempt: an HTTP ``status``, or the ``error`` that kept us from one."""

    latency_s: float
    status: int | None = None
    error: str | None = None
    answer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow(DeliveryAttempt):
    """An attempt as recorded."""

    attempt: int
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRow:
    """A delivery as stored, with its attempts, oldest first."""

    id: str
    event_id: str
    job_id: str
    url: str
    state: Literal["pending", "delivered", "dead"]
    created_at: float
    due_at: float
    finished_at: float | None
    attempts: list[AttemptRow]


async def claim_deliveries(
    tx: Transaction,
    *,
    worker: str,
    limit: int,
    lease_s: float,
    busy_origins: Collection[str] = (),
) -> list[DueDelivery]:
    """Take up to ``limit`` deliveries that are due; another worker may take them after ``lease_s``.

    ``lease_s`` must exceed the time that one attempt may take. URLs that start with one of
    ``busy_origins`` are left for later, so that one slow receiver does not fill the page.
    """
    busy = pack({"origin": origin} for origin in sorted(busy_origins))
    parameters = {"worker": worker, "limit": limit, "lease_s": lease_s, "rows": busy}
    claimed = (await execute(tx, _CLAIM, parameters)).all()
    if not claimed:
        return []
    query = select_jobs(payload=True).where(jobs.c.id.in_({row.job_id for row in claimed}))
    found = {row.id: parse_job(row) for row in await tx.execute(query)}
    due = [
        DueDelivery(
            id=row.id,
            attempt=row.attempt,
            url=row.url,
            tenant=row.tenant,
            event_id=row.event_id,
            event_type=EventType(row.type),
            event_at=row.event_at,
            sequence=row.sequence,
            job=found[row.job_id],
        )
        for row in claimed
    ]
    return sorted(due, key=lambda delivery: delivery.sequence)


async def record_attempt(
    tx: Transaction,
    delivery: DueDelivery,
    attempt: DeliveryAttempt,
    *,
    delivered: bool,
    next_attempt_s: float | None = None,
) -> bool:
    """Record what came of an attempt; false if another worker has the delivery meanwhile.

    Not delivered, it is tried again after ``next_attempt_s``; with none it is dead.
    """
    state = "delivered" if delivered else "dead" if next_attempt_s is None else "pending"
    parameters: dict[str, Any] = {
        "id": delivery.id,
        "attempt": delivery.attempt,
        "state": state,
        "finished": int(state != "pending"),
        "next_s": next_attempt_s or 0.0,
    }
    if (await execute(tx, _RECORD, parameters)).one_or_none() is None:
        return False
    values = {
        "id": delivery.id,
        "attempt": delivery.attempt,
        "status": attempt.status,
        "latency_s": attempt.latency_s,
        "error": _clean(attempt.error),
        "answer": _clean(attempt.answer),
    }
    await execute(tx, _ADD_ATTEMPT, values)
    return True


async def list_deliveries(tx: Transaction, tenant: str, job_id: str) -> list[DeliveryRow]:
    """Return the deliveries of one job with every attempt, oldest first."""
    parameters = {"tenant": tenant, "job_id": job_id}
    rows = (await execute(tx, _LIST, parameters)).all()
    query = (
        select(delivery_attempts)
        .where(delivery_attempts.c.delivery_id.in_({row.id for row in rows}))
        .order_by(delivery_attempts.c.attempt)
    )
    attempts: dict[str, list[AttemptRow]] = {row.id: [] for row in rows}
    for row in await tx.execute(query):
        attempts[row.delivery_id].append(
            AttemptRow(
                attempt=row.attempt,
                created_at=row.created_at,
                status=row.status,
                latency_s=row.latency_s,
                error=row.error,
                answer=row.answer,
            )
        )
    return [DeliveryRow(**row._mapping, attempts=attempts[row.id]) for row in rows]  # noqa: SLF001


def _clean(answer: str | None) -> str | None:
    """Cut to what is kept, without the character that PostgreSQL refuses."""
    return None if answer is None else answer[:_ANSWER_CHARACTERS].replace("\0", "\ufffd")


_CLAIM = """
WITH due AS MATERIALIZED (
    SELECT d.id AS due_id FROM deliveries d
    WHERE d.state = 'pending' AND d.due_at <= {now} AND NOT EXISTS (
        SELECT 1 FROM {rows(origin text)} b
        WHERE substr(d.url, 1, length(b.origin)) = b.origin)
    ORDER BY d.due_at LIMIT :limit {skip d})
UPDATE deliveries SET attempt = attempt + 1, worker = :worker, due_at = {now} + :lease_s
FROM due WHERE deliveries.id = due_id
RETURNING id, attempt, url, tenant, job_id, event_id,
    (SELECT e.type FROM events e WHERE e.id = event_id) AS type,
    (SELECT e.created_at FROM events e WHERE e.id = event_id) AS event_at,
    (SELECT e.sequence FROM events e WHERE e.id = event_id) AS sequence
"""

_RECORD = """
UPDATE deliveries SET state = :state, due_at = {now} + :next_s,
    finished_at = CASE WHEN :finished = 1 THEN {now} END
WHERE id = :id AND attempt = :attempt AND state = 'pending'
RETURNING id
"""

_ADD_ATTEMPT = """
INSERT INTO delivery_attempts (delivery_id, attempt, created_at, status, latency_s, error, answer)
VALUES (:id, :attempt, {now}, :status, :latency_s, :error, :answer)
"""

_LIST = """
SELECT id, event_id, job_id, url, state, created_at, due_at, finished_at FROM deliveries
WHERE job_id = :job_id AND tenant = :tenant ORDER BY id
"""
