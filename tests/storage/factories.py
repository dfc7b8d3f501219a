"""Rows for the tests of storage, with everything that a test does not care about filled in."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import text

from contract.jobs import JobState, Lane
from storage.blobs import BlobInfo
from storage.claims import ClaimedJob, claim_jobs
from storage.database import Database, Transaction
from storage.jobs import JobRow, NewJob, add_jobs
from storage.outcomes import JobOutcome, complete_jobs
from storage.refs import TensorRef

REQUEST = b'{"model":"m","items":["one","two"]}'


def new_job(**changes: Any) -> NewJob:
    """Return a job of tenant ``t`` for model ``m``."""
    values: dict[str, Any] = {
        "tenant": "t",
        "model": "m",
        "lane": Lane.NORMAL,
        "request": REQUEST,
        "item_count": 2,
        "estimated_tokens": 10,
    }
    return NewJob(**(values | changes))


async def submit(database: Database, *jobs: NewJob, count: int = 0) -> list[JobRow]:
    """Add ``jobs``, or ``count`` plain ones, in a transaction of their own."""
    async with database.transaction() as tx:
        return await add_jobs(tx, list(jobs) + [new_job() for _ in range(count)])


async def claim(database: Database, **changes: Any) -> list[ClaimedJob]:
    """Claim in a transaction of its own; never an aged claim unless asked for."""
    values: dict[str, Any] = {
        "worker": "w",
        "models": ["m"],
        "max_jobs": 64,
        "max_tokens": 100_000,
        "lease_s": 30.0,
        "aged_first": False,
    }
    async with database.transaction() as tx:
        return await claim_jobs(tx, **(values | changes))


def outcome(job: ClaimedJob, **changes: Any) -> JobOutcome:
    """Return a success of ``job``."""
    values: dict[str, Any] = {
        "id": job.id,
        "attempt": job.attempt,
        "state": JobState.SUCCEEDED,
        "scored": 2,
        "failed": 0,
        "usage": b'{"prompt_tokens":7}',
        "result": b'{"labels":["a"]}',
        "receipt": ("receipt", b"{}"),
        "tensors": [TensorRef("scores", "F32", [2, 1], 64, 72)],
    }
    return JobOutcome(**(values | changes))


async def complete(
    database: Database, jobs: Iterable[ClaimedJob], blob: BlobInfo | None = None, **changes: Any
) -> set[str]:
    """Complete ``jobs`` in a transaction of their own."""
    async with database.transaction() as tx:
        return await complete_jobs(tx, [outcome(job, **changes) for job in jobs], blob)


async def run_sql(database: Database, statement: str, **parameters: Any) -> list[Any]:
    """Run one statement, and return its rows where it has any."""
    async with database.transaction() as tx:
        result = await tx.execute(text(statement), parameters)
        return list(result) if result.returns_rows else []


async def count(tx: Transaction, table: str) -> int:
    """Return how many rows ``table`` has."""
    number: int = (await tx.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one()  # noqa: S608
    return number
