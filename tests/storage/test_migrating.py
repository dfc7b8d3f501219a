"""The migrations lead to the tables of the code, on both databases."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import create_engine, event, inspect
from sqlalchemy.engine import Engine

from storage.migrating import create_config, main, migrate
from tests.services import Postgres


def test_the_migrations_make_the_tables_of_the_code(database_url: str) -> None:
    """``alembic check`` finds nothing that a migration would have to add."""
    command.check(create_config(database_url))


def test_migrating_twice_is_harmless(database_url: str) -> None:
    """The second time finds nothing to do."""
    migrate(database_url)


def test_a_migration_can_be_undone(database_url: str) -> None:
    """Down to nothing and up again."""
    command.downgrade(create_config(database_url), "base")
    migrate(database_url)

    command.check(create_config(database_url))


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_several_processes_may_migrate_at_once(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Those that start together take turns on one new database."""
    url = f"sqlite+aiosqlite:///{tmp_path}/new/crowded.db"
    if kind == "postgresql":
        server: Postgres = request.getfixturevalue("postgres_server")
        server.execute("CREATE DATABASE crowded")
        url = server.url("crowded")
    command_line = [sys.executable, "-m", "storage.migrating"]
    environment = {"PATH": os.environ["PATH"], "SCOREKEEP_DATABASE_URL": url}
    processes = [
        subprocess.Popen(command_line, env=environment, stderr=subprocess.PIPE)  # noqa: S603
        for _ in range(3)
    ]

    outputs = [process.communicate(timeout=20)[1].decode() for process in processes]

    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    command.check(create_config(url))


def test_no_index_is_built_before_writers(postgres_url: str) -> None:
    """Of a table that was there before, on PostgreSQL: always while others write.

    A plain ``CREATE INDEX`` keeps every writer out for as long as it reads the table.
    """
    config = create_config(postgres_url)
    command.downgrade(config, "0004")
    seen: list[str] = []

    def keep(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        seen.append(" ".join(statement.split()))

    event.listen(Engine, "before_cursor_execute", keep)
    command.upgrade(config, "head")
    event.remove(Engine, "before_cursor_execute", keep)

    built = [each for each in seen if re.match(r"CREATE (UNIQUE )?INDEX", each)]
    made = [match[1] for each in seen if (match := re.match(r"CREATE TABLE (\w+)", each))]
    plain = [each for each in built if " CONCURRENTLY " not in each]
    assert len(built) >= 8
    assert [each for each in plain if not re.search(rf" ON ({'|'.join(made)}) ", each)] == []


@pytest.mark.parametrize(
    ("before", "revision"),
    [
        ("0004", "0005"),
        ("0005", "0006"),
        ("0008", "0009"),
        ("0009", "0010"),
        ("0010", "0011"),
        ("0011", "0012"),
    ],
)
def test_a_migration_that_was_interrupted_goes_on(
    before: str, revision: str, postgres_url: str
) -> None:
    """Stopped after its indexes and before it is recorded, it runs again from the beginning."""
    config = create_config(postgres_url)
    command.downgrade(config, revision)
    command.stamp(config, before)

    command.upgrade(config, "head")

    command.check(config)


def test_the_command_migrates_the_database_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m storage.migrating`` makes the data folder and the schema."""
    monkeypatch.setenv("SCOREKEEP_DATA_DIR", str(tmp_path / "data"))

    main()

    engine = create_engine(f"sqlite:///{tmp_path}/data/scorekeep.db")
    assert "jobs" in inspect(engine).get_table_names()
    engine.dispose()
