"""Real worker processes: killed, drained, crashed at each point, and Redis emptied under them."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import redis

from contract.config import Settings
from contract.jobs import JobState
from storage.events import list_events
from tests.worker.harness import Bench, receive
from tests.worker.processes import ROOT, start_worker, write_registry
from worker.crashing import CRASH_POINTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


@pytest.fixture
def process_settings(settings: Settings, tmp_path: Path) -> Settings:
    """Settings for processes: one deterministic model, leases that end soon."""
    return msgspec.structs.replace(
        settings, config=str(write_registry(tmp_path)), lease_s=2.0, heartbeat_s=0.3, sweep_s=0.2
    )


async def count_events(bench: Bench, ids: list[str]) -> list[int]:
    """Return how many terminal events each job has."""
    async with bench.database.snapshot() as tx:
        return [len(await list_events(tx, job_id)) for job_id in ids]


async def test_kill_9_in_the_middle_loses_nothing(process_settings: Settings, bench: Bench) -> None:
    """200 jobs survive the death of the only worker; each has one result and one event."""
    ids = await bench.submit(*[[[n + 1]] for n in range(200)])
    small = msgspec.structs.replace(process_settings, claim_jobs=16)
    with start_worker(small) as process:
        await bench.wait_until_claimed(ids[0])
        process.kill()
    with start_worker(process_settings) as process:
        rows = await bench.wait(*ids, timeout_s=40)
        process.terminate()
        code = await asyncio.to_thread(process.wait, 10)

    assert {row.state for row in rows} == {JobState.SUCCEEDED}
    assert await count_events(bench, ids) == [1] * 200
    assert code == 0


async def test_flushall_with_queued_jobs(
    process_settings: Settings, bench: Bench, redis_url: str
) -> None:
    """Redis loses everything; the jobs finish from SQL."""
    ids = await bench.submit(*[[[n + 1]] for n in range(200)])
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    with start_worker(process_settings):
        rows = await bench.wait(*ids, timeout_s=40)

    assert {row.state for row in rows} == {JobState.SUCCEEDED}


async def test_no_redis_at_all(process_settings: Settings, bench: Bench) -> None:
    """A worker whose Redis never existed scores, and drains with exit 0."""
    alone = msgspec.structs.replace(process_settings, redis_url="redis://127.0.0.1:1/0")
    ids = await bench.submit([[1]], hinted=False)
    with start_worker(alone) as process:
        [row] = await bench.wait(*ids, timeout_s=40)
        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, 15)

    assert (row.state, code) == (JobState.SUCCEEDED, 0)


@pytest.mark.parametrize("point", CRASH_POINTS)
async def test_each_crash_point(point: str, process_settings: Settings, bench: Bench) -> None:
    """Dying there loses nothing and doubles nothing: one result, one event, one webhook id."""
    async with receive() as receiver:
        ids = await bench.submit(*[[[n + 1]] for n in range(3)], webhook_url=receiver.url)
        crashing = msgspec.structs.replace(process_settings, crash_at=point, webhook_timeout_s=1.0)
        with start_worker(crashing) as process:
            code = await asyncio.to_thread(process.wait, 40)
        with start_worker(msgspec.structs.replace(crashing, crash_at="")):
            rows = await bench.wait(*ids, timeout_s=40)
            await receiver.wait_for_ids(3)

    assert code == 137
    assert {row.state for row in rows} == {JobState.SUCCEEDED}
    assert await count_events(bench, ids) == [1, 1, 1]
    assert len(receiver.event_ids()) == 3


def test_a_delivering_process_never_loads_torch() -> None:
    """Nothing that ``--deliveries-only`` runs imports torch or transformers."""
    code = (
        "import sys, worker.main, worker.deliveries;"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)  # noqa: S603

    assert done.returncode == 0


async def test_deliveries_only(process_settings: Settings, bench: Bench) -> None:
    """A process without models delivers, scores nothing, and needs no registry."""
    async with receive() as receiver:
        [job] = await bench.submit([[1]], webhook_url=receiver.url)
        [other] = await bench.submit([[1]])
        await bench.cancel(job)
        alone = msgspec.structs.replace(process_settings, config=None)
        with start_worker(alone, "--deliveries-only") as process:
            await receiver.wait(1)
            process.terminate()
            code = await asyncio.to_thread(process.wait, 15)

    assert code == 0
    assert (await bench.get(other)).state is JobState.QUEUED
    assert receiver.events(await bench.secret())[0].type == "job.cancelled"


def test_bad_settings_are_named(tmp_path: Path) -> None:
    """A worker without a registry, or asked for an unknown model, says so and exits with 2."""
    registry = write_registry(tmp_path)
    for settings, arguments, expected in [
        (Settings(), [], "SCOREKEEP_CONFIG"),
        (Settings(config=str(registry)), ["--model", "other"], "has no model other"),
    ]:
        with start_worker(settings, *arguments) as process:
            assert process.wait(20) == 2, expected
