"""Claims: the order, the limits, the lease, and that two workers never hold one job."""

import asyncio
import statistics
import time
from typing import Any

import pytest

from contract.jobs import JobState, Lane
from contract.limits import TenantLimits
from storage.claims import (
    Claim,
    claim_jobs,
    mark_hinted,
    next_tenant,
    release_jobs,
    renew_leases,
    retry_later,
    unhinted_jobs,
)
from storage.database import Database
from storage.events import list_events
from storage.jobs import get_job
from storage.limits import put_limits
from storage.outcomes import cancel_job
from tests.storage.factories import REQUEST, claim, complete, new_job, run_sql, submit


async def test_a_claim_takes_the_job_and_gives_all_that_scoring_needs(database: Database) -> None:
    """The row runs, its attempt has grown, and its deadline in the queue no longer counts."""
    (row,) = await submit(database, new_job(run_timeout_s=3.0, queue_deadline_s=60.0))
    (job,) = await claim(database, worker="me")

    async with database.snapshot() as tx:
        stored = await get_job(tx, "t", row.id)
    assert (job.id, job.attempt, job.model, job.lane) == (row.id, 1, "m", Lane.NORMAL)
    assert (job.request, job.run_timeout_s, job.item_count) == (REQUEST, 3.0, 2)
    assert job.claim == Claim(row.id, 1)
    assert (stored.state, stored.attempt, stored.worker) == (JobState.RUNNING, 1, "me")
    assert stored.started_at is not None
    assert stored.queue_deadline_at is None
    assert await claim(database) == []


async def test_nothing_is_claimed_of_other_models(database: Database) -> None:
    """A worker gets jobs of the models that it names, of one model at a time."""
    await submit(database, new_job(model="a"), new_job(model="b"), new_job(model="a"))

    assert await claim(database, models=["c"]) == []
    assert await claim(database, models=[]) == []
    assert [job.model for job in await claim(database, models=["b", "a"])] == ["a", "a"]
    assert [job.model for job in await claim(database, models=["b", "a"])] == ["b"]


@pytest.mark.slow
async def test_a_thousand_tenants_take_turns(database: Database) -> None:
    """A claim sees a window of them, moves it on, and no tenant is forgotten."""
    names = [f"tenant-{number:04}" for number in range(1000)]
    await submit(database, *(new_job(tenant=name) for name in names))
    after = ""
    served: list[str] = []
    costs: list[float] = []
    while len(served) < len(names):
        started_at = time.perf_counter()
        jobs = await claim(database, max_jobs=64, after_tenant=after)
        costs.append(time.perf_counter() - started_at)
        assert jobs
        after = next_tenant(after, jobs)
        served += [job.tenant for job in jobs]

    assert sorted(served) == names
    print(f"claim, 1000 tenants: median {statistics.median(costs) * 1000:.1f} ms")  # noqa: T201


async def test_limits_of_jobs_and_tokens_hold(database: Database) -> None:
    """At least one job whatever its size; never more than the limits with a second."""
    await submit(database, *(new_job(estimated_tokens=tokens) for tokens in (900, 50, 50, 50)))

    assert len(await claim(database, max_tokens=100)) == 1
    assert len(await claim(database, max_tokens=100)) == 2
    await submit(database, count=5)
    assert len(await claim(database, max_jobs=4)) == 4


async def test_lanes_are_served_in_order(database: Database) -> None:
    """Interactive before normal before bulk, however late it came; bulk fills what is left."""
    await submit(database, *(new_job(lane=lane) for lane in reversed(Lane) for _ in range(2)))

    assert [job.lane for job in await claim(database, max_jobs=3)] == [
        Lane.INTERACTIVE,
        Lane.INTERACTIVE,
        Lane.NORMAL,
    ]
    assert [job.lane for job in await claim(database)] == [Lane.NORMAL, Lane.BULK, Lane.BULK]


async def test_a_claim_can_leave_the_lower_lanes(database: Database) -> None:
    """A worker with little room takes the urgent alone."""
    await submit(database, *(new_job(lane=lane) for lane in Lane))

    found = await claim(database, last_lane=Lane.INTERACTIVE)

    assert [job.lane for job in found] == [Lane.INTERACTIVE]
    assert await claim(database, last_lane=Lane.INTERACTIVE) == []
    assert len(await claim(database)) == 2


async def test_an_aged_claim_serves_what_waited_too_long(database: Database) -> None:
    """A busy lane does not starve the others: old bulk jobs come first in such a claim."""
    await submit(database, *(new_job(lane=Lane.BULK) for _ in range(2)))
    await run_sql(database, "UPDATE jobs SET created_at = created_at - 100")
    await submit(database, new_job(lane=Lane.BULK), new_job(lane=Lane.INTERACTIVE))

    first = await claim(database, max_jobs=1)
    aged = await claim(database, max_jobs=2, aged_first=True)

    assert [job.lane for job in first] == [Lane.INTERACTIVE]
    assert all(job.created_at < first[0].created_at - 50 for job in aged)
    assert len(aged) == 2


async def test_ageing_is_drawn_by_chance(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One claim in eight is an aged one."""
    monkeypatch.setattr("storage.claims.random.randrange", lambda _: 0)
    await submit(database, new_job(lane=Lane.BULK))
    await run_sql(database, "UPDATE jobs SET created_at = created_at - 100")
    await submit(database, new_job())

    (job,) = await claim(database, max_jobs=1, aged_first=None)

    assert job.lane is Lane.BULK


async def test_tenants_take_turns(database: Database) -> None:
    """A tenant with a thousand jobs does not hold up one with three that come later."""
    await submit(database, *(new_job(tenant="big") for _ in range(200)))
    await submit(database, *(new_job(tenant=name) for name in ("one", "two", "two")))

    tenants = [job.tenant for job in await claim(database, max_jobs=8)]

    assert sorted(tenants) == ["big"] * 5 + ["one"] + ["two"] * 2


async def test_a_tenant_with_enough_running_gets_nothing_more(database: Database) -> None:
    """By the limit of all, or by its own; others go on, and room comes back with each end."""
    async with database.transaction() as tx:
        await put_limits(tx, "own", TenantLimits(running_tokens=10))
        await put_limits(tx, "free", TenantLimits(running_tokens=0))
    names = ("own", "free", "t")
    await submit(database, *(new_job(tenant=name) for name in names for _ in range(4)))

    first = await claim(database, max_jobs=6, max_running_tokens=20)
    second = await claim(database, max_jobs=6, max_running_tokens=20)
    await complete(database, [job for job in first if job.tenant == "own"])
    third = await claim(database, max_jobs=1, max_running_tokens=20)
    unlimited = await claim(database)

    assert sorted(job.tenant for job in first) == ["free", "free", "own", "own", "t", "t"]
    assert [job.tenant for job in second] == ["free", "free"]
    assert [job.tenant for job in third] == ["own"]
    assert {job.tenant for job in unlimited} == {"t"}


async def test_many_tenants_fill_a_claim(database: Database) -> None:
    """With more tenants than places each gets one; a long queue fills most of what is left."""
    await submit(database, *(new_job(tenant=f"t{n:02}") for n in range(40) for _ in range(2)))
    await submit(database, *(new_job(tenant="long") for _ in range(100)))

    tenants = [job.tenant for job in await claim(database, max_jobs=32)]

    assert len(set(tenants)) == 32
    assert len(await claim(database, max_jobs=64)) >= 48


async def test_jobs_of_crashed_workers_come_in_small_groups(database: Database) -> None:
    """After one crash eight together, after two alone: the poison is found."""
    await submit(database, count=12)
    await run_sql(database, "UPDATE jobs SET crash_count = 1")
    eight = await claim(database)
    await run_sql(database, "UPDATE jobs SET crash_count = 2 WHERE state = 'queued'")
    await submit(database, count=3)

    alone = [await claim(database) for _ in range(4)]

    assert len(eight) == 8
    assert [len(jobs) for jobs in alone] == [1, 1, 1, 1]
    assert len(await claim(database)) == 3


async def test_what_is_not_due_is_not_claimed(database: Database) -> None:
    """Neither before its time nor after its deadline."""
    await submit(database, new_job(queue_deadline_s=0.001))
    (later,) = await submit(database, new_job())
    await run_sql(
        database, "UPDATE jobs SET available_at = available_at + 60 WHERE id = :id", id=later.id
    )
    await asyncio.sleep(0.005)

    assert await claim(database) == []


async def test_concurrent_workers_share_the_queue(database: Database) -> None:
    """Eight claims at once get different jobs, and together all of them."""
    await submit(database, count=160)

    async def drain(worker: str) -> list[str]:
        ids: list[str] = []
        while jobs := await claim(database, worker=worker, max_jobs=10):
            ids += [job.id for job in jobs]
        return ids

    found = await asyncio.gather(*(drain(f"w{n}") for n in range(8)))

    ids = [job_id for part in found for job_id in part]
    ids += [job.id for job in await claim(database)]  # what a claimer had locked at the time
    assert len(ids) == len(set(ids)) == 160


async def test_a_claim_leaves_rows_that_another_locks(postgres_url: str) -> None:
    """It neither waits nor goes away with nothing."""
    database = Database(postgres_url)
    await submit(database, count=8)
    async with database.transaction() as tx:
        values: dict[str, Any] = {
            "models": ["m"],
            "max_jobs": 3,
            "max_tokens": 1000,
            "lease_s": 30.0,
        }
        first = await claim_jobs(tx, worker="a", **values)
        second = await asyncio.wait_for(claim(database, worker="b", max_jobs=3), 5)

    assert len(first) == len(second) == 3
    assert not {job.id for job in first} & {job.id for job in second}
    await database.close()


async def test_a_renewal_says_what_is_lost_and_what_to_stop(database: Database) -> None:
    """Only the claims that still hold are prolonged."""
    await submit(database, count=3)
    kept, stopped, done = await claim(database, lease_s=1.0)
    await complete(database, [done])
    async with database.transaction() as tx:
        await cancel_job(tx, "t", stopped.id)
        claims = [kept.claim, stopped.claim, done.claim, Claim(kept.id, 7), Claim("job_no", 1)]
        renewal = await renew_leases(tx, worker="w", claims=claims[:3], lease_s=100.0)
        stale = await renew_leases(tx, worker="w", claims=claims[3:], lease_s=900.0)
        nothing = await renew_leases(tx, worker="w", claims=[], lease_s=1.0)

    assert (renewal.lost, renewal.cancelled) == ({done.id}, {stopped.id})
    assert stale.lost == {kept.id, "job_no"}
    assert (nothing.lost, nothing.cancelled) == (set(), set())
    leases = await run_sql(
        database,
        "SELECT lease_until_at - started_at FROM jobs WHERE lease_until_at IS NOT NULL",
    )
    assert [round(lease[0], -1) for lease in leases] == [100, 100]


async def test_retrying_queues_the_job_for_later(database: Database) -> None:
    """It counts an error, keeps the reason, and waits; the old claim is worth nothing then."""
    await submit(database, count=1)
    (job,) = await claim(database)
    async with database.transaction() as tx:
        assert await retry_later(tx, [job.claim], b'{"code":"x"}', 60.0) == {job.id}
        assert await retry_later(tx, [job.claim], None, 0.0) == set()
        assert await retry_later(tx, [], None, 0.0) == set()
        row = await get_job(tx, "t", job.id)

    assert (row.state, row.error_count, row.error) == (JobState.QUEUED, 1, b'{"code":"x"}')
    assert await claim(database) == []
    await run_sql(database, "UPDATE jobs SET available_at = available_at - 60")
    assert [(again.id, again.attempt) for again in await claim(database)] == [(job.id, 2)]


async def test_releasing_holds_nothing_against_the_job(database: Database) -> None:
    """A worker that drains gives back: the next claim gets it at once, as another attempt."""
    await submit(database, count=1)
    (job,) = await claim(database)
    async with database.transaction() as tx:
        assert await release_jobs(tx, [job.claim]) == {job.id}

    (again,) = await claim(database)
    assert (again.attempt, again.error_count, again.crash_count) == (2, 0, 0)


async def test_a_cancelled_job_that_is_given_back_ends(database: Database) -> None:
    """It is cancelled with its event, and not queued again."""
    await submit(database, count=1)
    (job,) = await claim(database)
    async with database.transaction() as tx:
        await cancel_job(tx, "t", job.id)
        await release_jobs(tx, [job.claim])
        row = await get_job(tx, "t", job.id)
        events = await list_events(tx, job.id)

    assert row.state is JobState.CANCELLED
    assert row.finished_at is not None
    assert [event.type for event in events] == ["job.cancelled"]


async def test_jobs_without_a_hint_are_found_once(database: Database) -> None:
    """The sweeper hints what nobody may have hinted, and does not repeat itself."""
    first, second = await submit(database, count=2)
    async with database.transaction() as tx:
        assert await unhinted_jobs(tx, older_than_s=60, limit=10) == []
        hints = await unhinted_jobs(tx, older_than_s=-1, limit=10)
        await mark_hinted(tx, [*hints[:1], f"{second.id}:9:m"])
        await mark_hinted(tx, [])
        left = await unhinted_jobs(tx, older_than_s=-1, limit=10)

    assert hints == [first.hint, second.hint]
    assert left == [second.hint]
