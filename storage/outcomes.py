"""How jobs end: completed by the worker that holds them, or cancelled by their client."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.errors import ConflictError, IllegalTransitionError
from contract.jobs import RETRYABLE, JobState
from storage.blobs import BlobInfo
from storage.database import Transaction
from storage.events import ENDED, add_events
from storage.jobs import JobRow, get_job
from storage.receipts import put_receipts
from storage.refs import TensorRef, encode_tensors
from storage.statements import Claim, execute, pack

__all__ = ["JobOutcome", "cancel_job", "complete_jobs", "find_completed", "retry_job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How one job ended. ``usage``, ``result`` and ``error`` are JSON; ``tensors`` are in the blob.

    ``receipt`` is its hash and its body.
    """

    id: str
    attempt: int
    state: JobState
    scored: int
    failed: int
    usage: bytes | None = None
    result: bytes | None = None
    error: bytes | None = None
    receipt: tuple[str, bytes] | None = None
    tensors: list[TensorRef] = field(default_factory=list)

    @property
    def claim(self) -> Claim:
        """What fences this outcome."""
        return Claim(self.id, self.attempt)


async def complete_jobs(
    tx: Transaction, outcomes: Sequence[JobOutcome], blob: BlobInfo | None = None
) -> set[str]:
    """Store the outcomes, with one event each, and the deliveries; return the ids that were ours.

    ``blob`` is durable already and holds the tensors of all of them. Ids not returned are fenced:
    their result is dropped, and nothing else was written for them; where none is returned the
    caller deletes the blob. A job whose client asked to cancel becomes ``cancelled``, without
    result. After an ambiguous commit ask ``find_completed``.
    """
    if not outcomes:
        return set()
    parameters = {
        "rows": pack(_render(outcome) for outcome in outcomes),
        "blob_key": None if blob is None else blob.key,
    }
    ended = (await execute(tx, _COMPLETE, parameters)).all()
    completed = {row.id for row in ended}
    if not completed:
        return completed
    if blob is not None:
        await execute(
            tx,
            _ADD_BLOB,
            {"key": blob.key, "size_bytes": blob.size_bytes, "sha256": blob.sha256},
        )
    receipts = [outcome.receipt for outcome in outcomes if outcome.id in completed]
    await put_receipts(tx, dict(receipt for receipt in receipts if receipt is not None))
    await add_events(tx, ended)
    return completed


async def find_completed(
    tx: Transaction, claims: Sequence[Claim], blob: BlobInfo | None = None
) -> set[str]:
    """Return which claims have ended with this ``blob`` already: after an unknown commit."""
    parameters = {
        "rows": pack({"id": claim.id, "attempt": claim.attempt} for claim in claims),
        "blob_key": None if blob is None else blob.key,
    }
    return set((await execute(tx, _FIND_COMPLETED, parameters)).scalars())


async def cancel_job(tx: Transaction, tenant: str, job_id: str) -> JobRow:
    """Cancel a queued job at once; ask the worker of a running one to stop. Twice is harmless.

    Raises ``IllegalTransitionError`` for a terminal one, and as ``get_job`` does.
    """
    ended = (await execute(tx, _CANCEL, {"id": job_id, "tenant": tenant})).all()
    row = await get_job(tx, tenant, job_id)
    if not ended:
        raise IllegalTransitionError(current=row.state, wanted=JobState.CANCELLED)
    await add_events(tx, ended)
    return row


async def retry_job(tx: Transaction, tenant: str, job_id: str) -> JobRow:
    """Queue a job that left items without a score: the same id, a new generation.

    What was scored stays with the row, for the worker to keep. Its deadline in the queue is not
    set again. Raises ``ConflictError`` for a job of a bulk, ``IllegalTransitionError`` for any
    other, and as ``get_job`` does.
    """
    parameters = {"id": job_id, "tenant": tenant}
    retried = (await execute(tx, _RETRY, parameters)).one_or_none()
    row = await get_job(tx, tenant, job_id)
    if retried is None and row.bulk_id is not None:
        message = f"job {job_id} is part of bulk {row.bulk_id}; retry the bulk, which counts it"
        raise ConflictError(message)
    if retried is None:
        raise IllegalTransitionError(current=row.state, wanted=JobState.QUEUED)
    return row


def _render(outcome: JobOutcome) -> dict[str, Any]:
    return {
        "id": outcome.id,
        "attempt": outcome.attempt,
        "new_state": outcome.state.value,
        "new_scored": outcome.scored,
        "new_failed": outcome.failed,
        "new_usage": _text(outcome.usage),
        "new_result": _text(outcome.result),
        "new_error": _text(outcome.error),
        "new_receipt": None if outcome.receipt is None else outcome.receipt[0],
        "new_tensors": encode_tensors(outcome.tensors),
        "new_bytes": sum(tensor.end - tensor.begin for tensor in outcome.tensors),
    }


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode()


_ROWS = (
    "id text, attempt integer, new_state text, new_scored integer, new_failed integer, "
    "new_usage text, new_result text, new_error text, new_receipt text, new_tensors text, "
    "new_bytes bigint"
)

_COMPLETE = f"""
WITH held AS MATERIALIZED ({{held({_ROWS})}})
UPDATE jobs SET
    state = CASE WHEN cancel_requested_at IS NULL THEN new_state ELSE 'cancelled' END,
    scored_count = CASE WHEN cancel_requested_at IS NULL THEN new_scored ELSE 0 END,
    failed_count = CASE WHEN cancel_requested_at IS NULL THEN new_failed ELSE 0 END,
    usage = new_usage,
    result = CASE WHEN cancel_requested_at IS NULL THEN new_result ELSE NULL END,
    error = CASE WHEN cancel_requested_at IS NULL THEN new_error ELSE NULL END,
    receipt_hash = new_receipt,
    blob_key = :blob_key,
    stored_bytes = coalesce(length(request), 0) + new_bytes,
    tensors = CASE WHEN cancel_requested_at IS NULL THEN new_tensors ELSE NULL END,
    finished_at = {{now}}, expires_at = {{now}} + expires_after_s,
    lease_until_at = NULL, version = version + 1
FROM held WHERE jobs.id = held_id
RETURNING {ENDED}
"""  # noqa: S608  # constants of ours

_FIND_COMPLETED = """
SELECT j.id FROM jobs j JOIN {rows(id text, attempt integer)} c
ON c.id = j.id AND c.attempt = j.attempt
WHERE j.state NOT IN ('queued', 'running')
  AND (j.blob_key = :blob_key OR (j.blob_key IS NULL AND :blob_key IS NULL))
"""

_ADD_BLOB = """
INSERT INTO blobs (key, size_bytes, sha256, created_at)
VALUES (:key, :size_bytes, :sha256, {now}) ON CONFLICT DO NOTHING
"""

_RETRY = f"""
UPDATE jobs SET
    state = 'queued', generation = generation + 1, version = version + 1,
    crash_count = 0, error_count = 0, error = NULL, available_at = {{now}}, hinted_at = NULL,
    lease_until_at = NULL, queue_deadline_at = NULL, cancel_requested_at = NULL,
    finished_at = NULL, expires_at = NULL
WHERE id = :id AND tenant = :tenant AND deleted_at IS NULL AND bulk_id IS NULL
  AND state IN ({", ".join(f"'{state}'" for state in sorted(RETRYABLE))})
RETURNING id
"""  # noqa: S608  # constants of ours

_CANCEL = f"""
UPDATE jobs SET
    state = CASE state WHEN 'queued' THEN 'cancelled' ELSE state END,
    finished_at = CASE state WHEN 'queued' THEN {{now}} ELSE NULL END,
    expires_at = CASE state WHEN 'queued' THEN {{now}} + expires_after_s ELSE NULL END,
    cancel_requested_at = coalesce(cancel_requested_at, {{now}}), version = version + 1
WHERE id = :id AND tenant = :tenant AND state IN ('queued', 'running')
RETURNING {ENDED}
"""  # noqa: S608  # constants of ours
