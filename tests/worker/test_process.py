"""Real worker processes: killed, drained, crashed at each point, and Redis emptied under them."""

import asyncio
import signal
from pathlib import Path

import msgspec
import pytest
import redis
from aiohttp import web

from contract.config import Settings
from contract.jobs import JobState
from contract.models import ModelConfig
from storage.delivery_log import list_deliveries
from storage.events import list_events
from storage.forgetting import drop_orphans
from storage.workers import list_workers
from tests.worker.harness import TENANT, Bench, receive, run_worker
from tests.worker.processes import start_worker, write_registry
from worker import __main__ as program
from worker.crashing import CRASH_POINTS, crash_here
from worker.engine.deterministic import SOURCE, DeterministicScorer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

#: For what does not depend on the database's dialect.
on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def process_settings(settings: Settings, tmp_path: Path) -> Settings:
    """Settings for processes: one deterministic model, leases that end soon.

    A slow machine may lose such a lease; that many losses make no job count as poisoned.
    """
    return msgspec.structs.replace(
        settings, config=str(write_registry(tmp_path)), lease_s=1.0, max_crashes=50
    )


def create_scorer() -> DeterministicScorer:
    """Return the scorer that the processes serve, for a worker in this process."""
    return DeterministicScorer("sums", ModelConfig(source=SOURCE))


async def count_events(bench: Bench, ids: list[str]) -> set[int]:
    """Return how many terminal events the jobs have."""
    async with bench.database.snapshot() as tx:
        return {len(await list_events(tx, job_id)) for job_id in ids}


async def list_blobs(bench: Bench) -> set[str]:
    """Return the keys of all blobs."""
    return {blob.key async for blob in bench.blobs.list("")}


async def test_kill_9_in_the_middle_loses_nothing(process_settings: Settings, bench: Bench) -> None:
    """200 jobs survive the death of the only worker; each has one result and one event."""
    ids = await bench.submit(*[[[n + 1]] for n in range(200)])
    small = msgspec.structs.replace(process_settings, claim_jobs=16)
    with start_worker(small) as process:
        await bench.wait_until_claimed(ids[0])
        process.send(signal.SIGKILL)
        code = await process.wait()
    async with run_worker(bench.settings, create_scorer()):
        rows = await bench.wait(*ids)

    assert code == -signal.SIGKILL
    assert {row.state for row in rows} == {JobState.SUCCEEDED}
    assert await count_events(bench, ids) == {1}


async def test_sigterm_drains(process_settings: Settings, bench: Bench) -> None:
    """Exit 0; what was claimed is stored or queued again, with nothing held against it."""
    ids = await bench.submit(*[[[n + 1]] for n in range(200)])
    small = msgspec.structs.replace(process_settings, claim_jobs=4, lease_s=30.0)
    with start_worker(small) as process:
        await bench.wait_until_claimed(ids[0])
        process.send(signal.SIGTERM)
        code = await process.wait()
    rows = [await bench.get(job_id) for job_id in ids]
    async with bench.database.snapshot() as tx:
        workers = await list_workers(tx)

    assert code == 0
    assert {row.state for row in rows} <= {JobState.SUCCEEDED, JobState.QUEUED}
    assert {(row.crash_count, row.error_count) for row in rows} == {(0, 0)}
    assert workers == []


@on_sqlite
async def test_a_second_sigterm_ends_at_once(process_settings: Settings, bench: Bench) -> None:
    """While the drain waits for a receiver that hangs, the second signal does not."""
    release = asyncio.Event()

    async def stall(_request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.Response()

    patient = msgspec.structs.replace(process_settings, webhook_timeout_s=60.0, drain_s=60.0)
    async with receive(stall) as receiver:
        await bench.submit([[1]], webhook_url=receiver.url)
        with start_worker(patient) as process:
            await receiver.wait(1)
            process.send(signal.SIGTERM)
            await bench.wait_until(lambda: has_no_worker(bench))
            process.send(signal.SIGTERM)
            code = await process.wait()
        release.set()

    assert code == 128 + signal.SIGTERM


async def has_no_worker(bench: Bench) -> bool:
    """Tell whether every worker withdrew: its scoring part is drained."""
    async with bench.database.snapshot() as tx:
        return not await list_workers(tx)


@on_sqlite
async def test_flushall_with_queued_jobs(
    process_settings: Settings, bench: Bench, redis_url: str
) -> None:
    """Redis loses everything; the jobs finish from SQL."""
    ids = await bench.submit(*[[[n + 1]] for n in range(200)])
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    with start_worker(process_settings):
        rows = await bench.wait(*ids)

    assert {row.state for row in rows} == {JobState.SUCCEEDED}


@on_sqlite
async def test_no_redis_at_all(process_settings: Settings, bench: Bench) -> None:
    """A worker whose Redis never existed scores, and drains with exit 0."""
    alone = msgspec.structs.replace(process_settings, redis_url="redis://127.0.0.1:1/0")
    ids = await bench.submit([[1]], hinted=False)
    with start_worker(alone) as process:
        [row] = await bench.wait(*ids)
        process.send(signal.SIGTERM)
        code = await process.wait()

    assert (row.state, code) == (JobState.SUCCEEDED, 0)


@pytest.mark.parametrize(
    ("point", "state", "blobs"),
    [
        ("after_claim", JobState.RUNNING, 0),
        ("after_forward", JobState.RUNNING, 0),
        ("after_blob", JobState.RUNNING, 1),
        ("before_commit", JobState.RUNNING, 1),
        ("after_commit", JobState.SUCCEEDED, 1),
        ("before_event", JobState.SUCCEEDED, 1),
        ("after_event", JobState.SUCCEEDED, 1),
        ("before_record", JobState.SUCCEEDED, 1),
        ("after_record", JobState.SUCCEEDED, 1),
    ],
)
async def test_each_crash_point(
    point: str, state: JobState, blobs: int, process_settings: Settings, bench: Bench
) -> None:
    """Dying there loses nothing and doubles nothing: one result, one event, one webhook id.

    A blob that no row knows is an orphan, and collected.
    """
    crashing = msgspec.structs.replace(process_settings, crash_at=point, webhook_timeout_s=0.5)
    async with receive() as receiver:
        ids = await bench.submit(*[[[n + 1]] for n in range(3)], webhook_url=receiver.url)
        with start_worker(crashing) as process:
            code = await process.wait()
        left = [await bench.get(job_id) for job_id in ids]
        left_blobs = await list_blobs(bench)
        async with run_worker(bench.settings, create_scorer()):
            rows = await bench.wait(*ids)
            await receiver.wait_for_ids(3)
    await drop_orphans(bench.database, bench.blobs, older_than_s=0)

    assert code == 137
    assert {row.state for row in left} == {state}
    assert len(left_blobs) == blobs
    assert {row.state for row in rows} == {JobState.SUCCEEDED}
    assert {row.attempt > 1 for row in rows} == {state is JobState.RUNNING}
    assert await count_events(bench, ids) == {1}
    assert len(receiver.event_ids()) == 3
    assert await list_blobs(bench) == {row.blob_key for row in rows}


@pytest.mark.parametrize("point", ["before_event", "after_event", "before_record", "after_record"])
async def test_each_step_of_a_delivering_process(
    point: str, process_settings: Settings, bench: Bench
) -> None:
    """A process that only delivers, killed there: no event is lost, and none gets another id."""
    crashing = msgspec.structs.replace(
        process_settings, crash_at=point, webhook_timeout_s=0.5, config=None
    )
    async with receive() as receiver:
        ids = await bench.submit(*[[[n + 1]] for n in range(3)], webhook_url=receiver.url)
        for job_id in ids:
            await bench.cancel(job_id)
        async with bench.database.snapshot() as tx:
            written = {event.id for job_id in ids for event in await list_events(tx, job_id)}
        codes = []
        for _ in range(2):
            with start_worker(crashing, "--deliveries-only") as process:
                codes.append(await process.wait())
            if point == "after_record":
                break  # everything is recorded: there is no second death
        async with run_worker(bench.settings, deliveries_only=True):
            await receiver.wait_for_ids(3)
            await bench.wait_until(lambda: is_all_delivered(bench))

    assert set(codes) == {137}
    assert receiver.event_ids() == written
    assert len(written) == 3


async def is_all_delivered(bench: Bench) -> bool:
    """Tell whether nothing is due any more."""
    async with bench.database.snapshot() as tx:
        return {each.state for each in await list_deliveries(tx, TENANT)} == {"delivered"}


@pytest.mark.timeout(120)
async def test_two_delivering_processes_killed_at_random(
    process_settings: Settings, bench: Bench
) -> None:
    """Killed again and again in the middle of it: every event arrives, under its own id."""
    quick = msgspec.structs.replace(process_settings, webhook_timeout_s=0.5, config=None)
    async with receive() as receiver:
        ids = await bench.submit(*[[[n + 1]] for n in range(120)], webhook_url=receiver.url)
        for job_id in ids:
            await bench.cancel(job_id)
        async with bench.database.snapshot() as tx:
            written = {event.id for job_id in ids for event in await list_events(tx, job_id)}
        for kill in range(1, 3):
            with (
                start_worker(quick, "--deliveries-only") as one,
                start_worker(quick, "--deliveries-only") as other,
            ):
                await receiver.wait(kill * 20)
                one.send(signal.SIGKILL)
                other.send(signal.SIGKILL)
                codes = {await one.wait(), await other.wait()}
            assert codes == {-signal.SIGKILL}
        async with run_worker(bench.settings, deliveries_only=True):
            await receiver.wait_for_ids(120)
            await bench.wait_until(lambda: is_all_delivered(bench))

    assert receiver.event_ids() == written
    assert len(written) == 120


def test_every_crash_point_is_tried() -> None:
    """The table above holds each point that the worker knows."""
    marks = test_each_crash_point.pytestmark  # type: ignore[attr-defined]
    table = next(mark.args[1] for mark in marks if mark.name == "parametrize")

    assert tuple(row[0] for row in table) == CRASH_POINTS


def test_a_crash_is_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends there as ``kill -9`` ends it, and nowhere else."""
    codes: list[int] = []
    monkeypatch.setattr("worker.crashing.os._exit", codes.append)
    for point in CRASH_POINTS:
        crash_here(point, "")
        crash_here(point, "after_blob")

    assert codes == [137]


@on_sqlite
async def test_deliveries_only(process_settings: Settings, bench: Bench) -> None:
    """A process without models delivers, scores nothing, and needs no registry."""
    alone = msgspec.structs.replace(process_settings, config=None)
    async with receive() as receiver:
        [job] = await bench.submit([[1]], webhook_url=receiver.url)
        [other] = await bench.submit([[1]])
        await bench.cancel(job)
        with start_worker(alone, "--deliveries-only") as process:
            await receiver.wait(1)
            process.send(signal.SIGTERM)
            code = await process.wait()

    assert code == 0
    assert (await bench.get(other)).state is JobState.QUEUED
    assert receiver.events(await bench.secret())[0].type == "job.cancelled"


async def test_bad_settings_end_the_process() -> None:
    """Every wrong variable is named, in one line, and the exit code is 2."""
    variables = {"SCOREKEEP_LEASE_S": "soon", "SCOREKEEP_LEASES": "1"}
    with start_worker(Settings(), **variables) as process:
        code = await process.wait()
        log = process.read_log()

    assert code == 2
    assert log.startswith("worker: ")
    assert len(log.splitlines()) == 1
    assert all(name in log for name in variables)


@pytest.mark.parametrize(
    ("arguments", "configured", "expected"),
    [
        ([], False, "SCOREKEEP_CONFIG names no registry file"),
        (["--model", "other"], True, "has no model other; it has sums"),
    ],
)
def test_a_wrong_choice_of_models_is_named(
    arguments: list[str],
    configured: bool,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No registry, or a model that it lacks: one sentence, and exit code 2."""
    monkeypatch.setattr("sys.argv", ["worker", *arguments])
    monkeypatch.setattr(program, "set_up_logging", lambda **_: None)  # the root logger is pytest's
    monkeypatch.delenv("SCOREKEEP_CONFIG", raising=False)
    if configured:
        monkeypatch.setenv("SCOREKEEP_CONFIG", str(write_registry(tmp_path)))

    assert program.main() == 2
    assert expected in capsys.readouterr().err
