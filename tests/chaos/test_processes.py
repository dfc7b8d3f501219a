"""Real worker processes: stalled, skewed, poisoned, on a full disk."""

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from contract.jobs import JobState
from storage.attempts import list_attempts
from storage.blobs import BlobStore
from storage.counters import read_counts
from storage.database import Database
from storage.doctor import examine
from storage.events import list_events
from storage.forgetting import drop_orphans
from storage.jobs import JobRow, NewJob, add_jobs
from storage.queue import Queue
from tests.chaos.worker import EXIT, OOM, RAISE
from tests.storage.factories import run_sql
from tests.worker.harness import TENANT, Bench, create_settings
from tests.worker.processes import ROOT, environment_of, write_registry

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
_WAIT_S = 90.0


class Setting:
    """A database, a ledger folder, and worker processes on them."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench = bench
        self.folder = folder

    @contextlib.contextmanager
    def start(
        self, name: str = "a", *prefix: str, **changes: object
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """Run a worker with a ledger of that name; ``prefix`` comes before its command."""
        settings = msgspec.structs.replace(self.bench.settings, **changes)
        command = [*prefix, sys.executable, "-m", "tests.chaos.worker", str(self.ledger(name))]
        process = subprocess.Popen(command, env=environment_of(settings), cwd=ROOT)  # noqa: S603
        try:
            yield process
        finally:
            for child in psutil.Process(process.pid).children() if prefix else ():
                child.kill()
            process.kill()
            process.wait(30)

    def ledger(self, name: str = "a") -> Path:
        """Where the scorer of that worker writes."""
        return self.folder / f"ledger-{name}"

    async def at_work(self, name: str = "a") -> None:
        """Return when that worker is inside a forward."""
        before = self._size(name)
        async with asyncio.timeout(_WAIT_S):
            while self._size(name) == before:  # noqa: ASYNC110  # a file sends no signal
                await asyncio.sleep(0.01)

    async def submit(self, *items: list[str]) -> list[str]:
        """Submit a job per list of texts."""
        new = [
            NewJob(
                tenant=TENANT,
                model="sums",
                lane="normal",  # type: ignore[arg-type]  # an enumeration of strings
                request=msgspec.json.encode({"items": texts, "model": "sums"}),
                item_count=len(texts),
                estimated_tokens=10,
            )
            for texts in items
        ]
        async with self.bench.database.transaction() as tx:
            return [row.id for row in await add_jobs(tx, new)]

    async def wait(self, ids: list[str]) -> list[JobRow]:
        """Wait for their ends."""
        return await self.bench.wait(*ids, timeout_s=_WAIT_S)

    async def events(self, ids: list[str]) -> set[int]:
        """Return the numbers of terminal events that occur."""
        async with self.bench.database.snapshot() as tx:
            return {len(await list_events(tx, job_id)) for job_id in ids}

    def _size(self, name: str) -> int:
        path = self.ledger(name)
        return path.stat().st_size if path.exists() else 0


@contextlib.asynccontextmanager
async def open_setting(
    database_url: str, blob_url: str, folder: Path, **changes: object
) -> AsyncIterator[Setting]:
    """Open the stores. There is no Redis: the sweep finds everything."""
    settings = create_settings(
        database_url,
        blob_url,
        "redis://127.0.0.1:1/0",
        config=str(write_registry(folder)),
        lease_s=3.0,
        heartbeat_s=0.5,
        sweep_s=0.3,
        log_level="ERROR",
        **changes,
    )
    database, queue = Database(settings.database), Queue(settings.redis_url)
    try:
        yield Setting(Bench(database, BlobStore.open(settings.blobs), queue, settings), folder)
    finally:
        await queue.close()
        await database.close()


@pytest.fixture
async def setting(sqlite_url: str, blob_url: str, tmp_path: Path) -> AsyncIterator[Setting]:
    """On SQLite: API, workers and doctor are separate processes on one file."""
    async with open_setting(sqlite_url, blob_url, tmp_path) as setting:
        yield setting


@pytest.fixture
async def apart(postgres_url: str, blob_url: str, tmp_path: Path) -> AsyncIterator[Setting]:
    """On PostgreSQL: a process that is stopped inside a transaction holds all of SQLite."""
    async with open_setting(postgres_url, blob_url, tmp_path) as setting:
        yield setting


async def test_a_worker_stopped_beyond_its_lease_is_fenced(apart: Setting) -> None:
    """SIGSTOP mid-forward: another finishes the jobs; awake again its result is dropped."""
    ids = await apart.submit(*([f"text {n}"] for n in range(100)))
    with apart.start("a") as sleeper:
        await apart.at_work("a")
        sleeper.send_signal(signal.SIGSTOP)
        with apart.start("b") as other:
            rows = await apart.wait(ids)
            sleeper.send_signal(signal.SIGCONT)
            for process in (sleeper, other):
                process.terminate()
                await asyncio.to_thread(process.wait, 60)
    database, store = apart.bench.database, apart.bench.blobs
    async with database.snapshot() as tx:
        counts = await read_counts(tx)
    await drop_orphans(database, store, older_than_s=-1.0)
    found = await examine(database, store, young_s=-1.0)

    assert {row.state for row in rows} == {JobState.SUCCEEDED}
    assert {row.attempt for row in rows} >= {2}
    assert await apart.events(ids) == {1}
    assert counts["leases_reaped"] > 0
    assert found.is_clean, found
    stale = {line.split()[0] for line in apart.ledger("a").read_text().splitlines()}
    assert stale & {row.id for row in rows if row.attempt == 2}


@pytest.mark.parametrize("skew", ["+10s", "-10s"])
async def test_a_skewed_clock_changes_no_lease(
    skew: str, postgres_url: str, blob_url: str, tmp_path: Path
) -> None:
    """A worker whose clock is 10 s off, three leases, neither loses jobs nor steals them."""
    if shutil.which("faketime") is None:
        pytest.skip("faketime is not installed: apt-get install faketime")
    async with open_setting(postgres_url, blob_url, tmp_path) as setting:
        ids = await setting.submit(*([f"text {n}"] for n in range(300)))
        with setting.start("skewed", "faketime", "-f", skew), setting.start("right"):
            rows = await setting.wait(ids)

    assert {row.state for row in rows} == {JobState.SUCCEEDED}
    assert {(row.attempt, row.crash_count) for row in rows} == {(1, 0)}


async def test_an_input_that_ends_the_process_is_found(setting: Setting) -> None:
    """The 63 neighbours finish; the culprit fails as poisoned after three workers."""
    ids = await setting.submit([EXIT], *([f"text {n}"] for n in range(63)))
    keeping = asyncio.create_task(_keep_running(setting))
    rows = await setting.wait(ids)
    keeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeping

    async with setting.bench.database.snapshot() as tx:
        history = await list_attempts(tx, rows[0].id)

    assert rows[0].state is JobState.FAILED
    assert setting.bench.problem(rows[0]).code == "poisoned"
    assert [(end.attempt, end.outcome) for end in history] == [(n, "lost") for n in (1, 2, 3)]
    assert len({end.worker for end in history}) == 3
    assert (rows[0].crash_count, rows[0].attempt) == (3, 3)
    assert {row.state for row in rows[1:]} == {JobState.SUCCEEDED}
    assert max(row.crash_count for row in rows[1:]) < 3


@pytest.mark.parametrize(("item", "state"), [(RAISE, "failed"), (OOM, "succeeded")])
async def test_an_input_that_raises_harms_no_neighbour(
    item: str, state: str, setting: Setting
) -> None:
    """63 neighbours finish; what ran out of memory among many succeeds among few."""
    ids = await setting.submit([item], *([f"text {n}"] for n in range(63)))
    with setting.start():
        rows = await setting.wait(ids)

    assert rows[0].state == state
    assert {row.state for row in rows[1:]} == {JobState.SUCCEEDED}
    assert max(row.attempt for row in rows) <= 2


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 4 MiB without a byte left; delete ``filler`` to make space."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:  # noqa: S603
        pytest.skip("mounting a tmpfs needs root")
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)  # noqa: S603, S607


async def test_a_full_disk_is_waited_for(sqlite_url: str, full_disk: Path, tmp_path: Path) -> None:
    """No row names half a file; once there is space all jobs finish, by the same attempt."""
    async with open_setting(sqlite_url, f"file://{full_disk}/blobs", tmp_path) as setting:
        ids = await setting.submit(*([f"text {n}"] for n in range(20)))
        with setting.start():
            await setting.at_work()
            await asyncio.sleep(2)
            full = await run_sql(
                setting.bench.database,
                "SELECT count(*) AS n FROM jobs WHERE blob_key IS NOT NULL",
            )
            (full_disk / "filler").unlink()
            rows = await setting.wait(ids)
        found = await examine(setting.bench.database, setting.bench.blobs, deep=True, young_s=-1.0)

    assert full[0].n == 0
    assert {(row.state, row.attempt) for row in rows} == {(JobState.SUCCEEDED, 1)}
    assert found.findings["rows_without_bytes"] == 0
    assert found.findings["temporary_files"] == 0


async def _keep_running(setting: Setting) -> None:
    """Start a worker whenever the last one ended, as a supervisor does."""
    for number in range(20):
        with setting.start(f"life-{number}") as process:
            try:
                while process.poll() is None:  # noqa: ASYNC110  # an exit sends no signal
                    await asyncio.sleep(0.05)
            finally:
                process.kill()
