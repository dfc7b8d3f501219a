"""Sweeps: what time does to jobs. Each takes a bounded page; several processes may run them."""

from dataclasses import dataclass

import msgspec

from contract.errors import DeadlineExceededError, PoisonedError
from contract.jobs import JobState
from contract.scores import Problem
from storage.attempts import ATTEMPT, add_attempts
from storage.database import Transaction
from storage.events import ENDED, add_events
from storage.refs import BlobRef
from storage.statements import execute, pack, render_hint

__all__ = ["Reaped", "collect_expired", "expire_jobs", "purge_bulks", "purge_events"]
__all__ += ["purge_tombstones", "reap_jobs", "unforgotten_refs"]


@dataclass(frozen=True, slots=True)
class Reaped:
    """What became of jobs whose lease ran out; ``requeued`` are hints, the others ids."""

    requeued: list[str]
    failed: list[str]
    cancelled: list[str]


async def reap_jobs(tx: Transaction, *, max_crashes: int, limit: int) -> Reaped:
    """Take jobs from workers that stopped renewing; each counts as a crash of the job.

    They are queued again; at ``max_crashes`` they fail as ``poisoned``, or stay ``partial`` where
    an earlier generation has scores; those whose client asked to cancel are cancelled.
    """
    message = f"the workers that held this job stopped answering, {max_crashes} times"
    parameters = {
        "max_crashes": max_crashes,
        "limit": limit,
        "poisoned": _problem(PoisonedError.code, message, PoisonedError.http_status),
    }
    rows = (await execute(tx, _REAP, parameters)).all()
    await add_attempts(tx, rows, "lost")
    await add_events(tx, rows)
    return Reaped(
        requeued=[
            render_hint(row.id, row.attempt, row.model)
            for row in rows
            if row.state == JobState.QUEUED
        ],
        failed=[row.id for row in rows if row.state in {JobState.FAILED, JobState.PARTIAL}],
        cancelled=[row.id for row in rows if row.state == JobState.CANCELLED],
    )


async def expire_jobs(tx: Transaction, *, limit: int) -> list[str]:
    """End jobs that no worker took before their queue deadline; return their ids."""
    message = "no worker took this job before its queue deadline"
    error = _problem("expired", message, DeadlineExceededError.http_status)
    rows = (await execute(tx, _EXPIRE, {"limit": limit, "error": error})).all()
    await add_events(tx, rows)
    return [row.id for row in rows]


async def collect_expired(tx: Transaction, *, limit: int) -> list[BlobRef]:
    """Turn jobs past their retention into tombstones; return the blobs that hold bytes of them.

    One with a delivery that is still due waits for it: an event says the same at every attempt.
    The log of deliveries and the history of attempts go with the job, the bytes after the commit,
    by ``forgetting.forget``.
    """
    rows = (await execute(tx, _COLLECT, {"limit": limit})).all()
    if rows:
        gone = pack({"id": row.id} for row in rows)
        for statement in (_DROP_DELIVERIES, _DROP_ATTEMPTS):
            await execute(tx, statement, {"rows": gone})
    return [BlobRef(row.id, row.blob_key) for row in rows if row.blob_key is not None]


async def purge_tombstones(tx: Transaction, *, older_than_s: float, limit: int) -> int:
    """Delete tombstones of jobs that long after the deletion; return how many.

    Their events and what the score cache knew of them go too. From then on the id answers 404
    instead of 410. One whose bytes are still there stays.
    """
    parameters = {"older_than_s": older_than_s, "limit": limit}
    purged = list((await execute(tx, _PURGE, parameters)).scalars())
    if purged:
        await execute(tx, _DROP_CACHED, {"rows": pack({"id": job_id} for job_id in purged)})
    return len(purged)


async def purge_bulks(tx: Transaction, *, older_than_s: float, limit: int) -> int:
    """Delete tombstones of bulks that long after the deletion; return how many."""
    parameters = {"older_than_s": older_than_s, "limit": limit}
    return (await execute(tx, _PURGE_BULKS, parameters)).rowcount


async def purge_events(tx: Transaction, *, older_than_s: float, limit: int) -> int:
    """Delete that old events of bulks and test events; return how many.

    Their deliveries go too, so one with a delivery that is still due waits for it. Events of jobs
    go with their job.
    """
    parameters = {"older_than_s": older_than_s, "limit": limit}
    return (await execute(tx, _PURGE_EVENTS, parameters)).rowcount


async def unforgotten_refs(tx: Transaction, *, limit: int) -> list[BlobRef]:
    """Return tombstones whose bytes are still there: who should have deleted them has died."""
    rows = await execute(tx, _UNFORGOTTEN, {"limit": limit})
    return [BlobRef(row.id, row.blob_key) for row in rows]


def _problem(code: str, message: str, status: int) -> str:
    return msgspec.json.encode(Problem(code=code, message=message, status=status)).decode()


_REAP = f"""
WITH due AS MATERIALIZED (
    SELECT j.id AS due_id,
           CASE WHEN j.cancel_requested_at IS NOT NULL THEN 'cancelled'
                WHEN j.crash_count + 1 < :max_crashes THEN 'queued'
                WHEN j.scored_count > 0 THEN 'partial' ELSE 'failed' END AS next
    FROM jobs j WHERE j.state = 'running' AND j.lease_until_at < {{now}}
    ORDER BY j.lease_until_at LIMIT :limit {{skip j}})
UPDATE jobs SET
    state = next, crash_count = crash_count + 1, lease_until_at = NULL, hinted_at = NULL,
    available_at = {{now}}, version = version + 1,
    error = CASE WHEN next IN ('failed', 'partial') THEN :poisoned ELSE error END,
    failed_count = CASE next WHEN 'failed' THEN item_count ELSE failed_count END,
    finished_at = CASE next WHEN 'queued' THEN NULL ELSE {{now}} END,
    expires_at = CASE next WHEN 'queued' THEN NULL ELSE {{now}} + expires_after_s END
FROM due WHERE jobs.id = due_id
RETURNING {ENDED}, model, {ATTEMPT}
"""  # noqa: S608  # constants of ours

_EXPIRE = f"""
WITH due AS MATERIALIZED (
    SELECT j.id AS due_id FROM jobs j
    WHERE j.state = 'queued' AND j.queue_deadline_at IS NOT NULL
      AND j.queue_deadline_at <= {{now}}
    ORDER BY j.queue_deadline_at LIMIT :limit {{skip j}})
UPDATE jobs SET
    state = 'expired', error = :error, finished_at = {{now}},
    expires_at = {{now}} + expires_after_s, version = version + 1
FROM due WHERE jobs.id = due_id
RETURNING {ENDED}
"""  # noqa: S608  # constants of ours

_COLLECT = """
WITH due AS MATERIALIZED (
    SELECT j.id AS due_id FROM jobs j
    WHERE j.expires_at IS NOT NULL AND j.deleted_at IS NULL AND j.expires_at <= {now}
      AND NOT EXISTS (SELECT 1 FROM deliveries d WHERE d.job_id = j.id AND d.state = 'pending')
    ORDER BY j.expires_at LIMIT :limit {skip j})
UPDATE jobs SET
    deleted_at = {now}, request = NULL, result = NULL, tensors = NULL, usage = NULL, error = NULL,
    metadata = '{}', webhook_url = NULL, origin = NULL, stored_bytes = NULL, version = version + 1
FROM due WHERE jobs.id = due_id
RETURNING id, blob_key
"""

_DROP_DELIVERIES = """
DELETE FROM deliveries WHERE job_id IN (SELECT r.id FROM {rows(id text)} r)
"""

_DROP_ATTEMPTS = """
DELETE FROM attempts WHERE job_id IN (SELECT r.id FROM {rows(id text)} r)
"""

_PURGE = """
DELETE FROM jobs WHERE id IN (
    SELECT id FROM jobs
    WHERE deleted_at IS NOT NULL AND blob_key IS NULL AND deleted_at < {now} - :older_than_s
    ORDER BY deleted_at LIMIT :limit)
RETURNING id
"""

_DROP_CACHED = """
DELETE FROM score_cache WHERE job_id IN (SELECT r.id FROM {rows(id text)} r)
"""

_PURGE_BULKS = """
DELETE FROM bulks WHERE id IN (
    SELECT id FROM bulks WHERE deleted_at < {now} - :older_than_s
    ORDER BY deleted_at LIMIT :limit)
"""

_PURGE_EVENTS = """
DELETE FROM events WHERE id IN (
    SELECT e.id FROM events e WHERE e.job_id IS NULL AND e.created_at < {now} - :older_than_s
      AND NOT EXISTS (
          SELECT 1 FROM deliveries d WHERE d.event_id = e.id AND d.state = 'pending')
    ORDER BY e.created_at LIMIT :limit)
"""

_UNFORGOTTEN = """
SELECT id, blob_key FROM jobs WHERE deleted_at IS NOT NULL AND blob_key IS NOT NULL
ORDER BY deleted_at LIMIT :limit
"""
