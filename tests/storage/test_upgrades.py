"""Migrations under a running old version: whoever writes as before goes on, and loses nothing.

The writers know the tables of revision 0003 and nothing of what came later: they read the columns
that there were, and write those. The rule that this holds is in docs/operations.md, under Upgrades.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from alembic import command
from sqlalchemy import text

from contract.jobs import JobState
from storage.claims import claim_jobs
from storage.database import Database
from storage.jobs import list_jobs
from storage.migrating import create_config, migrate
from storage.outcomes import retry_job
from tests.storage.factories import complete, new_job, run_sql, submit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
_OLD = "0003"
_WRITERS = 4

_ADD = """
INSERT INTO jobs (id, tenant, model, lane, state, attempt, generation, version, error_count,
    crash_count, created_at, available_at, item_count, scored_count, failed_count,
    estimated_tokens, metadata, request)
VALUES (:id, 't', 'm', 1, 'queued', 0, 0, 0, 0, 0, :now, :now, 2, 0, 0, 10, '{}', :request)
"""
_CLAIM = """
UPDATE jobs SET state = 'running', attempt = attempt + 1, version = version + 1, worker = :worker,
    lease_until_at = :now + 60, started_at = :now
WHERE id = :id AND state = 'queued' RETURNING attempt
"""
_COMPLETE = """
UPDATE jobs SET state = 'succeeded', scored_count = 2, result = '{}', finished_at = :now,
    lease_until_at = NULL, version = version + 1
WHERE id = :id AND attempt = :attempt AND state = 'running'
RETURNING id, tenant, state, attempt, generation, webhook_url, webhook_events
"""
_EVENT = """
INSERT INTO events (id, job_id, generation, tenant, type, created_at)
VALUES ('evt_' || :id, :id, 0, 't', 'job.succeeded', :now)
"""
_READ = "SELECT id, state, attempt, result, blob_key FROM jobs WHERE id = :id"


@dataclass
class OldVersion:
    """Processes' worth of the old code's writes, until it is told to stop."""

    url: str
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    ids: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    async def write(self, worker: str) -> None:
        """Submit, claim, complete and read one job after the other."""
        database = Database(self.url)
        try:
            for number in itertools.count():
                if self.stopping.is_set():
                    return
                job_id = f"job_{worker}_{number:06d}"
                started_at = time.monotonic()
                await self._finish(database, worker, job_id)
                self.longest_s = max(self.longest_s, time.monotonic() - started_at)
                self.ids.append(job_id)
        finally:
            await database.close()

    async def _finish(self, database: Database, worker: str, job_id: str) -> None:
        now = time.time()
        await run_sql(database, _ADD, id=job_id, now=now, request=b"x")
        (claimed,) = await run_sql(database, _CLAIM, id=job_id, now=now, worker=worker)
        async with database.transaction() as tx:
            values = {"id": job_id, "attempt": claimed.attempt, "now": now}
            (row,) = await tx.execute(text(_COMPLETE), values)
            await tx.execute(text(_EVENT), {"id": row.id, "now": now})
        (read,) = await run_sql(database, _READ, id=job_id)
        assert read.state == "succeeded"

    async def written(self, count: int) -> None:
        """Return when that many more jobs have gone all their way."""
        wanted = len(self.ids) + count
        async with asyncio.timeout(60):
            while len(self.ids) < wanted:  # noqa: ASYNC110  # the writers send no signal
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running_old_version(url: str) -> AsyncIterator[OldVersion]:
    """Run its writers; any error of theirs fails the test."""
    old = OldVersion(url)
    async with asyncio.TaskGroup() as group:
        for number in range(_WRITERS):
            group.create_task(old.write(f"w{number}"))
        try:
            yield old
        finally:
            old.stopping.set()


async def test_the_old_version_goes_on_through_a_migration(database_url: str) -> None:
    """Every write of the old code succeeds before, during and after; the new code takes over."""
    await asyncio.to_thread(command.downgrade, create_config(database_url), _OLD)

    async with running_old_version(database_url) as old:
        await old.written(20)
        await asyncio.to_thread(migrate, database_url)
        await old.written(20)
    database = Database(database_url)
    (failed,) = await submit(database, new_job())
    async with database.transaction() as tx:
        claimed = await claim_jobs(
            tx, worker="new", models=["m"], max_jobs=9, max_tokens=10**6, lease_s=30
        )
    await complete(database, claimed, state=JobState.FAILED, scored=0, failed=2)
    async with database.transaction() as tx:
        again = await retry_job(tx, "t", failed.id)
        listed = await list_jobs(tx, "t", limit=10**6)
    counts = await run_sql(
        database,
        "SELECT count(*) AS jobs, (SELECT count(*) FROM events WHERE type = 'job.succeeded')"
        " AS events FROM jobs WHERE state = 'succeeded'",
    )
    await database.close()

    print(f"longest way of a job through the migration: {old.longest_s:.2f} s")  # noqa: T201
    assert [job.id for job in claimed] == [failed.id]
    assert again.state is JobState.QUEUED
    assert {row.id for row in listed} == {*old.ids, failed.id}
    assert tuple(counts[0]) == (len(old.ids), len(old.ids))
    await asyncio.to_thread(command.check, create_config(database_url))


async def test_a_migration_does_not_make_writers_wait_behind_a_reader(postgres_url: str) -> None:
    """A long read holds the table: the migration steps back again and again, and ends after it.

    A plain ``ALTER TABLE`` would wait for the reader, and every writer would wait behind it.
    """
    await asyncio.to_thread(command.downgrade, create_config(postgres_url), _OLD)
    reader = Database(postgres_url)

    async with running_old_version(postgres_url) as old:
        await old.written(20)
        async with reader.snapshot() as tx:
            await tx.execute(text("SELECT count(*) FROM jobs"))
            migrating = asyncio.create_task(asyncio.to_thread(migrate, postgres_url))
            finished, _ = await asyncio.wait([migrating], timeout=6)
            await old.written(20)
        await asyncio.wait_for(migrating, 60)
        await old.written(20)
    await reader.close()

    print(f"longest way of a job beside the reader: {old.longest_s:.2f} s")  # noqa: T201
    assert not finished
    assert old.longest_s < 4.0
    await asyncio.to_thread(command.check, create_config(postgres_url))
