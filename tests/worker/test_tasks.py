"""The steps of a batch against stores that fail: fenced, ambiguous, away, full."""

import asyncio
import contextlib
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from contract.config import Settings
from contract.errors import StoreUnavailableError, UnavailableError
from contract.jobs import JobState
from storage.blobs import BlobInfo, BlobStore
from storage.claims import ClaimedJob, claim_jobs
from storage.database import Database, Transaction
from storage.events import list_events
from storage.sweeps import reap_jobs
from tests.worker.harness import Bench, heed, run_worker
from tests.worker.scorers import ArithmeticScorer
from worker.batcher import MicroBatcher
from worker.deadlines import HardDeadline
from worker.engine.encoding import encode
from worker.leases import LeaseKeeper
from worker.stores import Stores
from worker.tasks import Tasks
from worker.work import Conclusion, Work


class FaultyDatabase(Database):
    """Raises ``after`` that many commits, and ``before`` that many others."""

    def __init__(self, url: str, *, after: int = 0, before: int = 0) -> None:
        super().__init__(url)
        self.after = after
        self.before = before

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Commit and raise, or raise and so roll back."""
        message = "the connection broke"
        async with super().transaction() as tx:
            yield tx
            if self.before:
                self.before -= 1
                raise StoreUnavailableError(message)
        if self.after:
            self.after -= 1
            raise StoreUnavailableError(message)


class FaultyBlobs(BlobStore):
    """Fails so many times, then works."""

    faults = 0

    async def put(self, key: str, data: bytes | bytearray | memoryview) -> BlobInfo:
        """Fail or write."""
        if self.faults:
            self.faults -= 1
            message = "the blob store failed"
            raise StoreUnavailableError(message)
        return await super().put(key, data)


class Rig:
    """The steps on real stores, without a pump: the test says when each happens."""

    def __init__(self, bench: Bench, database: Database | None = None) -> None:
        self.bench = bench
        self.scorer = ArithmeticScorer()
        self.blobs = FaultyBlobs.open(bench.settings.blobs)
        deadline = HardDeadline(60)
        self.batcher = MicroBatcher(budget_tokens=4096, deadline=deadline)
        self.leases = LeaseKeeper(
            bench.settings, worker="wrk_1", deadline=deadline, on_change=lambda *_: None
        )
        self.announced = 0
        self.tasks = Tasks(
            settings=bench.settings,
            stores=Stores(database or bench.database, self.blobs, bench.queue),
            leases=self.leases,
            batcher=self.batcher,
            deadline=deadline,
            encode=encode,
            announced=self.count_announced,
        )

    def count_announced(self) -> None:
        """Count."""
        self.announced += 1

    async def claim(self, worker: str = "wrk_1", lease_s: float = 60.0) -> list[ClaimedJob]:
        """Claim everything; the first worker holds it."""
        async with self.bench.database.transaction() as tx:
            jobs = await claim_jobs(
                tx,
                worker=worker,
                models=["sums"],
                max_jobs=100,
                max_tokens=10_000,
                lease_s=lease_s,
                aged_first=False,
            )
        if worker == "wrk_1":
            self.leases.hold(jobs, since=time.monotonic())
        return jobs

    async def reap(self) -> None:
        """Requeue what has lost its lease."""
        async with self.bench.database.transaction() as tx:
            await reap_jobs(tx, max_crashes=10, limit=100)

    async def score(self, jobs: Sequence[ClaimedJob]) -> list[Work]:
        """Do all steps before the store's."""
        works = await self.tasks.prepare(self.scorer, jobs)
        await self.tasks.score(self.scorer, works)
        return works

    async def store(self, works: Sequence[Work]) -> None:
        """Do the last step."""
        await self.tasks.store(await self.tasks.conclude(self.scorer, works))

    async def count_blobs(self) -> int:
        """Return how many blobs there are."""
        return len([blob async for blob in self.blobs.list()])

    async def count_events(self, job_id: str) -> int:
        """Return how many terminal events the job has."""
        async with self.bench.database.snapshot() as tx:
            return len(await list_events(tx, job_id))


@pytest.fixture
def rig(bench: Bench) -> Iterator[Rig]:
    """The steps on the stores of ``bench``."""
    made = Rig(bench)
    yield made
    made.batcher.stop()


async def test_a_fenced_result_is_dropped_with_its_blob(rig: Rig) -> None:
    """The other attempt owns the job: nothing of ours is kept, and it is counted."""
    [job] = await rig.bench.submit([[1]])
    works = await rig.score(await rig.claim(lease_s=-1.0))
    await rig.reap()
    await rig.claim("wrk_2")

    await rig.store(works)

    row = await rig.bench.get(job)
    assert (row.state, row.attempt, row.tensors) == (JobState.RUNNING, 2, [])
    assert (rig.tasks.counts.fenced, rig.tasks.counts.completed) == (1, 0)
    assert await rig.count_blobs() == 0
    assert (await rig.count_events(job), rig.announced) == (0, 0)


async def test_the_rest_of_a_fenced_batch_is_kept(rig: Rig) -> None:
    """One job of the batch was lost: the others are stored, and their blob stays."""
    await rig.bench.submit([[1]])
    lost = await rig.claim(lease_s=-1.0)
    await rig.bench.submit([[2]])
    works = await rig.score([*lost, *await rig.claim()])
    await rig.reap()

    await rig.store(works)

    rows = [await rig.bench.get(work.job.id) for work in works]
    assert [row.state for row in rows] == [JobState.QUEUED, JobState.SUCCEEDED]
    assert (rig.tasks.counts.fenced, rig.tasks.counts.completed) == (1, 1)
    assert await rig.bench.scores(rows[1]) == [[2]]


async def test_a_job_that_is_known_to_be_lost_is_not_stored(rig: Rig) -> None:
    """What the heartbeat already called lost costs no blob and no statement."""
    await rig.bench.submit([[1]])
    works = await rig.score(await rig.claim())
    rig.leases.drop([work.claim for work in works])

    conclusion = await rig.tasks.conclude(rig.scorer, works)

    assert (conclusion.outcomes, conclusion.blob_key) == ([], None)


@pytest.mark.parametrize("faults", [{"after": 1}, {"before": 1}, {"before": 2, "after": 1}])
async def test_an_ambiguous_commit_counts_once(bench: Bench, faults: dict[str, int]) -> None:
    """Commit, then raise: what was written is found again; what was not is written. Never both."""
    database = FaultyDatabase(bench.settings.database)
    rig = Rig(bench, database)
    ids = await bench.submit([[1]], [[2]])
    works = await rig.score(await rig.claim())
    database.after, database.before = faults.get("after", 0), faults.get("before", 0)

    await rig.store(works)

    rig.batcher.stop()
    await database.close()
    rows = [await bench.get(job_id) for job_id in ids]
    assert {row.state for row in rows} == {JobState.SUCCEEDED}
    assert [await rig.count_events(job_id) for job_id in ids] == [1, 1]
    assert (rig.tasks.counts.completed, rig.tasks.counts.fenced) == (2, 0)
    assert await bench.scores(rows[1]) == [[2]]
    assert await rig.count_blobs() == 1


async def test_a_blob_store_that_recovers_costs_no_forward(rig: Rig) -> None:
    """The result waits in memory, and is written when the store is back."""
    [job] = await rig.bench.submit([[3]])
    works = await rig.score(await rig.claim())
    rig.blobs.faults = 2

    await rig.store(works)

    assert (await rig.bench.get(job)).state is JobState.SUCCEEDED
    assert len(rig.scorer.batches) == 1


async def test_a_blob_store_that_stays_away_ends_the_wait_with_the_lease(rig: Rig) -> None:
    """Whoever no longer holds the jobs gives up: another attempt writes its own."""
    [job] = await rig.bench.submit([[3]])
    works = await rig.score(await rig.claim())
    conclusion = await rig.tasks.conclude(rig.scorer, works)
    rig.blobs.faults = 1000
    rig.leases.drop([work.claim for work in works])

    with pytest.raises(StoreUnavailableError):
        await rig.tasks.store(conclusion)

    row = await rig.bench.get(job)
    assert (row.state, row.blob_key) == (JobState.RUNNING, None)


async def test_items_not_tried_alone_are_tried_again(bench: Bench) -> None:
    """A batch full of culprits exhausts the search: its jobs come back later, then end."""
    bench.settings = msgspec.structs.replace(bench.settings, max_attempts=2)
    rig = Rig(bench)

    def refuse(_batch: list[list[int]]) -> None:
        raise ValueError

    rig.scorer.fault = refuse
    [job] = await bench.submit([[n] for n in range(300)])
    await rig.store(await rig.score(await rig.claim()))
    again = await bench.get(job)
    async with bench.database.transaction() as tx:  # the delay is over
        await tx.exec_driver_sql("UPDATE jobs SET available_at = 0")
    await rig.store(await rig.score(await rig.claim()))
    ended = await bench.get(job)

    rig.batcher.stop()
    assert (again.state, again.error_count, rig.tasks.counts.retried) == (JobState.QUEUED, 1, 1)
    assert bench.problem(again).code == "forward_failed"
    assert (ended.state, ended.failed_count) == (JobState.FAILED, 300)
    assert bench.problem(ended).code == "forward_failed"


async def test_a_retryable_error_gives_the_job_back(rig: Rig) -> None:
    """A worker that stops holds nothing against the jobs it did not score."""
    [job] = await rig.bench.submit([[1]])
    claimed = await rig.claim()
    works = await rig.tasks.prepare(rig.scorer, claimed)
    works[0].error = UnavailableError("stopping")

    await rig.store(works)

    row = await rig.bench.get(job)
    assert (row.state, row.error_count, row.crash_count) == (JobState.QUEUED, 0, 0)
    assert rig.tasks.counts.released == 1


async def test_a_request_of_another_number_of_items_fails(rig: Rig) -> None:
    """A job whose row promises more items than its request has is not scored short."""
    [job] = await rig.bench.submit([[1], [2]])
    async with rig.bench.database.transaction() as tx:
        await tx.exec_driver_sql("UPDATE jobs SET item_count = 3")

    await rig.store(await rig.score(await rig.claim()))

    row = await rig.bench.get(job)
    problem = rig.bench.problem(row)
    assert (row.state, row.scored_count, row.failed_count) == (JobState.FAILED, 0, 3)
    assert (problem.code, problem.message) == (
        "scoring_failed",
        "the request has 2 items, its job 3",
    )


async def test_release_gives_untouched_jobs_back(rig: Rig) -> None:
    """Jobs that were claimed and not begun are queued again; giving back nothing does nothing."""
    [job] = await rig.bench.submit([[1]])
    await rig.tasks.release(await rig.claim())
    await rig.tasks.release([])

    assert (await rig.bench.get(job)).state is JobState.QUEUED
    assert rig.tasks.counts.released == 1


async def test_cancelled_while_being_written_stays_cancelled(rig: Rig) -> None:
    """The client cancels after the forward: no result is kept, and one event says so."""
    [job] = await rig.bench.submit([[1]])
    works = await rig.score(await rig.claim())
    await rig.bench.cancel(job)

    await rig.store(works)

    row = await rig.bench.get(job)
    assert (row.state, row.tensors, row.result) == (JobState.CANCELLED, [], None)
    assert await rig.count_events(job) == 1


async def test_giving_up_what_does_not_run_here_is_harmless(rig: Rig) -> None:
    """News of a job that has just left this worker changes nothing."""
    rig.tasks.abandon({"job_1"}, {"job_2"})

    assert rig.tasks.running == {}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:  # noqa: S603
        pytest.skip("only root may mount a disk of its own")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # noqa: S603, S607


def fill(file: Path) -> None:
    """Write until the disk is full."""
    with file.open("wb", buffering=0) as opened, contextlib.suppress(OSError):
        while True:
            opened.write(b"x" * 4096)


def list_files(folder: Path) -> list[Path]:
    """Return all files, temporary ones too."""
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_a_full_disk(small_disk: Path, settings: Settings, bench: Bench) -> None:
    """No row points to a partial file; once there is space the job ends, without a new forward."""
    full = msgspec.structs.replace(settings, blob_url=f"file://{small_disk}/blobs")
    filler = small_disk / "filler"
    scorer = ArithmeticScorer()
    with heed("blob not written") as refused:
        async with run_worker(full, scorer):
            fill(filler)
            [job] = await bench.submit([[n] for n in range(3000)])
            async with asyncio.timeout(40):
                await refused.wait()
            waiting = await bench.get(job)
            filler.unlink()
            [row] = await bench.wait(job)

    assert (waiting.state, waiting.blob_key) == (JobState.RUNNING, None)
    assert (row.state, row.attempt) == (JobState.SUCCEEDED, 1)
    bench.blobs = BlobStore.open(full.blobs)
    assert (await bench.scores(row))[2999] == [2999]
    assert len(list_files(small_disk)) == 1


async def test_a_job_that_was_scored_in_time_does_not_fail_with_its_batch(bench: Bench) -> None:
    """Its time passes while a neighbour is on the device: its scores are stored then."""
    rig = Rig(bench)
    gate = threading.Event()

    def fault(batch: list[list[int]]) -> None:
        if batch[0][0] == 2:
            assert gate.wait(20)

    rig.scorer = ArithmeticScorer(fault=fault)
    [timed] = await bench.submit([[1] * 3001], run_timeout_s=0.2)
    [untimed] = await bench.submit([[2] * 3000])
    works = await rig.tasks.prepare(rig.scorer, await rig.claim())
    scoring = asyncio.create_task(rig.tasks.score(rig.scorer, works))
    [early] = await bench.wait(timed)
    meanwhile = await bench.get(untimed)
    gate.set()
    await scoring
    await rig.tasks.store(await rig.tasks.conclude(rig.scorer, works))
    [late] = await bench.wait(untimed)
    again = await bench.get(timed)
    rig.batcher.stop()

    assert early.state is JobState.SUCCEEDED
    assert meanwhile.state is JobState.RUNNING
    assert late.state is JobState.SUCCEEDED
    assert await bench.scores(again) == [[3001.0]]
    assert (again.blob_key, again.version) == (early.blob_key, early.version)
    assert again.blob_key != late.blob_key
    assert rig.tasks.counts.fenced == 0


async def test_an_end_that_cannot_be_written_in_time_is_written_with_the_batch(
    bench: Bench, settings: Settings
) -> None:
    """The store is away for as long as the lease lasts: the batch writes both ends afterwards."""
    rig = Rig(bench)
    gate = threading.Event()
    rig.scorer.gate = gate
    [timed] = await bench.submit([[1]], run_timeout_s=0.05)
    works = await rig.tasks.prepare(rig.scorer, await rig.claim())
    store, faults = rig.tasks.store, [StoreUnavailableError("away")]

    async def fail_once(self: Tasks, conclusion: Conclusion) -> None:
        if faults:
            raise faults.pop()
        await store(conclusion)

    with mock.patch.object(Tasks, "store", fail_once):
        await rig.tasks.score(rig.scorer, works)
    gate.set()
    before = await bench.get(timed)
    await rig.tasks.store(await rig.tasks.conclude(rig.scorer, works))
    [row] = await bench.wait(timed)
    rig.batcher.stop()

    assert before.state is JobState.RUNNING
    assert bench.problem(row).code == "deadline_exceeded"
