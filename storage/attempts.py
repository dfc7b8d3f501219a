"""How attempts ended that did not end their job: the history of what is tried again.

An attempt that ends its job is the job's own row: only crashes, failures and releases are here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Row, select

from storage.database import Transaction
from storage.statements import execute, pack
from storage.tables import attempts

__all__ = ["ATTEMPT", "AttemptRow", "Outcome", "add_attempts", "list_attempts"]

#: ``lost``: its worker stopped answering; ``failed``: another one is due; ``released``: given back.
Outcome = Literal["lost", "failed", "released"]

#: The columns, beside ``id`` and ``attempt``, that a statement must return for ``add_attempts``.
ATTEMPT = "worker, started_at"


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One attempt that ended before its job. ``error`` is JSON, of one that failed."""

    attempt: int
    worker: str | None
    started_at: float | None
    ended_at: float
    outcome: Outcome
    error: bytes | None


async def add_attempts(
    tx: Transaction, ended: Sequence[Row[Any]], outcome: Outcome, error: bytes | None = None
) -> None:
    """Record that these attempts ended so, now."""
    if not ended:
        return
    rows = [
        {
            "job_id": row.id,
            "attempt": row.attempt,
            "worker": row.worker,
            "started_at": row.started_at,
            "outcome": outcome,
            "error": None if error is None else error.decode(),
        }
        for row in ended
    ]
    await execute(tx, _ADD, {"rows": pack(rows)})


async def list_attempts(tx: Transaction, job_id: str) -> list[AttemptRow]:
    """Return the recorded attempts of one job, the first one first."""
    query = select(attempts).where(attempts.c.job_id == job_id).order_by(attempts.c.attempt)
    return [
        AttemptRow(
            row.attempt,
            row.worker,
            row.started_at,
            row.ended_at,
            row.outcome,
            None if row.error is None else row.error.encode(),
        )
        for row in await tx.execute(query)
    ]


_ADD = """
INSERT INTO attempts (job_id, attempt, worker, started_at, ended_at, outcome, error)
SELECT job_id, attempt, worker, started_at, {now}, outcome, error
FROM {rows(job_id text, attempt integer, worker text, started_at real, outcome text, error text)} r
ORDER BY job_id
"""
