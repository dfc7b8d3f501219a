"""Ten thousand events to ten receivers, of which two are slow and one is down.

``python -m benchmarks.webhooks`` writes the events as workers do, in groups, while processes
``python -m worker --deliveries-only`` deliver them to receivers on loopback. It ends when the
healthy receivers have everything; p50 and p99 are from the event's moment to its arrival. On a new
SQLite file, or with ``--postgresql`` on a server of its own that syncs every commit.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime

import msgspec
from aiohttp import web
from sqlalchemy import text

from contract.jobs import JobState, Lane
from contract.webhooks import Event
from storage.claims import claim_jobs
from storage.database import Database
from storage.jobs import NewJob, add_jobs
from storage.migrating import migrate
from storage.outcomes import JobOutcome, complete_jobs
from tests.services import free_port, start_postgres

RECEIVERS = 10
SLOW = (0, 1)
DOWN = 2
GROUP = 100


@dataclass
class Receiver:
    """One receiver: what arrived, how long it took from the event, how many at once at most."""

    delay_s: float = 0.0
    url: str = ""
    latencies_s: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    now: int = 0
    most: int = 0

    async def handle(self, request: web.Request) -> web.Response:
        """Take one event."""
        body = await request.read()
        arrived_at = time.time()
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        self.now -= 1
        happened_at = datetime.fromisoformat(msgspec.json.decode(body, type=Event).timestamp)
        event_id = request.headers["webhook-id"]
        self.latencies_s.setdefault(event_id, arrived_at - happened_at.timestamp())
        return web.Response(status=204)


@contextlib.asynccontextmanager
async def _receive(receiver: Receiver) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_post("/hook", receiver.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    yield
    await runner.cleanup()


async def _write(database: Database, urls: list[str], events: int, rate: float) -> float:
    """Write the events in groups, one job each, at ``rate`` a second; return the seconds."""
    started = time.perf_counter()
    for first in range(0, events, GROUP):
        new = [
            NewJob(
                tenant="t",
                model="m",
                lane=Lane.NORMAL,
                request=b"{}",
                item_count=1,
                webhook_url=url,
            )
            for url in (urls[n % len(urls)] for n in range(first, first + GROUP))
        ]
        async with database.transaction() as tx:
            await add_jobs(tx, new)
            claimed = await claim_jobs(
                tx, worker="w", models=["m"], max_jobs=GROUP, max_tokens=10**9, lease_s=60
            )
            outcomes = [
                JobOutcome(id=j.id, attempt=j.attempt, state=JobState.SUCCEEDED, scored=1, failed=0)
                for j in claimed
            ]
            await complete_jobs(tx, outcomes)
        ahead_s = (first + GROUP) / rate - (time.perf_counter() - started) if rate else 0.0
        await asyncio.sleep(max(0.0, ahead_s))
    return time.perf_counter() - started


async def _wait_until_delivering(database: Database, receiver: Receiver) -> None:
    """Return when a process delivers: what it takes to start is no latency of an event."""
    await _write(database, [receiver.url], GROUP, 0.0)
    while len(receiver.latencies_s) < GROUP:  # noqa: ASYNC110  # the receiver sends no signal
        await asyncio.sleep(0.02)
    receiver.latencies_s.clear()


async def _attempts(database: Database, url: str) -> list[tuple[str, int, int]]:
    query = """
    SELECT d.state, count(DISTINCT d.id), count(a.attempt) FROM deliveries d
    LEFT JOIN delivery_attempts a ON a.delivery_id = d.id WHERE d.url = :url
    GROUP BY d.state ORDER BY d.state"""
    async with database.snapshot() as tx:
        return [tuple(row) for row in await tx.execute(text(query), {"url": url})]


async def _run(options: argparse.Namespace, folder: str) -> None:
    url = options.database_url or f"sqlite+aiosqlite:///{folder}/scorekeep.db"
    await asyncio.to_thread(migrate, url)
    database = Database(url)
    receivers = [Receiver(options.slow_s if n in SLOW else 0.0) for n in range(RECEIVERS)]
    healthy = [each for n, each in enumerate(receivers) if n not in (*SLOW, DOWN)]
    share = options.events // RECEIVERS
    environment = os.environ | {
        "SCOREKEEP_DATABASE_URL": url,
        "SCOREKEEP_BLOB_URL": f"file://{folder}/blobs",
        "SCOREKEEP_REDIS_URL": "redis://127.0.0.1:1/0",
        "SCOREKEEP_WEBHOOK_ALLOW_HTTP": "1",
        "SCOREKEEP_WEBHOOK_ALLOWED_NETWORKS": "127.0.0.0/8",
        "SCOREKEEP_SWEEP_S": "0.2",
        "SCOREKEEP_LOG_LEVEL": "WARNING",
    }
    async with contextlib.AsyncExitStack() as stack:
        for n, receiver in enumerate(receivers):
            if n != DOWN:
                await stack.enter_async_context(_receive(receiver))
        receivers[DOWN].url = f"http://127.0.0.1:{free_port()}/hook"
        workers = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "worker", "--deliveries-only"), env=environment
            )
            for _ in range(options.workers)
        ]
        await _wait_until_delivering(database, healthy[0])
        started = time.perf_counter()
        written_s = await _write(database, [r.url for r in receivers], options.events, options.rate)
        while any(len(each.latencies_s) < share for each in healthy):  # noqa: ASYNC110  # ten of them
            await asyncio.sleep(0.02)
        seconds = time.perf_counter() - started
        for worker in workers:
            worker.terminate()
            await worker.wait()
        delivered = sum(len(each.latencies_s) for each in receivers)
        latencies = [value for each in healthy for value in each.latencies_s.values()]
        cuts = statistics.quantiles(latencies, n=100)
        _say(
            f"{options.events} events to {RECEIVERS} receivers ({len(SLOW)} take "
            f"{options.slow_s:g} s, 1 is down), {database.dialect}, "
            f"{options.workers} delivering: written in {written_s:.1f} s; "
            f"the {len(healthy)} healthy ones have all of their {len(latencies)} after "
            f"{seconds:.1f} s = {delivered / seconds * 60:.0f} deliveries/min\n"
            f"healthy, event to arrival: p50 {cuts[49]:.3f} s, p99 {cuts[98]:.3f} s, at most "
            f"{max(each.most for each in healthy)} at once each"
        )
        for name, number in [*(("slow", n) for n in SLOW), ("down", DOWN)]:
            states = ", ".join(
                f"{count} {state} with {attempts} attempts"
                for state, count, attempts in await _attempts(database, receivers[number].url)
            )
            _say(f"{name}: {states}; at most {receivers[number].most} at once")
    await database.close()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Run once and print four or five lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=0.0, help="events/s (default: no limit)")
    parser.add_argument("--slow-s", type=float, default=2.0, help="what the slow receivers take")
    parser.add_argument("--workers", type=int, default=1, help="delivering processes")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--database-url", help="default: a new SQLite file")
    where.add_argument("--postgresql", action="store_true", help="start a server for the run")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="scorekeep-bench-"))
        if options.postgresql:
            server = stack.enter_context(start_postgres(durable=True))
            options.database_url = server.url("postgres")
        asyncio.run(_run(options, folder))


if __name__ == "__main__":
    main()
