"""What time does to jobs: leases, deadlines, retention."""

import asyncio

from contract.errors import PoisonedError
from contract.jobs import JobState
from contract.scores import Problem, parse_json
from storage.blobs import BlobInfo
from storage.database import Database
from storage.events import list_events
from storage.jobs import get_job
from storage.outcomes import cancel_job
from storage.refs import BlobRef
from storage.sweeps import Reaped, collect_expired, expire_jobs, reap_jobs, unforgotten_refs
from tests.storage.factories import claim, complete, new_job, run_sql, submit

_LAPSE = "UPDATE jobs SET lease_until_at = lease_until_at - 1000 WHERE state = 'running'"


async def _reap(database: Database, max_crashes: int = 3, limit: int = 100) -> Reaped:
    async with database.transaction() as tx:
        return await reap_jobs(tx, max_crashes=max_crashes, limit=limit)


async def test_an_expired_lease_returns_the_job_to_the_queue(database: Database) -> None:
    """One crash is counted; what the lost worker sends later is fenced."""
    await submit(database, count=1)
    (job,) = await claim(database)
    assert (await _reap(database)).requeued == []
    await run_sql(database, _LAPSE)

    reaped = await _reap(database)

    assert reaped == Reaped([f"{job.id}:1:m"], [], [])
    assert await complete(database, [job]) == set()
    (again,) = await claim(database)
    assert (again.attempt, again.crash_count) == (2, 1)
    assert await complete(database, [job]) == set()
    assert await complete(database, [again]) == {job.id}


async def test_a_job_that_keeps_killing_workers_fails(database: Database) -> None:
    """At the limit it is poisoned, with an event, and no worker sees it again."""
    (row,) = await submit(database, count=1)
    reaped = []
    for _ in range(2):
        await claim(database)
        await run_sql(database, _LAPSE)
        reaped.append(await _reap(database, max_crashes=2))

    assert reaped[1] == Reaped([], [row.id], [])
    async with database.snapshot() as tx:
        stored = await get_job(tx, "t", row.id)
        (event,) = await list_events(tx, row.id)
    assert (stored.state, stored.crash_count, stored.failed_count) == ("failed", 2, 2)
    assert parse_json(stored.error or b"", Problem).code == PoisonedError.code
    assert event.type == "job.failed"
    assert await claim(database) == []


async def test_a_cancelled_job_whose_worker_died_is_cancelled(database: Database) -> None:
    """Nobody is left to do it, so the sweep does."""
    await submit(database, count=1)
    (job,) = await claim(database)
    async with database.transaction() as tx:
        await cancel_job(tx, "t", job.id)
    await run_sql(database, _LAPSE)

    assert await _reap(database) == Reaped([], [], [job.id])

    async with database.snapshot() as tx:
        assert (await get_job(tx, "t", job.id)).state is JobState.CANCELLED
        assert len(await list_events(tx, job.id)) == 1


async def test_sweeps_share_their_pages(database: Database) -> None:
    """Several at once take each row once, and no more than their limit."""
    await submit(database, count=30)
    await claim(database)
    await run_sql(database, _LAPSE)

    found = await asyncio.gather(*(_reap(database, limit=10) for _ in range(4)))
    found.append(await _reap(database))

    hints = [hint for reaped in found for hint in reaped.requeued]
    assert len(hints) == len(set(hints)) == 30
    assert max(len(reaped.requeued) for reaped in found[:4]) <= 10


async def test_a_queue_deadline_ends_what_nobody_took(database: Database) -> None:
    """With an event and a reason; a job that was taken in time is left alone."""
    late, other = await submit(database, new_job(queue_deadline_s=0.001), new_job(model="n"))
    (taken,) = await submit(database, new_job(model="z", queue_deadline_s=60))
    await claim(database, models=["z"])
    await asyncio.sleep(0.005)
    async with database.transaction() as tx:
        assert await expire_jobs(tx, limit=10) == [late.id]
        assert await expire_jobs(tx, limit=10) == []
        row = await get_job(tx, "t", late.id)
        (event,) = await list_events(tx, late.id)

    assert row.state is JobState.EXPIRED
    assert parse_json(row.error or b"", Problem).status == 504
    assert event.type == "job.expired"
    assert {taken.id, other.id} == {
        row.id for row in await run_sql(database, "SELECT id FROM jobs WHERE state != 'expired'")
    }


async def test_retention_leaves_tombstones_that_name_their_bytes(database: Database) -> None:
    """What passed its time is emptied; the blob is named until the bytes are gone."""
    await submit(database, new_job(expires_after_s=0.001), new_job(expires_after_s=60))
    first, _ = jobs = await claim(database)
    await complete(database, jobs, BlobInfo("blob", 1, ""))
    await submit(database, new_job(expires_after_s=0.001))
    await complete(database, await claim(database))
    await asyncio.sleep(0.005)
    async with database.transaction() as tx:
        assert await collect_expired(tx, limit=10) == [BlobRef(first.id, "blob")]
        assert await collect_expired(tx, limit=10) == []
        assert await unforgotten_refs(tx, limit=10) == [BlobRef(first.id, "blob")]
    left = await run_sql(database, "SELECT result FROM jobs WHERE deleted_at IS NOT NULL")
    assert [row.result for row in left] == [None, None]


async def test_retention_waits_for_a_delivery_that_is_due(database: Database) -> None:
    """An event says the same at every attempt, so its job keeps what it says until the last."""
    await submit(database, new_job(expires_after_s=0.001, webhook_url="https://e.com/hook"))
    (job,) = jobs = await claim(database)
    await complete(database, jobs, BlobInfo("blob", 1, ""))
    await asyncio.sleep(0.005)
    async with database.transaction() as tx:
        early = await collect_expired(tx, limit=10)
    await run_sql(database, "UPDATE deliveries SET state = 'delivered'")
    async with database.transaction() as tx:
        late = await collect_expired(tx, limit=10)

    assert (early, late) == ([], [BlobRef(job.id, "blob")])
