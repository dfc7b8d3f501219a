"""A commit that happened and looked as if it had not: the worker reads before it writes again."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from contract.config import Settings
from contract.errors import StoreUnavailableError
from contract.jobs import JobState
from storage.blobs import BlobStore
from storage.database import Database, Transaction
from storage.doctor import examine
from storage.events import list_events
from storage.queue import Queue
from tests.worker.harness import Bench, create_settings, run_worker
from tests.worker.scorers import ArithmeticScorer
from worker import stores


class _LossyDatabase(Database):
    """Loses the answer to the first commit after ``arm``."""

    armed = False

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        async with super().transaction() as tx:
            yield tx
            was_armed = self.armed and await _has_ended(tx)
        if was_armed:
            type(self).armed = False
            message = "the connection was lost in the commit"
            raise StoreUnavailableError(message)


async def _has_ended(tx: Transaction) -> bool:
    found = await tx.exec_driver_sql("SELECT count(*) FROM jobs WHERE state = 'succeeded'")
    return bool(found.scalar_one())


async def test_an_ambiguous_commit_counts_once(
    database_url: str, blob_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed, then an error: no second run, one event, nothing fenced, no orphan."""
    settings: Settings = create_settings(database_url, blob_url, redis_url)
    bench = Bench(
        Database(settings.database),
        BlobStore.open(settings.blobs),
        Queue(settings.redis_url),
        settings,
    )
    monkeypatch.setattr(stores, "Database", _LossyDatabase)
    monkeypatch.setattr(_LossyDatabase, "armed", True)
    async with run_worker(settings, ArithmeticScorer()):
        ids = await bench.submit([[1]], [[2]], [[3]])
        rows = await bench.wait(*ids)
    async with bench.database.snapshot() as tx:
        events = [len(await list_events(tx, job_id)) for job_id in ids]
    found = await examine(bench.database, bench.blobs, young_s=-1.0)
    await bench.queue.close()
    await bench.database.close()

    assert not _LossyDatabase.armed
    assert {(row.state, row.attempt) for row in rows} == {(JobState.SUCCEEDED, 1)}
    assert events == [1, 1, 1]
    assert found.is_clean, found
