"""Leases: renewed while we live, given up when they are another's, ended by the hard deadline."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from contract.config import Settings
from contract.jobs import JobState
from storage import workers
from storage.claims import Claim, ClaimedJob, claim_jobs
from storage.sweeps import reap_jobs
from tests.worker.harness import Bench, heed, run_worker
from tests.worker.scorers import ArithmeticScorer
from worker.deadlines import HardDeadline
from worker.leases import HUNG_EXIT, LeaseKeeper

WORKER = "wrk_1"


class News:
    """What the keeper told the event loop."""

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.cancelled: set[str] = set()
        self.forgotten = asyncio.Event()
        self.changed = asyncio.Event()

    def change(self, lost: set[str], cancelled: set[str]) -> None:
        """Keep it."""
        self.lost |= lost
        self.cancelled |= cancelled
        self.changed.set()


@pytest.fixture
def news() -> News:
    """Nothing yet."""
    return News()


@pytest.fixture
async def keeper(bench: Bench, news: News) -> AsyncIterator[LeaseKeeper]:
    """A keeper that renews in its own thread, every 0.05 s."""
    settings = msgspec.structs.replace(bench.settings, heartbeat_s=0.05)
    made = LeaseKeeper(
        settings,
        worker=WORKER,
        deadline=HardDeadline(60),
        on_change=news.change,
        on_forgotten=news.forgotten.set,
    )
    yield made
    await asyncio.to_thread(made.stop)


async def claim(bench: Bench, lease_s: float) -> list[ClaimedJob]:
    """Claim everything."""
    async with bench.database.transaction() as tx:
        return await claim_jobs(
            tx, worker=WORKER, models=["sums"], max_jobs=9, max_tokens=99, lease_s=lease_s
        )


async def wait_for(event: asyncio.Event) -> None:
    """Wait, generously."""
    async with asyncio.timeout(40):
        await event.wait()


async def test_what_is_held_is_renewed(bench: Bench, keeper: LeaseKeeper) -> None:
    """A lease that ran out is prolonged in one statement, if nobody reaped the job before."""
    ids = await bench.submit([[1]], [[2]])
    jobs = await claim(bench, -1.0)
    keeper.hold(jobs, since=time.monotonic())

    renewed = await keeper.renew_once(bench.database)
    async with bench.database.transaction() as tx:
        reaped = await reap_jobs(tx, max_crashes=3, limit=9)

    assert (renewed, reaped.requeued) == (2, [])
    assert keeper.alive([Claim(job_id, 1) for job_id in ids])


async def test_a_lost_job_is_given_up(bench: Bench, keeper: LeaseKeeper, news: News) -> None:
    """The thread hears that a job is another's, tells the event loop, and renews it no more."""
    ids = await bench.submit([[1]], [[2]])
    jobs = await claim(bench, 60.0)
    async with bench.database.transaction() as tx:
        await tx.exec_driver_sql(f"UPDATE jobs SET lease_until_at = 0 WHERE id = '{ids[0]}'")  # noqa: S608
        await reap_jobs(tx, max_crashes=3, limit=9)
    keeper.hold(jobs, since=time.monotonic())
    keeper.start()

    await wait_for(news.changed)

    assert (news.lost, news.cancelled) == ({ids[0]}, set())
    assert [keeper.holds(Claim(job_id, 1)) for job_id in ids] == [False, True]


async def test_a_cancelled_job_is_heard_of(bench: Bench, keeper: LeaseKeeper, news: News) -> None:
    """It is still ours to end, so it stays held."""
    [job] = await bench.submit([[1]])
    keeper.hold(await claim(bench, 60.0), since=time.monotonic())
    await bench.cancel(job)
    keeper.start()

    await wait_for(news.changed)

    assert (news.lost, news.cancelled) == (set(), {job})
    assert keeper.holds(Claim(job, 1))


async def test_a_newer_claim_is_not_touched(bench: Bench, keeper: LeaseKeeper, news: News) -> None:
    """News of an old attempt, and its end, say nothing about the one that we hold since."""
    [job] = await bench.submit([[1]])
    keeper.hold(await claim(bench, -1.0), since=time.monotonic())
    async with bench.database.transaction() as tx:
        await reap_jobs(tx, max_crashes=3, limit=9)
    renewing = asyncio.create_task(keeper.renew_once(bench.database))
    await asyncio.sleep(0)  # it has read what is held, and waits for the store
    keeper.hold(await claim(bench, 60.0), since=time.monotonic())

    assert await renewing == 0
    keeper.drop([Claim(job, 1)])

    assert not keeper.holds(Claim(job, 1))
    assert keeper.holds(Claim(job, 2))
    assert not news.changed.is_set()


async def test_an_unregistered_worker_hears_of_it(
    bench: Bench, keeper: LeaseKeeper, news: News
) -> None:
    """Whoever forgot the worker is told again."""
    keeper.start()

    await wait_for(news.forgotten)

    assert not news.changed.is_set()


async def test_a_registered_worker_has_a_heartbeat(bench: Bench, keeper: LeaseKeeper) -> None:
    """The renewal is the worker's heartbeat too."""
    row = workers.WorkerRow(id=WORKER, host="h", pid=1, device="cpu")
    async with bench.database.transaction() as tx:
        await workers.put_worker(tx, row)
        await tx.exec_driver_sql("UPDATE workers SET heartbeat_at = 0")

    await keeper.renew_once(bench.database)
    async with bench.database.snapshot() as tx:
        [found] = await workers.list_workers(tx)

    assert found.age_s < 30


async def test_held_jobs_die_by_our_own_clock(bench: Bench, keeper: LeaseKeeper) -> None:
    """Without the store nobody tells us; after the lease we no longer trust it."""
    [job] = await bench.submit([[1]])
    jobs = await claim(bench, 60.0)
    keeper.hold(jobs, since=time.monotonic() - bench.settings.lease_s)
    held = Claim(job, 1)
    old = (keeper.alive([held]), keeper.holds(held))
    keeper.hold(jobs, since=time.monotonic())
    fresh = keeper.alive([held])
    keeper.drop([held, Claim("job_unknown", 1)])

    assert (old, fresh) == ((False, True), True)
    assert not keeper.alive([held])


async def test_the_keeper_outlives_its_database(settings: Settings, news: News) -> None:
    """While the store is away it says so, and tries again at the next tick."""
    away = msgspec.structs.replace(
        settings, heartbeat_s=0.05, database_url="postgresql+asyncpg://postgres@127.0.0.1:1/none"
    )
    keeper = LeaseKeeper(away, worker=WORKER, deadline=HardDeadline(60), on_change=news.change)
    with heed("leases not renewed") as first:
        keeper.start()
        await wait_for(first)
    with heed("leases not renewed") as second:
        await wait_for(second)
    await asyncio.to_thread(keeper.stop)

    assert not news.changed.is_set()


async def test_what_hangs_ends_the_process(settings: Settings) -> None:
    """A forward that takes longer than the hard deadline: the process ends, to be restarted."""
    codes: list[int] = []
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    deadline = HardDeadline(0.05)

    def leave(code: int) -> None:
        codes.append(code)
        loop.call_soon_threadsafe(ended.set)

    short = msgspec.structs.replace(settings, heartbeat_s=0.05, batch_deadline_s=0.05)
    keeper = LeaseKeeper(
        short, worker=WORKER, deadline=deadline, on_change=lambda *_: None, exit_process=leave
    )
    release = threading.Event()

    def hang() -> None:
        with deadline.watch("forward"):
            assert release.wait(40)

    hanging = asyncio.create_task(asyncio.to_thread(hang))
    with heed("hung: the process ends so that it is restarted") as said:
        keeper.start()
        await wait_for(ended)
    release.set()
    await hanging
    await asyncio.to_thread(keeper.stop)

    assert codes[0] == HUNG_EXIT == 75
    assert said.is_set()


def test_only_what_runs_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended in time is forgotten; an event loop that no longer turns is noticed too."""
    now = [100.0]
    monkeypatch.setattr("worker.deadlines.time.monotonic", lambda: now[0])
    deadline = HardDeadline(10)
    with deadline.watch("prepare"):
        now[0] += 9
        in_time = deadline.find_overdue()
        deadline.move()
        now[0] += 2
        late = deadline.find_overdue()
    over = deadline.find_overdue()
    now[0] += 11
    stuck = deadline.find_overdue()
    deadline.move()

    assert (in_time, late, over, stuck) == (None, "prepare", None, "event loop")
    assert deadline.find_overdue() is None


async def test_a_worker_that_lost_its_lease_lets_go(settings: Settings, bench: Bench) -> None:
    """While the forward runs another worker takes the job over; its result is the one that counts.

    The first one hears of it by its heartbeat, drops what it computed, and goes on serving.
    """
    scorer = ArithmeticScorer()
    scorer.gate = threading.Event()
    async with run_worker(settings, scorer) as worker:
        [job] = await bench.submit([[1]])
        await asyncio.to_thread(scorer.entered.acquire)
        with heed("claims changed") as changed:
            async with bench.database.transaction() as tx:
                await tx.exec_driver_sql(
                    "UPDATE jobs SET attempt = attempt + 1, worker = 'wrk_2', lease_until_at = 1e12"
                )
            await wait_for(changed)
        scorer.gate.set()
        [next_job] = await bench.submit([[2]])
        [row] = await bench.wait(next_job)
        taken = await bench.get(job)

    assert worker.id
    assert row.state is JobState.SUCCEEDED
    assert (taken.state, taken.attempt, taken.blob_key) == (JobState.RUNNING, 2, None)
