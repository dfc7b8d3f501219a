"""Fixtures that every package's tests share. The servers live as long as the xdist worker.

``database``, ``redis_url``, ``postgres_url`` and the rest are fresh for each test: a database made
from a migrated template, an emptied Redis, a folder of its own.
"""

import importlib.util
import logging
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from storage.blobs import BlobStore
from storage.database import Database
from storage.migrating import migrate
from tests.services import (
    Postgres,
    create_bucket,
    list_lasting_keys,
    start_moto,
    start_postgres,
    start_redis,
)

pytest_plugins = [
    name for name in ("tests.tiny_models",) if importlib.util.find_spec(name) is not None
]

_TEMPLATE = "scorekeep_template"


@pytest.fixture(autouse=True)
def logging_stays() -> Iterator[None]:
    """Undo what a program that a test ran in this process made of the root logger."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """A Redis-compatible server."""
    with start_redis() as url:
        yield url


@pytest.fixture
def redis_url(redis_server: str) -> Iterator[str]:
    """An empty Redis. The test fails if it leaves a key without an end behind."""
    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    yield redis_server
    assert set(list_lasting_keys(redis_server)) <= {"arq:queue"}, "Redis keys without TTL at rest"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """A PostgreSQL server with a migrated template database."""
    with start_postgres() as server:
        server.execute(f"CREATE DATABASE {_TEMPLATE}")
        migrate(server.url(_TEMPLATE))
        yield server


@pytest.fixture
def postgres_url(postgres_server: Postgres) -> Iterator[str]:
    """A migrated, empty PostgreSQL database."""
    name = f"test_{uuid.uuid4().hex}"
    postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE}")
    yield postgres_server.url(name)
    postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file, to be copied."""
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    migrate(f"sqlite+aiosqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """A migrated, empty SQLite database."""
    path = tmp_path / "scorekeep.db"
    shutil.copyfile(sqlite_template, path)
    return f"sqlite+aiosqlite:///{path}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """Each database in turn, migrated and empty."""
    name = {"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param]
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A ``Database`` on each database in turn."""
    database = Database(database_url)
    yield database
    await database.close()


@pytest.fixture
async def sqlite_database(sqlite_url: str) -> AsyncIterator[Database]:
    """A ``Database`` on SQLite only, for tests to which the dialect does not matter."""
    database = Database(sqlite_url)
    yield database
    await database.close()


@pytest.fixture
def blob_url(tmp_path: Path) -> str:
    """The URL of an empty local blob store."""
    return f"file://{tmp_path}/blobs"


@pytest.fixture
async def blob_store(blob_url: str) -> BlobStore:
    """An empty local blob store."""
    return BlobStore.open(blob_url)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    """Moto's S3 server."""
    with start_moto() as endpoint:
        yield endpoint


@pytest.fixture
def s3_url(moto_server: str) -> str:
    """The URL of an empty S3 blob store: endpoint and keys are in its query."""
    return create_bucket(moto_server)
