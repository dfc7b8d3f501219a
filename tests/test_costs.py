"""What a job costs the stores, in quantities that noise cannot move: the gate of the pipeline.

Times are in ``benchmarks``; here a statement, a commit or a Redis command too many fails a test,
as does a row or a blob that grew. What happens by the clock (sweeps, polls, heartbeats, arq's
looks at its queue) is told apart by its text and left out.
"""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from sqlalchemy import Table, event, select
from sqlalchemy.engine import Engine

from storage.bulk_tables import bulk_chunks, score_cache
from storage.database import Database
from storage.tables import blobs, events, jobs
from tests.bulk.bench import Bulks, rows
from tests.bulk.conftest import run
from tests.worker.harness import create_settings

#: What Redis is asked by the clock, whatever there is to do, or by this test.
_POLLS = {"client|setinfo", "config", "exists", "hello", "info", "ping", "subscribe", "unwatch"}
_POLLS |= {"watch", "zrangebyscore", "zscore"}
#: A claim also looks whether there is more: that it does so once too often is seen by their number.
_CLAIM = re.compile(r"WITH RECURSIVE later")
#: SQL's own clockwork, and what ``GET`` of a bulk asks: the tests poll.
_CLOCK = re.compile(
    r"^(BEGIN|PRAGMA|SELECT 1\b|WITH due)|workers|counters|throughput|deliver|tenant_limits"
    r"|state = 'cancelling'|lease_until_at (<|= NULL)|in_bulks|FROM bulks WHERE|sum\(lines_"
    r"|heartbeat_at|bulks\.state NOT IN|bulks\.id, bulks\.tenant"
)
_WRITE = re.compile(r"\b(INSERT INTO|UPDATE|DELETE FROM)\b")
ROWS = 2000


@dataclass
class Costs:
    """What the stores were asked to do."""

    statements: Counter[str] = field(default_factory=Counter)
    claims: int = 0
    commits: int = 0
    commands: Counter[str] = field(default_factory=Counter)

    @property
    def writes(self) -> int:
        """Statements that write, without claims."""
        return sum(n for told, n in self.statements.items() if _WRITE.search(told))

    def __str__(self) -> str:
        """What to look at where a bound is exceeded."""
        told = [f"{n} {statement[:160]}" for statement, n in self.statements.most_common()]
        head = f"{self.claims} claims, {self.commits} commits, {self.writes} writes"
        return "\n".join([head, *told, f"{self.commands}"])


@contextlib.contextmanager
def counting(redis_url: str) -> Iterator[Costs]:
    """Count what all engines of this process and all clients of this Redis do meanwhile."""
    costs = Costs()
    writing: set[int] = set()

    def note(connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        told = " ".join(statement.split())
        if _CLAIM.match(told):
            costs.claims += 1
        elif not _CLOCK.search(told):
            costs.statements[told] += 1
            if _WRITE.search(told):
                writing.add(id(connection))

    def note_commit(connection: Any) -> None:
        costs.commits += id(connection) in writing
        writing.discard(id(connection))

    before = _list_commands(redis_url)
    event.listen(Engine, "before_cursor_execute", note)
    event.listen(Engine, "commit", note_commit)
    try:
        yield costs
    finally:
        event.remove(Engine, "before_cursor_execute", note)
        event.remove(Engine, "commit", note_commit)
        costs.commands = _list_commands(redis_url) - before


def _list_commands(redis_url: str) -> Counter[str]:
    with redis.Redis.from_url(redis_url) as client:
        stats: Any = client.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}
    return Counter({name: count for name, count in calls.items() if name not in _POLLS})


@pytest.fixture
async def running(
    database_url: str, database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Bulks]:
    """The application and a worker on each database; sweeps and heartbeats do not come up."""
    settings = create_settings(
        database_url, blob_url, redis_url, sweep_s=600.0, heartbeat_s=600.0, lease_s=3000.0
    )
    async with run(settings, database) as bulks:
        await bulks.start_worker()
        await score(bulks, "warm")
        yield bulks


async def score(bulks: Bulks, text: str, **fields: Any) -> None:
    """Submit one job and wait for its end."""
    body = {"model": "tiny", "items": [text], **fields}
    submitted = await bulks.service.post("/v1/jobs", body)
    ended = await bulks.service.get(f"/v1/jobs/{submitted.json['id']}?wait=20")
    assert ended.json["state"] == "succeeded"


async def test_jobs_one_at_a_time(running: Bulks, redis_url: str, database: Database) -> None:
    """A job alone: 9 statements and 3 claims, 2 commits beside the claims, 22 Redis commands.

    Bytes: its row, its event and its blob, for an item of a few.
    """
    with counting(redis_url) as costs:
        for number in range(20):
            await score(running, f"text {number}")

    assert sum(costs.statements.values()) <= 20 * 10, costs
    assert costs.claims <= 20 * 4, costs
    assert costs.commits <= 20 * 2, costs
    assert costs.commands.total() <= 20 * 23, costs
    assert await _sum_bytes(database, jobs) <= 21 * 720
    assert await _sum_bytes(database, events) <= 21 * 130
    assert await _sum_sizes(database) <= 21 * 260


async def test_jobs_that_ask_for_the_cache(running: Bulks, redis_url: str) -> None:
    """To be found costs one statement, to find two; no commit more."""
    with counting(redis_url) as costs:
        for number in range(10):
            await score(running, f"text {number % 5}", cache="read")

    assert sum(costs.statements.values()) <= 10 * 12, costs
    assert costs.commits <= 10 * 2, costs


async def test_jobs_at_once_share_their_commits(running: Bulks, redis_url: str) -> None:
    """64 jobs submitted together: a commit for several, what is written shared, one look each."""
    with counting(redis_url) as costs:
        await asyncio.gather(*(score(running, f"text {number}") for number in range(64)))

    assert sum(costs.statements.values()) <= 64 * 5, costs
    assert costs.commits <= 20, costs
    assert costs.writes <= 40, costs
    assert costs.commands.total() <= 64 * 3, costs


async def test_rows_of_a_bulk(running: Bulks, redis_url: str, database: Database) -> None:
    """2 000 rows, from the upload to the filled cache: some thirty writes, none of them for a row.

    They are four jobs: completed together at best, one by one at worst. Bytes: a row's share of
    jobs, chunks, cache and blob, texts of ten bytes included.
    """
    with counting(redis_url) as costs:
        bulk = await running.run(rows(ROWS))
        await running.wait_until_indexed(bulk["id"])

    assert bulk["counts"]["scored"] == ROWS
    assert costs.writes <= 42, costs
    assert costs.commits <= 20, costs
    assert sum(costs.statements.values()) <= 60, costs
    assert costs.commands.total() <= 100, costs
    assert await _sum_bytes(database, jobs) <= ROWS * 16
    assert await _sum_bytes(database, bulk_chunks) <= ROWS * 30
    assert await _sum_bytes(database, score_cache) <= ROWS * 105
    assert await _sum_sizes(database) <= ROWS * 20


async def _sum_bytes(database: Database, table: Table) -> int:
    async with database.snapshot() as tx:
        return sum(_size(row) for row in await tx.execute(select(table)))


async def _sum_sizes(database: Database) -> int:
    async with database.snapshot() as tx:
        return sum((await tx.execute(select(blobs.c.size_bytes))).scalars())


def _size(row: Any) -> int:
    """What a row's values are long; a number counts eight bytes, whatever the database makes it."""
    values = [value for value in row if value is not None]
    return sum(len(value) if isinstance(value, str | bytes) else 8 for value in values)
