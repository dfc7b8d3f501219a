"""Fixtures of the worker's tests."""

from collections.abc import AsyncIterator

import pytest

from contract.config import Settings
from storage.blobs import BlobStore
from storage.database import Database
from storage.queue import Queue
from tests.worker.harness import Bench, create_settings


@pytest.fixture
def settings(database_url: str, blob_url: str, redis_url: str) -> Settings:
    """Settings on each database in turn."""
    return create_settings(database_url, blob_url, redis_url)


@pytest.fixture
async def bench(settings: Settings) -> AsyncIterator[Bench]:
    """The stores of ``settings``, as a client uses them."""
    bench = Bench(
        Database(settings.database),
        BlobStore.open(settings.blobs),
        Queue(settings.redis_url),
        settings,
    )
    yield bench
    await bench.queue.close()
    await bench.database.close()
