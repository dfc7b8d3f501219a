"""How long one tenant's job waits behind another's 100 000, and what the claim costs then.

``python -m benchmarks.fairness [--rows N]`` fills SQLite and PostgreSQL (with fsync) with N queued
jobs of one tenant, then again and again adds a single job of another and counts the claims until a
worker has it; every claim is completed. Prints claims, their latency, and PostgreSQL's plan.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from sqlalchemy import text

from contract.jobs import JobState, Lane
from storage.claiming import CLAIM
from storage.claims import AGED_EVERY, ClaimedJob, claim_jobs
from storage.database import Database, Transaction
from storage.jobs import NewJob, add_jobs
from storage.migrating import migrate
from storage.outcomes import JobOutcome, complete_jobs
from storage.statements import _compile
from storage.usage import read_waiting
from tests.services import start_postgres

CLAIM_JOBS = 64
_ROUNDS = 50
_REQUEST = msgspec.json.encode({"model": "m", "items": ["a text of some forty characters, or so"]})


def make_job(tenant: str, lane: Lane, model: str = "m") -> NewJob:
    """Return a job of one short text."""
    return NewJob(
        tenant=tenant,
        model=model,
        lane=lane,
        request=_REQUEST,
        item_count=1,
        estimated_tokens=12,
    )


async def _fill(database: Database, rows: int) -> None:
    page = 5000
    for _ in range(0, rows, page):
        async with database.transaction() as tx:
            await add_jobs(tx, [make_job("heavy", Lane.NORMAL) for _ in range(page)])
    async with database.transaction() as tx:  # they have waited for long: ageing favours them
        await tx.execute(text("UPDATE jobs SET created_at = created_at - 1000"))
    if database.dialect == "postgresql":
        async with database.transaction() as tx:
            await tx.execute(text("ANALYZE jobs"))


async def claim(
    tx: Transaction, number: int, models: Sequence[str] = ("m",), after_tenant: str = ""
) -> list[ClaimedJob]:
    """Claim as a worker does at its ``number``-th claim."""
    return await claim_jobs(
        tx,
        worker="w",
        models=models,
        after_tenant=after_tenant,
        max_jobs=CLAIM_JOBS,
        max_tokens=4096,
        lease_s=30,
        aged_first=number % AGED_EVERY == 0,
    )


async def complete(database: Database, jobs: list[ClaimedJob]) -> None:
    """Write that they succeeded."""
    outcomes = [
        JobOutcome(id=job.id, attempt=job.attempt, state=JobState.SUCCEEDED, scored=1, failed=0)
        for job in jobs
    ]
    async with database.transaction() as tx:
        await complete_jobs(tx, outcomes)


async def _measure(database: Database, rows: int) -> None:
    await _fill(database, rows)
    costs: list[float] = []
    cpu: list[float] = []
    waited: list[int] = []
    number = 0
    for _ in range(_ROUNDS):
        async with database.transaction() as tx:
            (single,) = await add_jobs(tx, [make_job("light", Lane.NORMAL)])
        claims = 0
        while True:
            number += 1
            claims += 1
            async with database.transaction() as tx:
                began, spent = time.perf_counter(), time.process_time()
                jobs = await claim(tx, number)
                cpu.append((time.process_time() - spent) * 1000)
                costs.append((time.perf_counter() - began) * 1000)
            await complete(database, jobs)
            if single.id in {job.id for job in jobs}:
                break
        waited.append(claims)
    async with database.snapshot() as tx:
        began = time.perf_counter()
        await read_waiting(tx)
        reading_ms = (time.perf_counter() - began) * 1000
    costs.sort()
    print(  # noqa: T201
        f"{database.dialect}: {rows} queued rows of another tenant; a single job was in claim "
        f"{statistics.mean(waited):.2f} on average, {max(waited)} at most, of {_ROUNDS}; "
        f"a claim of {CLAIM_JOBS}: median {statistics.median(costs):.1f} ms, "
        f"{statistics.median(cpu):.1f} ms of this process's CPU, "
        f"p99 {costs[int(len(costs) * 0.99) - 1]:.1f} ms; counting what waits {reading_ms:.0f} ms"
    )


async def _explain(database: Database) -> None:
    statement = str(_compile(CLAIM["postgresql"], "postgresql", ""))
    values = {
        "worker": "w",
        "models": '["m"]',
        "max_jobs": CLAIM_JOBS,
        "max_tokens": 4096,
        "lease_s": 30.0,
        "aged": 0,
        "ageing_s": 60.0,
        "last_lane": 2,
        "after_tenant": "",
        "max_running": 0,
    }
    async with database.transaction() as tx:
        rows = await tx.execute(
            text(f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {statement}"), values
        )
        lines = [str(row[0]) for row in rows]
    wanted = ("Index", "Seq Scan", "Planning Time", "Execution Time")
    print("\n".join(line for line in lines if any(word in line for word in wanted)))  # noqa: T201


async def _run(rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite+aiosqlite:///{Path(folder) / 'fair.db'}"
        await asyncio.to_thread(migrate, url)
        database = Database(url)
        await _measure(database, rows)
        await database.close()
    with start_postgres(durable=True) as server:
        server.execute("CREATE DATABASE fair")
        await asyncio.to_thread(migrate, server.url("fair"))
        database = Database(server.url("fair"), command_timeout_s=300)
        await _measure(database, rows)
        await _explain(database)
        await database.close()


def main() -> None:
    """Read the number of rows, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    asyncio.run(_run(parser.parse_args().rows))


if __name__ == "__main__":
    main()
