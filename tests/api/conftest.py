"""The application under test, on each database or on SQLite alone."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from contract.config import Settings
from storage.database import Database
from tests.api.service import Service


def make_settings(database_url: str, blob_url: str, redis_url: str, **changes: object) -> Settings:
    """Return settings with short waits."""
    values: dict[str, object] = {
        "database_url": database_url,
        "blob_url": blob_url,
        "redis_url": redis_url,
        "default_wait_s": 5.0,
        **changes,
    }
    return Settings(**values)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def running(service: Service) -> AsyncIterator[Service]:
    """Run the application until the end of the ``async with``."""
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
async def service(
    database_url: str, database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Service]:
    """The application on each database in turn, with real Redis and a local blob store."""
    async with running(
        Service(make_settings(database_url, blob_url, redis_url), database)
    ) as service:
        yield service


@pytest.fixture
async def sqlite_service(
    sqlite_url: str, sqlite_database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Service]:
    """The application on SQLite, for tests to which the dialect does not matter."""
    async with running(
        Service(make_settings(sqlite_url, blob_url, redis_url), sqlite_database)
    ) as service:
        yield service


@pytest.fixture
async def guarded(
    database_url: str, database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Service]:
    """The application on each database in turn; it requires keys."""
    settings = make_settings(database_url, blob_url, redis_url, auth="required")
    async with running(Service(settings, database)) as service:
        yield service


@pytest.fixture
async def sqlite_guarded(
    sqlite_url: str, sqlite_database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Service]:
    """The application on SQLite; it requires keys."""
    settings = make_settings(sqlite_url, blob_url, redis_url, auth="required")
    async with running(Service(settings, sqlite_database)) as service:
        yield service
