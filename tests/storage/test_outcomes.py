"""How jobs end: once, with one event, and only by the worker that holds them."""

from typing import Any

import pytest

from contract.errors import IllegalTransitionError, JobNotFoundError
from contract.jobs import JobState
from contract.webhooks import EventType
from storage.blobs import BlobInfo
from storage.database import Database
from storage.events import list_events
from storage.jobs import get_job
from storage.outcomes import cancel_job, complete_jobs, find_completed
from storage.receipts import get_receipt
from storage.refs import TensorRef
from tests.storage.factories import claim, complete, count, new_job, outcome, run_sql, submit

BLOB = BlobInfo("btc_1.safetensors", 128, "ab" * 32)


async def test_completing_stores_everything_at_once(database: Database) -> None:
    """State, counts, result, receipt, the place of the bytes, and one event."""
    (row,) = await submit(database, new_job(expires_after_s=50.0))
    jobs = await claim(database)

    assert await complete(database, jobs, BLOB) == {row.id}

    async with database.snapshot() as tx:
        stored = await get_job(tx, "t", row.id)
        (event,) = await list_events(tx, row.id)
        assert await get_receipt(tx, "receipt") == b"{}"
        assert await get_receipt(tx, "other") is None
    assert (stored.state, stored.scored_count, stored.failed_count) == ("succeeded", 2, 0)
    assert (stored.usage, stored.result) == (b'{"prompt_tokens":7}', b'{"labels":["a"]}')
    assert (stored.blob_key, stored.receipt_hash) == (BLOB.key, "receipt")
    assert stored.tensors == [TensorRef("scores", "F32", [2, 1], 64, 72)]
    assert stored.finished_at is not None
    assert stored.expires_at == pytest.approx(stored.finished_at + 50, abs=0.01)
    assert (event.type, event.job_id, event.generation) == (EventType.JOB_SUCCEEDED, row.id, 0)
    blobs = await run_sql(database, "SELECT key, size_bytes, sha256 FROM blobs")
    assert [tuple(blob) for blob in blobs] == [(BLOB.key, 128, BLOB.sha256)]


async def test_a_failure_keeps_its_reason(database: Database) -> None:
    """Without result, blob or receipt."""
    await submit(database, count=1)
    jobs = await claim(database)
    failure: dict[str, Any] = {
        "state": JobState.FAILED,
        "scored": 0,
        "failed": 2,
        "error": b'{"code":"x"}',
    }
    nothing: dict[str, Any] = {"result": None, "usage": None, "receipt": None, "tensors": []}
    await complete(database, jobs, None, **failure, **nothing)

    async with database.snapshot() as tx:
        row = await get_job(tx, "t", jobs[0].id)
        (event,) = await list_events(tx, row.id)
    assert (row.state, row.error, row.result, row.tensors) == ("failed", b'{"code":"x"}', None, [])
    assert event.type is EventType.JOB_FAILED


async def test_a_second_completion_is_fenced(database: Database) -> None:
    """Neither the result nor the event is written twice; nothing is left of the loser's blob."""
    await submit(database, count=1)
    jobs = await claim(database)
    await complete(database, jobs, BLOB)

    again = await complete(database, jobs, BlobInfo("btc_2", 1, ""), result=b'"late"')

    assert again == set()
    async with database.snapshot() as tx:
        assert (await get_job(tx, "t", jobs[0].id)).result == b'{"labels":["a"]}'
        assert await count(tx, "events") == 1
        assert await count(tx, "blobs") == 1


async def test_only_the_rows_still_held_are_completed(database: Database) -> None:
    """Of a batch in which one lease was lost and taken by another, the rest is stored."""
    await submit(database, count=3)
    jobs = await claim(database)
    await run_sql(database, "UPDATE jobs SET attempt = 2 WHERE id = :id", id=jobs[1].id)

    completed = await complete(database, jobs, BLOB)

    assert completed == {jobs[0].id, jobs[2].id}
    async with database.snapshot() as tx:
        assert (await get_job(tx, "t", jobs[1].id)).state is JobState.RUNNING
        assert await count(tx, "events") == 2


async def test_no_outcomes_are_no_statement(database: Database) -> None:
    """An empty batch completes nothing."""
    async with database.transaction() as tx:
        assert await complete_jobs(tx, []) == set()


async def test_an_unknown_commit_can_be_asked_about(database: Database) -> None:
    """Those that ended with this very blob are ours; others, and a rolled-back try, are not."""
    await submit(database, count=3)
    first, second, third = await claim(database)
    message = "the commit was lost"
    with pytest.raises(RuntimeError):  # noqa: PT012
        async with database.transaction() as tx:
            await complete_jobs(tx, [outcome(first)], BLOB)
            raise RuntimeError(message)
    await complete(database, [second], BLOB)
    await complete(database, [third])

    claims = [job.claim for job in (first, second, third)]
    async with database.snapshot() as tx:
        assert await find_completed(tx, claims, BLOB) == {second.id}
        assert await find_completed(tx, claims) == {third.id}


async def test_cancelling_a_queued_job_ends_it_at_once(database: Database) -> None:
    """With its event; a second time it is terminal."""
    (row,) = await submit(database, new_job(expires_after_s=9.0))
    async with database.transaction() as tx:
        cancelled = await cancel_job(tx, "t", row.id)
        with pytest.raises(IllegalTransitionError):
            await cancel_job(tx, "t", row.id)
        (event,) = await list_events(tx, row.id)

    assert cancelled.state is JobState.CANCELLED
    assert cancelled.expires_at is not None
    assert event.type is EventType.JOB_CANCELLED
    assert await claim(database) == []


async def test_cancelling_a_running_job_takes_its_result(database: Database) -> None:
    """The worker completes it as cancelled: no result, one event, whatever it had computed."""
    await submit(database, count=1)
    (job,) = await claim(database)
    async with database.transaction() as tx:
        first = await cancel_job(tx, "t", job.id)
        second = await cancel_job(tx, "t", job.id)
    assert first.state is JobState.RUNNING
    assert first.cancel_requested_at == second.cancel_requested_at is not None

    assert await complete(database, [job], BLOB) == {job.id}

    async with database.snapshot() as tx:
        row = await get_job(tx, "t", job.id)
        (event,) = await list_events(tx, job.id)
    assert (row.state, row.result, row.tensors, row.scored_count) == ("cancelled", None, [], 0)
    assert event.type is EventType.JOB_CANCELLED


async def test_only_ones_own_jobs_can_be_cancelled(database: Database) -> None:
    """Another tenant's is not found."""
    (row,) = await submit(database, new_job())
    async with database.transaction() as tx:
        with pytest.raises(JobNotFoundError):
            await cancel_job(tx, "other", row.id)
