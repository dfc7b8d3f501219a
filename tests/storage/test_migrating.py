"""The migrations lead to the tables of the code, on both databases."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine, inspect

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


def test_the_command_migrates_the_database_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m storage.migrating`` makes the data folder and the schema."""
    monkeypatch.setenv("SCOREKEEP_DATA_DIR", str(tmp_path / "data"))

    main()

    engine = create_engine(f"sqlite:///{tmp_path}/data/scorekeep.db")
    assert "jobs" in inspect(engine).get_table_names()
    engine.dispose()
