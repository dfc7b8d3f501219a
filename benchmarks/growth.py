"""What a job costs as the queue, the registry and the tenants grow; and workers, and blobs.

``python -m benchmarks.growth`` prints, on PostgreSQL with fsync: what it costs to add, claim and
complete a row with a thousand rows queued, ten thousand, and so on, the same for many models and
many tenants; a bulk with 1, 2 and 4 workers and the deterministic scorer; and what a local blob
costs to write and to read a part of.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import text

from benchmarks.bulk import Peak, pass_through, write_rows
from benchmarks.fairness import CLAIM_JOBS, claim, complete, make_job
from benchmarks.report import Report, add_options
from contract.jobs import Lane
from scorekeep.bulk import BulkClient
from storage.blobs import BlobStore
from storage.claims import next_tenant
from storage.database import Database
from storage.jobs import add_jobs
from storage.migrating import migrate
from storage.usage import read_waiting
from tests.e2e.stack import Stack
from tests.services import Postgres, start_postgres, start_redis

_PAGE = 5000
_PARTS = ("queue", "models", "tenants", "workers", "blobs")
_KIB = 1024


async def _fill(database: Database, rows: int, tenants: int, models: int) -> float:
    """Add rows, spread over tenants and models; return microseconds a row."""
    began = time.perf_counter()
    for start in range(0, rows, _PAGE):
        numbers = range(start, min(rows, start + _PAGE))
        async with database.transaction() as tx:
            await add_jobs(
                tx, [make_job(f"t{n % tenants}", Lane.NORMAL, f"m{n % models}") for n in numbers]
            )
    took_s = time.perf_counter() - began
    async with database.transaction() as tx:
        await tx.execute(text("ANALYZE jobs"))
    return 1e6 * took_s / rows


async def _measure(
    server: Postgres, name: str, rounds: int, *, rows: int, tenants: int = 1, models: int = 1
) -> dict[str, Any]:
    """Fill a fresh database, then claim and complete batches as a worker does."""
    server.execute(f"CREATE DATABASE {name}")
    await asyncio.to_thread(migrate, server.url(name))
    database = Database(server.url(name), command_timeout_s=300)
    try:
        add_us = await _fill(database, rows, tenants, models)
        served = [f"m{n}" for n in range(models)]
        claims: list[float] = []
        ends: list[float] = []
        after, taken = "", 0
        for number in range(rounds):
            began = time.perf_counter()
            async with database.transaction() as tx:
                jobs = await claim(tx, number, served, after)
            claimed = time.perf_counter()
            await complete(database, jobs)
            claims.append(claimed - began)
            ends.append(time.perf_counter() - claimed)
            after, taken = next_tenant(after, jobs), taken + len(jobs)
        began = time.perf_counter()
        async with database.snapshot() as tx:
            await read_waiting(tx)
        return {
            "queued rows": rows,
            "tenants": tenants,
            "models": models,
            "add us a row": add_us,
            "claim ms": 1000 * statistics.median(claims),
            "complete ms": 1000 * statistics.median(ends),
            "rows a claim": taken / rounds,
            "us a row": 1e6 * (sum(claims) + sum(ends)) / max(1, taken),
            "count what waits ms": 1000 * (time.perf_counter() - began),
        }
    finally:
        await database.close()


async def _scale_workers(
    server: Postgres, redis: str, counts: Sequence[int], rows: int
) -> list[dict[str, Any]]:
    """One bulk through more and more workers; each with a database of its own."""
    found: list[dict[str, Any]] = []
    for count in counts:
        name = f"workers_{count}"
        server.execute(f"CREATE DATABASE {name}")
        with tempfile.TemporaryDirectory(prefix="scorekeep-scaling-") as folder:
            path = Path(folder) / "rows.jsonl"
            await asyncio.to_thread(write_rows, path, rows)
            models = {"m": {"source": "builtin:deterministic"}}
            async with Stack(Path(folder), redis, models, server.url(name)) as stack:
                workers = [await stack.start_worker() for _ in range(count)]
                await stack.wait_for("/readyz")
                processes = {"api": stack.api_pid, "postgres": server.process.pid}
                processes |= {f"worker {n}": one.pid for n, one in enumerate(workers)}
                peak = Peak(processes)
                async with BulkClient(stack.url) as bulks:
                    took = await pass_through(bulks, path, rows, peak)
        assert took.bulk.counts.scored == rows
        workers_us = sum(us for name, us in took.cpu_us.items() if name.startswith("worker"))
        found.append(
            {
                "workers": count,
                "rows": rows,
                "rows/s in": rows / max(took.stored_s, 1e-9),
                "rows/s through": rows / took.total_s,
                "API us": took.cpu_us["api"],
                "PostgreSQL us": took.cpu_us["postgres"],
                "workers us": workers_us,
            }
        )
    return found


async def _measure_blobs(rounds: int) -> list[dict[str, Any]]:
    """A local folder: write durably, read a hundredth of it."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="scorekeep-blobs-") as folder:
        store = BlobStore.open(f"file://{folder}")
        for size in (16 * _KIB, 256 * _KIB, 4096 * _KIB):
            data = bytes(range(256)) * (size // 256)
            writes: list[float] = []
            reads: list[float] = []
            for number in range(rounds):
                key = f"batches/{size}-{number}"
                began = time.perf_counter()
                await store.put(key, data)
                written = time.perf_counter()
                await store.get_range(key, size // 2, size // 2 + size // 100)
                writes.append(written - began)
                reads.append(time.perf_counter() - written)
            rows.append(
                {
                    "KiB": size // _KIB,
                    "write ms": 1000 * statistics.median(writes),
                    "MiB/s": size / 2**20 / statistics.median(writes),
                    "read a part ms": 1000 * statistics.median(reads),
                }
            )
    return rows


async def _run(options: argparse.Namespace, server: Postgres, redis: str) -> None:
    parts = options.only or _PARTS
    report = Report("growth", options.results)
    rounds = 100 if options.long else 20
    most, spread = (1_000_000, 100_000) if options.long else (10_000, 10_000)
    if "queue" in parts:
        sizes = [n for n in (1000, 10_000, 100_000, 1_000_000) if n <= most]
        rows = [
            await _measure(server, f"queue_{n}", min(rounds, n // CLAIM_JOBS), rows=n)
            for n in sizes
        ]
        report.add("as the queue grows", rows)
    if "models" in parts:
        rows = [
            await _measure(server, f"models_{n}", rounds, rows=spread, models=n) for n in (1, 8, 64)
        ]
        report.add("as the registry grows", rows)
    if "tenants" in parts:
        rows = [
            await _measure(server, f"tenants_{n}", rounds, rows=spread, tenants=n)
            for n in (1, 30, 1000)
        ]
        report.add("as the tenants grow", rows)
    if "workers" in parts:
        count = 300_000 if options.long else 30_000
        report.add("workers", await _scale_workers(server, redis, (1, 2, 4), count))
    if "blobs" in parts:
        report.add("blobs", await _measure_blobs(5 * rounds))


def main() -> None:
    """Start PostgreSQL and Redis, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, _PARTS)
    options = parser.parse_args()
    with start_postgres(durable=True) as server, start_redis() as redis:
        asyncio.run(_run(options, server, redis))


if __name__ == "__main__":
    main()
