"""The application under test, on each database or on SQLite alone."""

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


@pytest.fixture
async def service(
    database_url: str, database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Service]:
    """The application on each database in turn, with real Redis and a local blob store."""
    service = Service(make_settings(database_url, blob_url, redis_url), database)
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
async def sqlite_service(
    sqlite_url: str, sqlite_database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Service]:
    """The application on SQLite, for tests to which the dialect does not matter."""
    service = Service(make_settings(sqlite_url, blob_url, redis_url), sqlite_database)
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
async def guarded(
    database_url: str, database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Service]:
    """The application on each database in turn; it requires keys."""
    settings = make_settings(database_url, blob_url, redis_url, auth="required")
    service = Service(settings, database)
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
async def sqlite_guarded(
    sqlite_url: str, sqlite_database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Service]:
    """The application on SQLite; it requires keys."""
    settings = make_settings(sqlite_url, blob_url, redis_url, auth="required")
    service = Service(settings, sqlite_database)
    await service.start()
    yield service
    await service.stop()
