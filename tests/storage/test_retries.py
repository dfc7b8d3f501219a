"""A client's retry: the same id, a new generation, what was scored stays."""

import pytest

from contract.errors import GoneError, IllegalTransitionError, JobNotFoundError
from contract.jobs import JobState
from storage.blobs import BlobInfo, BlobStore
from storage.database import Database
from storage.events import list_events
from storage.forgetting import delete_job, rewrite
from storage.jobs import JobRow, get_job, list_jobs
from storage.outcomes import cancel_job, retry_job
from storage.refs import TensorRef
from storage.sweeps import expire_jobs, purge_tombstones, reap_jobs
from tests.storage.factories import claim, complete, count, new_job, run_sql, submit

_LAPSE = "UPDATE jobs SET lease_until_at = lease_until_at - 1000 WHERE state = 'running'"


async def _retry(database: Database, job_id: str) -> JobRow:
    async with database.transaction() as tx:
        return await retry_job(tx, "t", job_id)


async def _get(database: Database, job_id: str) -> JobRow:
    async with database.snapshot() as tx:
        return await get_job(tx, "t", job_id)


async def test_a_failed_job_runs_again_and_ends_again(database: Database) -> None:
    """A new generation with its own event; crashes and errors of the old one are forgotten."""
    (row,) = await submit(database, count=1)
    for _ in range(2):
        await claim(database)
        await run_sql(database, _LAPSE)
        async with database.transaction() as tx:
            await reap_jobs(tx, max_crashes=2, limit=10)
    assert (await _get(database, row.id)).state is JobState.FAILED

    again = await _retry(database, row.id)
    (job,) = await claim(database)
    await complete(database, [job])

    assert (again.state, again.generation, again.crash_count) == (JobState.QUEUED, 1, 0)
    assert (again.error, again.finished_at, again.expires_at) == (None, None, None)
    assert (job.attempt, job.kept) == (3, None)
    async with database.snapshot() as tx:
        events = await list_events(tx, row.id)
    assert [(event.generation, event.type) for event in events] == [
        (0, "job.failed"),
        (1, "job.succeeded"),
    ]


async def test_what_was_scored_comes_with_the_claim(database: Database) -> None:
    """Of a partial job the worker gets result, usage and tensors, until the next end."""
    (row,) = await submit(database, count=1)
    await complete(
        database, await claim(database), BlobInfo("b", 1, ""), state=JobState.PARTIAL, scored=1
    )
    await _retry(database, row.id)

    (job,) = await claim(database)

    assert job.kept is not None
    assert (job.kept.blob_key, job.kept.result) == ("b", b'{"labels":["a"]}')
    assert job.kept.usage == b'{"prompt_tokens":7}'
    assert job.kept.tensors == [TensorRef("scores", "F32", [2, 1], 64, 72)]


async def test_a_poisoned_retry_leaves_what_was_scored(database: Database) -> None:
    """The job is partial again, with the reason."""
    (row,) = await submit(database, count=1)
    await complete(
        database,
        await claim(database),
        BlobInfo("b", 1, ""),
        state=JobState.PARTIAL,
        scored=1,
        failed=1,
    )
    await _retry(database, row.id)
    await claim(database)
    await run_sql(database, _LAPSE)
    async with database.transaction() as tx:
        reaped = await reap_jobs(tx, max_crashes=1, limit=10)

    stored = await _get(database, row.id)
    assert reaped.failed == [row.id]
    assert (stored.state, stored.scored_count, stored.failed_count) == ("partial", 1, 1)
    assert stored.error is not None
    assert b"poisoned" in stored.error
    assert stored.result is not None


async def test_an_expired_job_may_be_retried_without_its_deadline(database: Database) -> None:
    """Its time in the queue passed once; the retry waits as long as it takes."""
    (row,) = await submit(database, new_job(queue_deadline_s=60))
    await run_sql(database, "UPDATE jobs SET queue_deadline_at = 1")
    async with database.transaction() as tx:
        assert await expire_jobs(tx, limit=1) == [row.id]

    again = await _retry(database, row.id)

    assert again.queue_deadline_at is None
    assert len(await claim(database)) == 1


async def test_other_states_are_refused(database: Database) -> None:
    """Queued, running, succeeded, cancelled, deleted and unknown jobs cannot be retried."""
    queued, running, succeeded, cancelled, deleted = await submit(database, count=5)
    async with database.transaction() as tx:
        await cancel_job(tx, "t", cancelled.id)
    await run_sql(database, "UPDATE jobs SET model = 'x' WHERE id = :id", id=queued.id)
    held = {job.id: job for job in await claim(database)}
    await complete(database, [held[succeeded.id], held[deleted.id]])
    async with database.transaction() as tx:
        await delete_job(tx, "t", deleted.id)

    for job in (queued, running, succeeded, cancelled):
        with pytest.raises(IllegalTransitionError):
            await _retry(database, job.id)
    with pytest.raises(GoneError):
        await _retry(database, deleted.id)
    with pytest.raises(JobNotFoundError):
        await _retry(database, "job_0")


async def test_dead_jobs_are_listed_by_their_error(database: Database) -> None:
    """The code alone decides, whatever the message says."""
    first, second = await submit(database, count=2)
    held = await claim(database)
    error = b'{"code":"poisoned","message":"not out_of_memory"}'
    await complete(database, [held[0]], state=JobState.FAILED, error=error)
    await complete(database, [held[1]], state=JobState.FAILED, error=b'{"code":"out_of_memory"}')
    async with database.snapshot() as tx:
        found = await list_jobs(tx, "t", state=JobState.FAILED, error_code="poisoned")
        other = await list_jobs(tx, "t", error_code="out_of_memory")

    assert [row.id for row in found] == [first.id]
    assert [row.id for row in other] == [second.id]


async def test_a_blob_that_a_retry_left_loses_its_rows(
    database: Database, blob_store: BlobStore
) -> None:
    """Nobody names it any more: it is dropped, row and bytes."""
    info = await blob_store.put("old", b"bytes")
    (row,) = await submit(database, count=1)
    await complete(database, await claim(database), info, state=JobState.PARTIAL, scored=1)
    await _retry(database, row.id)
    await complete(database, await claim(database), await blob_store.put("new", b"bytes"))

    await rewrite(database, blob_store, "old")
    await rewrite(database, blob_store, "old")

    assert [entry.key async for entry in blob_store.list()] == ["new"]
    async with database.snapshot() as tx:
        assert await count(tx, "blobs") == 1


async def test_old_tombstones_are_purged_with_their_events(database: Database) -> None:
    """Long after the deletion the row goes too, unless bytes are still to be removed."""
    await submit(database, count=3)
    held = await claim(database)
    await complete(database, held[:2])
    await complete(database, held[2:], BlobInfo("b", 1, ""))
    async with database.transaction() as tx:
        for job in held:
            await delete_job(tx, "t", job.id)
        assert await purge_tombstones(tx, older_than_s=60, limit=10) == 0
    await run_sql(database, "UPDATE jobs SET deleted_at = 1")
    async with database.transaction() as tx:
        assert await purge_tombstones(tx, older_than_s=60, limit=1) == 1
        assert await purge_tombstones(tx, older_than_s=60, limit=10) == 1
        assert await count(tx, "events") == await count(tx, "jobs") == 1
