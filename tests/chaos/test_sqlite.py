"""One SQLite file under an API, workers and a deliverer, each a process of its own."""

import asyncio
import contextlib
import sqlite3
import time
from collections import Counter
from pathlib import Path

import pytest

from storage.counters import read_counts
from storage.database import Database
from tests.e2e.stack import Receiver, Stack, receiving
from tests.services import start_redis
from tests.storage.factories import run_sql

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
_MODELS = {"cheap": {"source": "builtin:deterministic"}}
_CLIENTS = 20
_ROUNDS = 4


async def use(stack: Stack, receiver: Receiver, seen: Counter[tuple[str, int]]) -> None:
    """Do what a user does, over and over: submit, wait, look, list, delete."""
    for number in range(_ROUNDS):
        body = {"model": "cheap", "items": ["a", "b"], "webhook": receiver.url}
        status, _, job = await stack.post("/v1/jobs", body)
        seen["POST", status] += 1
        path = f"/v1/jobs/{job['id']}"
        while job["state"] in {"queued", "running"}:
            status, _, job = await stack.get(path, params={"wait": "20"})
            seen["GET", status] += 1
        status, _, _ = await stack.get(f"{path}/scores")
        seen["GET", status] += 1
        status, _, _ = await stack.get("/v1/jobs", params={"state": "succeeded"})
        seen["GET", status] += 1
        if number % 2:
            status, _, _ = await stack.request("DELETE", path)
            seen["DELETE", status] += 1


def hold_the_file(path: Path, seconds: float) -> None:
    """Keep every writer out, as a backup tool or a large transaction of another's would."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(seconds)
        connection.execute("COMMIT")


async def test_no_user_hears_of_a_lock(tmp_path: Path) -> None:
    """Every call succeeds, also while the file is held for 2 s; results are written in groups."""
    seen: Counter[tuple[str, int]] = Counter()
    with start_redis() as redis_url:
        async with Stack(tmp_path, redis_url, _MODELS) as stack, receiving() as receiver:
            for _ in range(2):
                await stack.start_worker()
            await stack.start_worker("--deliveries-only")
            await stack.wait_for("/readyz")
            rows = tmp_path / "data" / "scorekeep.db"
            holding = asyncio.create_task(asyncio.to_thread(hold_the_file, rows, 2.0))
            await asyncio.gather(*(use(stack, receiver, seen) for _ in range(_CLIENTS)))
            await holding
            kept = _CLIENTS * _ROUNDS // 2
            await receiver.wait_for(kept, 60)
            await stack.stop_all()
            log = stack.log
    database = Database(f"sqlite+aiosqlite:///{rows}")
    async with database.snapshot() as tx:
        counts = await read_counts(tx)
    states = await run_sql(database, "SELECT state, count(*) AS n FROM jobs GROUP BY state")
    await database.close()

    jobs = _CLIENTS * _ROUNDS
    print(f"{jobs} jobs in {counts['commits']:.0f} commits; answers {dict(seen)}")  # noqa: T201
    assert {status for _, status in seen} == {200, 202, 204}, seen
    assert "locked" not in log
    assert "does not answer" not in log
    assert [(row.state, row.n) for row in states] == [("succeeded", jobs)]
    assert counts["commits"] < jobs / 2
