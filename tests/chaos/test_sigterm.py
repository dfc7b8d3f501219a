"""SIGTERM at random moments while jobs flow in: the drain of a rolling restart, and its second."""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from contract.config import Settings
from contract.jobs import JobState
from storage.attempts import list_attempts
from storage.counters import read_counts
from storage.events import list_events
from storage.workers import list_workers
from tests.chaos.test_processes import open_setting
from tests.services import list_lasting_keys
from tests.storage.factories import run_sql
from tests.worker.conftest import bench, settings  # noqa: F401  # fixtures
from tests.worker.harness import Bench
from tests.worker.processes import WorkerProcess, start_worker, write_registry

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Stream:
    """Submits a few jobs every few milliseconds until it is stopped."""

    def __init__(self, bench: Bench) -> None:  # noqa: F811
        self._bench = bench
        self.ids: list[str] = []

    async def run(self) -> None:
        """Submit for ever."""
        while True:
            self.ids += await self._bench.submit(*[[[n + 1] * 20] for n in range(5)])
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def flowing(stream: Stream) -> AsyncIterator[None]:
    """Run a stream of jobs."""
    running = asyncio.create_task(stream.run())
    try:
        yield
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def wait_until_it_serves(bench: Bench, worker: WorkerProcess) -> None:  # noqa: F811
    """Return when this process is one of the workers, so that it knows what SIGTERM means."""

    async def serves() -> bool:
        assert worker.process.poll() is None, worker.read_log()
        async with bench.database.snapshot() as tx:
            return worker.process.pid in {row.pid for row in await list_workers(tx)}

    await bench.wait_until(serves)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.long)])
async def test_sigterms_at_random_moments(
    rounds: int,
    settings: Settings,  # noqa: F811
    bench: Bench,  # noqa: F811
    redis_url: str,
    tmp_path: Path,
) -> None:
    """Each exits with 0; every job succeeds once; no lease is reaped; Redis is empty."""
    chance = random.Random(11)  # noqa: S311  # a seed, not a secret
    patient = msgspec.structs.replace(
        settings, config=str(write_registry(tmp_path)), lease_s=60.0, claim_jobs=16
    )
    codes, stream = [], Stream(bench)
    for _ in range(rounds):
        with start_worker(patient) as worker:
            await wait_until_it_serves(bench, worker)
            async with flowing(stream):
                await asyncio.sleep(chance.uniform(0, 0.6))
                worker.send(signal.SIGTERM)
                codes.append(await worker.wait())
    with start_worker(patient) as worker:
        rows = await bench.wait(*stream.ids, timeout_s=90)
        worker.send(signal.SIGTERM)
        codes.append(await worker.wait())
    async with bench.database.snapshot() as tx:
        counts = await read_counts(tx)
        events = {len(await list_events(tx, job_id)) for job_id in stream.ids}
        early = [end for job_id in stream.ids for end in await list_attempts(tx, job_id)]
        left = await list_workers(tx)
    # also those of a submit that was cut off after its commit: nobody has their ids
    ended = await run_sql(
        bench.database, "SELECT count(*) AS n FROM jobs WHERE state = 'succeeded'"
    )

    print(f"{len(rows)} jobs, {len(early)} attempts released")  # noqa: T201
    assert codes == [0] * (rounds + 1)
    assert {row.state for row in rows} == {JobState.SUCCEEDED}
    assert {(row.crash_count, row.error_count) for row in rows} == {(0, 0)}
    assert events == {1}
    assert {end.outcome for end in early} <= {"released"}
    assert counts.get("leases_reaped", 0) == counts.get("fenced_writes", 0) == 0
    assert counts["jobs_completed"] == ended[0].n
    assert left == []
    assert list_lasting_keys(redis_url) == []


async def test_a_second_sigterm_in_the_middle_of_a_forward(
    sqlite_url: str, blob_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the batch: another worker finishes it after the lease."""
    async with open_setting(sqlite_url, blob_url, tmp_path) as setting:
        ids = await setting.submit(["a"], ["b"])
        monkeypatch.setenv("CHAOS_FORWARD_S", "20")
        with setting.start("slow") as slow:
            await setting.at_work("slow")
            slow.terminate()
            with contextlib.suppress(TimeoutError):  # the drain waits for the forward
                await asyncio.wait_for(asyncio.to_thread(slow.wait, 1), 0.5)
            still_running = slow.poll() is None
            told_at = time.monotonic()
            slow.terminate()
            code = await asyncio.to_thread(slow.wait, 15)
            took_s = time.monotonic() - told_at
        monkeypatch.setenv("CHAOS_FORWARD_S", "0.001")
        with setting.start("next"):
            rows = await setting.wait(ids)

    assert still_running
    assert code == 128 + signal.SIGTERM
    assert took_s < 5
    assert {row.state for row in rows} == {JobState.SUCCEEDED}
    assert {(row.attempt, row.crash_count) for row in rows} == {(2, 1)}
