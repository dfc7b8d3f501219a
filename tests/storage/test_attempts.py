"""The history of a job: how the attempts ended that did not end it, or were one too many."""

from contract.jobs import JobState
from storage.attempts import list_attempts
from storage.claims import release_jobs, retry_later
from storage.database import Database
from storage.jobs import get_job
from storage.outcomes import retry_job
from storage.sweeps import reap_jobs
from tests.storage.factories import claim, complete, run_sql, submit

_LAPSE = "UPDATE jobs SET lease_until_at = lease_until_at - 1000 WHERE state = 'running'"
_ERROR = b'{"code":"forward_failed","message":"m"}'


async def _lose(database: Database, *, max_crashes: int = 9) -> None:
    await run_sql(database, _LAPSE)
    async with database.transaction() as tx:
        await reap_jobs(tx, max_crashes=max_crashes, limit=10)


async def test_each_early_end_is_recorded(database: Database) -> None:
    """Released, failed, lost: who had it, when, and why; the end of the job itself is its row's."""
    (row,) = await submit(database, count=1)
    (first,) = await claim(database, worker="a")
    async with database.transaction() as tx:
        await release_jobs(tx, [first.claim])
    (second,) = await claim(database, worker="b")
    async with database.transaction() as tx:
        await retry_later(tx, [second.claim], _ERROR, 0.0)
    await claim(database, worker="c")
    await _lose(database)
    await complete(database, await claim(database, worker="d"))

    async with database.snapshot() as tx:
        history = await list_attempts(tx, row.id)

    assert [(end.attempt, end.worker, end.outcome, end.error) for end in history] == [
        (1, "a", "released", None),
        (2, "b", "failed", _ERROR),
        (3, "c", "lost", None),
    ]
    for end in history:
        assert end.started_at is not None
        assert row.created_at <= end.started_at <= end.ended_at


async def test_a_poisoned_job_says_whom_it_killed(database: Database) -> None:
    """Each of its workers is named; a retry goes on with the numbers, and keeps the history."""
    (row,) = await submit(database, count=1)
    for worker in ("a", "b"):
        await claim(database, worker=worker)
        await _lose(database, max_crashes=2)
    async with database.snapshot() as tx:
        poisoned = await get_job(tx, "t", row.id)
        history = await list_attempts(tx, row.id)
    async with database.transaction() as tx:
        await retry_job(tx, "t", row.id)
    await claim(database, worker="c")
    await _lose(database, max_crashes=2)
    async with database.snapshot() as tx:
        longer = await list_attempts(tx, row.id)

    assert poisoned.state is JobState.FAILED
    assert [(end.worker, end.outcome) for end in history] == [("a", "lost"), ("b", "lost")]
    assert [end.worker for end in longer] == ["a", "b", "c"]


async def test_a_fenced_end_is_not_recorded(database: Database) -> None:
    """Who no longer holds a job cannot write its history."""
    (row,) = await submit(database, count=1)
    (stale,) = await claim(database, worker="a")
    await _lose(database)
    await claim(database, worker="b")
    async with database.transaction() as tx:
        await retry_later(tx, [stale.claim], _ERROR, 0.0)
        await release_jobs(tx, [stale.claim])
        history = await list_attempts(tx, row.id)

    assert [(end.worker, end.outcome) for end in history] == [("a", "lost")]


async def test_it_goes_with_the_job(database: Database) -> None:
    """When a tombstone is purged nothing is left of its attempts."""
    (row,) = await submit(database, count=1)
    await claim(database)
    await _lose(database)
    await run_sql(database, "DELETE FROM jobs WHERE id = :id", id=row.id)

    async with database.snapshot() as tx:
        assert await list_attempts(tx, row.id) == []
