"""A bulk whose workers are killed after a second each, until it has ended: each row once.

``python -m benchmarks.bulk_kills --rows 200000 --workers 3`` starts PostgreSQL, Redis, an API and
the workers, kills every worker with SIGKILL a second after it began to serve, and starts another.
``--max-crashes`` is 20: these kills come from outside, and with the default of 3 a row that was in
hand three times is taken for one that kills workers. Then every line of the results is held against
a run without kills, and every job's events are counted.
"""

import argparse
import asyncio
import collections
import math
import sys
import tempfile
import time
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
import msgspec

from benchmarks.bulk import wait_for_end, write_rows
from contract.bulks import ENDED_BULKS, Bulk
from scorekeep.bulk import BulkClient
from tests.e2e.stack import Stack
from tests.services import Postgres, start_postgres, start_redis

_QUICK = {
    "SCOREKEEP_LEASE_S": "3",
    "SCOREKEEP_HEARTBEAT_S": "1",
    "SCOREKEEP_SWEEP_S": "0.5",
}
_POLL_S = 0.05
_LIVES_S = 1.0


class _Line(msgspec.Struct):
    line: int
    custom_id: str
    scores: list[list[float] | None]


async def _pids(server: Postgres) -> list[int]:
    """Return the processes that serve the model, oldest first."""
    rows = await _query(
        server, "SELECT pid FROM workers WHERE models::text LIKE '%ready%' ORDER BY id"
    )
    return [row[0] for row in rows]


async def _query(server: Postgres, statement: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(
        user="postgres", database="bulk", host=str(server.socket_dir), port=server.port
    )
    try:
        found: list[asyncpg.Record] = await connection.fetch(statement)
        return found
    finally:
        await connection.close()


async def _run_and_kill(
    stack: Stack, server: Postgres, bulks: BulkClient, path: Path, workers: int
) -> tuple[Bulk, int]:
    running = {(await stack.start_worker()) for _ in range(workers)}
    bulk = await bulks.submit(path, {"model": "m", "cache": "off"})
    kills, since = 0, dict[int, float]()
    while bulk.state not in ENDED_BULKS:
        await asyncio.sleep(_POLL_S)
        bulk = await bulks.get(bulk.id)
        for pid in await _pids(server):
            since.setdefault(pid, time.monotonic())
        due = [w for w in running if time.monotonic() - since.get(w.pid, math.inf) >= _LIVES_S]
        for worker in due:
            await stack.kill(worker)
            kills += 1
            running = running - {worker} | {await stack.start_worker()}
    return bulk, kills


async def _read(bulks: BulkClient, bulk: Bulk, path: Path) -> list[_Line]:
    await bulks.write_results(bulk.id, path)
    raw = await asyncio.to_thread(path.read_bytes)
    return [msgspec.json.decode(line, type=_Line) for line in raw.splitlines()]


async def _measure(options: argparse.Namespace, folder: Path, redis: str, server: Postgres) -> bool:
    models = {"m": {"source": "builtin:deterministic"}}
    settings = _QUICK | {"SCOREKEEP_MAX_CRASHES": str(options.max_crashes)}
    async with Stack(folder, redis, models, server.url("bulk"), settings) as stack:
        path = folder / "rows.jsonl"
        await asyncio.to_thread(write_rows, path, options.rows)
        async with BulkClient(stack.url) as bulks:
            started = time.perf_counter()
            bulk, kills = await _run_and_kill(stack, server, bulks, path, options.workers)
            total_s = time.perf_counter() - started
            lines = await _read(bulks, bulk, folder / "killed.jsonl")
            quiet = {"model": "m", "cache": "off", "metadata": {"run": "quiet"}}
            calm, _ = await wait_for_end(bulks, await bulks.submit(path, quiet))
            expected = await _read(bulks, calm, folder / "calm.jsonl")
    again = await _query(
        server,
        f"SELECT attempt, count(*) FROM jobs WHERE bulk_id = '{bulk.id}' GROUP BY 1 ORDER BY 1",  # noqa: S608  # ours
    )
    twice = await _query(
        server,
        "SELECT job_id FROM events WHERE job_id IS NOT NULL GROUP BY job_id, generation "
        "HAVING count(*) > 1",
    )
    ids = collections.Counter(line.custom_id for line in lines)
    wrong = sum(1 for a, b in zip(lines, expected, strict=False) if a != b)
    sys.stdout.write(
        f"{bulk.state.value} in {total_s:.1f} s with {kills} workers killed\n"
        f"rows: {len(lines)} of {options.rows}, {len(ids)} distinct ids, {wrong} that differ from "
        f"a run without kills; counts: {bulk.counts.scored} scored, {bulk.counts.failed} failed\n"
        f"jobs by attempts: {dict(again)}; jobs with two terminal events: {len(twice)}\n"
    )
    whole = len(lines) == len(ids) == len(expected) == bulk.counts.scored == options.rows
    return whole and not wrong and not twice


def main() -> int:
    """Run it; 1 where a row is missing, doubled or wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--max-crashes", type=int, default=20)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="scorekeep-kills-") as folder,
        start_postgres(durable=True) as server,
        start_redis() as redis,
    ):
        server.execute("CREATE DATABASE bulk")
        whole = asyncio.run(_measure(options, Path(folder), redis, server))
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
