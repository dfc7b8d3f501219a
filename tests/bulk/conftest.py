"""The application and a worker with the deterministic scorer, on each database or on SQLite."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contract.config import Settings
from storage.database import Database
from tests.api.service import Service
from tests.bulk.bench import MODELS, Bulks
from tests.worker.harness import create_settings


@contextlib.asynccontextmanager
async def run(settings: Settings, database: Database) -> AsyncIterator[Bulks]:
    """Run the application; workers are started by the test."""
    service = Service(settings, database, MODELS)
    await service.start()
    bulks = Bulks(service)
    try:
        yield bulks
    finally:
        await bulks.stop_workers()
        await service.stop()


@pytest.fixture
async def bulks(
    database_url: str, database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Bulks]:
    """The application on each database in turn."""
    async with run(create_settings(database_url, blob_url, redis_url), database) as made:
        yield made


@pytest.fixture
async def sqlite_bulks(
    sqlite_url: str, sqlite_database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Bulks]:
    """The application on SQLite, for tests to which the dialect does not matter."""
    async with run(create_settings(sqlite_url, blob_url, redis_url), sqlite_database) as made:
        yield made


@pytest.fixture
async def short_lines(
    sqlite_url: str, sqlite_database: Database, blob_url: str, redis_url: str, tmp_path: Path
) -> AsyncIterator[Bulks]:
    """The application with small limits and one folder that inputs may come from."""
    (tmp_path / "inputs").mkdir()
    settings = create_settings(
        sqlite_url,
        blob_url,
        redis_url,
        max_line_bytes=4000,
        max_job_tokens=700,
        max_scores=20,
        max_file_bytes=2_000_000,
        bulk_input_urls=f"file://{tmp_path}/inputs",
    )
    async with run(settings, sqlite_database) as made:
        yield made
