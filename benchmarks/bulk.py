"""A million one-item rows through ``/v1/bulks`` with the deterministic scorer, on PostgreSQL.

``python -m benchmarks.bulk --rows 1000000 --workers 1`` starts PostgreSQL, Redis, one API and the
workers, uploads a file, and prints: rows/s in (uploaded; validated and stored), rows/s through,
peak memory, size on disk, and the times of two re-scores: one that finds everything in the cache,
one that misses one row in a hundred.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
import msgspec
import psutil

from contract.bulks import ENDED_BULKS, Bulk
from scorekeep.bulk import BulkClient
from tests.e2e.stack import Stack
from tests.services import Postgres, start_postgres, start_redis

_POLL_S = 0.1
_POSTGRES = "postgres"


@dataclass(frozen=True, slots=True)
class Passage:
    """What a bulk took: until it was uploaded, until it was stored, until its end; CPU a row."""

    bulk: Bulk
    uploaded_s: float
    stored_s: float
    total_s: float
    cpu_us: dict[str, float]


class Peak:
    """The memory and the computing time of some processes, while something else runs."""

    def __init__(self, processes: dict[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in processes.items()}
        self._before = self._spent()
        self.bytes = dict.fromkeys(processes, 0)

    def start(self) -> None:
        """Count computing time from now on."""
        self._before = self._spent()

    def spent_us(self, rows: int) -> dict[str, float]:
        """Return the microseconds that each process has computed since ``start``, per row.

        Unlike times by the clock, neighbours on the machine hardly change it.
        """
        spent = {name: s - self._before[name] for name, s in self._spent().items()}
        spent["all"] = sum(spent.values())
        return {name: 1e6 * s / rows for name, s in spent.items()}

    async def watch(self) -> None:
        """Sample for ever."""
        while True:
            for name, process in self._processes.items():
                self.bytes[name] = max(self.bytes[name], process.memory_info().rss)
            await asyncio.sleep(_POLL_S)

    def _spent(self) -> dict[str, float]:
        return {
            name: _count_cpu(process, backends=name == _POSTGRES)
            for name, process in self._processes.items()
        }


def render_cpu(spent_us: Mapping[str, float]) -> str:
    """Return what ``Peak.spent_us`` counted, in a line."""
    return ", ".join(f"{name} {us:.1f} us" for name, us in spent_us.items())


def _count_cpu(process: psutil.Process, *, backends: bool) -> float:
    """The seconds of a process; PostgreSQL computes in its children, some of which have ended."""
    times = process.cpu_times()
    spent = sum(times[:4]) if backends else sum(times[:2])
    for child in process.children() if backends else []:
        with contextlib.suppress(psutil.NoSuchProcess):
            spent += sum(child.cpu_times()[:2])
    return float(spent)


def write_rows(path: Path, count: int, *, changed_every: int = 0) -> None:
    """Write a file of one-item rows; every so many have another text than without."""
    with path.open("wb") as file:
        for start in range(0, count, 10_000):
            file.write(b"".join(_render(start, min(count, start + 10_000), changed_every)))


def _render(start: int, stop: int, changed_every: int) -> Iterator[bytes]:
    for n in range(start, stop):
        text = f"row {n} of a corpus that somebody wants to filter"
        if changed_every and n % changed_every == 0:
            text += ", changed"
        yield msgspec.json.encode({"custom_id": f"row-{n}", "item": text}) + b"\n"


async def wait_for_end(bulks: BulkClient, bulk: Bulk) -> tuple[Bulk, float]:
    """Return the bulk at its end, and after how many seconds every line was stored."""
    started, stored_s = time.perf_counter(), 0.0
    while bulk.state not in ENDED_BULKS:
        bulk = await bulks.get(bulk.id)
        if not stored_s and bulk.counts.lines and bulk.ingested_lines == bulk.counts.lines:
            stored_s = time.perf_counter() - started
        await asyncio.sleep(_POLL_S)
    return bulk, stored_s


async def pass_through(
    bulks: BulkClient, path: Path, rows: int, peak: Peak, **options: object
) -> Passage:
    """Submit a file of so many rows and return what it took, by the clock and by the processes."""
    peak.start()
    started = time.perf_counter()
    bulk = await bulks.submit(path, {"model": "m", **options})
    uploaded_s = time.perf_counter() - started
    bulk, stored_s = await wait_for_end(bulks, bulk)
    return Passage(bulk, uploaded_s, stored_s, time.perf_counter() - started, peak.spent_us(rows))


async def _run(bulks: BulkClient, path: Path, rows: int, name: str, peak: Peak) -> Bulk:
    took = await pass_through(bulks, path, rows, peak)
    counts = took.bulk.counts
    sys.stdout.write(
        f"{name}: {took.bulk.state.value}, {counts.scored} scored, {counts.from_cache} from the "
        f"cache\n"
        f"  uploaded in {took.uploaded_s:.1f} s; validated and stored in {took.stored_s:.1f} s = "
        f"{rows / max(took.stored_s, 1e-9):.0f} rows/s in\n"
        f"  all of it in {took.total_s:.1f} s = {rows / took.total_s:.0f} rows/s through\n"
        f"  CPU a row: {render_cpu(took.cpu_us)}\n"
    )
    return took.bulk


async def _indexed(bulks: BulkClient, path: Path, rows: int) -> None:
    """Wait until the cache knows the first bulk: a one-row bulk of its last row finds it."""
    started = time.perf_counter()
    last = next(_render(rows - 1, rows, 0))
    for attempt in range(600):
        probe = path.with_name(f"probe-{attempt}.jsonl")
        probe.write_bytes(last)
        options = {"model": "m", "metadata": {"probe": str(attempt)}}
        bulk, _ = await wait_for_end(bulks, await bulks.submit(probe, options))
        if bulk.counts.from_cache:
            break
    sys.stdout.write(f"cache filled {time.perf_counter() - started:.1f} s after the end\n")


async def _rescore(bulks: BulkClient, first: Bulk, rows: int, peak: Peak) -> None:
    peak.start()
    started = time.perf_counter()
    again, _ = await wait_for_end(bulks, await bulks.rescore({"source": {"bulk": first.id}}))
    sys.stdout.write(
        f"re-score, {again.counts.from_cache} of {again.counts.scored} from the cache: "
        f"{time.perf_counter() - started:.1f} s; CPU a row: {render_cpu(peak.spent_us(rows))}\n"
    )


async def _measure(options: argparse.Namespace, folder: Path, redis: str, server: Postgres) -> None:
    models = {"m": {"source": "builtin:deterministic"}}
    async with Stack(folder, redis, models, database_url=server.url("bulk")) as stack:
        workers = [await stack.start_worker() for _ in range(options.workers)]
        await stack.wait_for("/readyz")
        peak = Peak(
            {"client": os.getpid(), "api": stack.api_pid, _POSTGRES: server.process.pid}
            | {f"worker {n}": worker.pid for n, worker in enumerate(workers)}
        )
        path, changed = folder / "rows.jsonl", folder / "changed.jsonl"
        await asyncio.to_thread(write_rows, path, options.rows)
        await asyncio.to_thread(write_rows, changed, options.rows, changed_every=100)
        watching = asyncio.create_task(peak.watch())
        async with BulkClient(stack.url) as bulks:
            first = await _run(bulks, path, options.rows, "first run", peak)
            if not options.once:
                await _indexed(bulks, path, options.rows)
                await _rescore(bulks, first, options.rows, peak)
                await _run(bulks, changed, options.rows, "one row in a hundred changed", peak)
            started = time.perf_counter()
            lines = await bulks.write_results(first.id, folder / "out.jsonl")
            sys.stdout.write(f"results: {lines} lines in {time.perf_counter() - started:.1f} s\n")
        watching.cancel()
        for name, size in peak.bytes.items():
            sys.stdout.write(f"peak memory of {name}: {size / 2**20:.0f} MiB\n")
        blobs = sum(p.stat().st_size for p in (folder / "data").rglob("*") if p.is_file())
        sys.stdout.write(f"blobs and files on disk: {blobs / 2**20:.0f} MiB\n")


async def _database_size(server: Postgres) -> int:
    connection = await asyncpg.connect(
        user="postgres", database="postgres", host=str(server.socket_dir), port=server.port
    )
    try:
        size: int = await connection.fetchval("SELECT pg_database_size('bulk')")
        return size
    finally:
        await connection.close()


def main() -> None:
    """Run everything and print figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--once", action="store_true", help="the first run and its results only")
    parser.add_argument("--unsafe", action="store_true", help="PostgreSQL without fsync")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="scorekeep-bulk-") as folder,
        start_postgres(durable=not options.unsafe) as server,
        start_redis() as redis,
    ):
        server.execute("CREATE DATABASE bulk")
        asyncio.run(_measure(options, Path(folder), redis, server))
        size = asyncio.run(_database_size(server))
        sys.stdout.write(f"database on disk: {size / 2**20:.0f} MiB\n")


if __name__ == "__main__":
    main()
