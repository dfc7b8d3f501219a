"""The engine: what commits, what rolls back, what errors become."""

import asyncio
import sqlite3
import threading
import time
import traceback
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError

from contract.errors import StoreUnavailableError
from storage import database as database_module
from storage.database import Database, database_now
from tests.services import Postgres, free_port
from tests.storage.factories import count, new_job, run_sql, submit


async def test_a_transaction_commits_at_its_end(database: Database) -> None:
    """What was written is there for the next transaction."""
    await submit(database, new_job())

    async with database.snapshot() as tx:
        assert await count(tx, "jobs") == 1


async def test_an_exception_rolls_back_and_passes_through(database: Database) -> None:
    """The caller's own error is not translated, and nothing is written."""
    message = "mine"
    with pytest.raises(KeyError, match=message):  # noqa: PT012
        async with database.transaction() as tx:
            await tx.execute(
                text("INSERT INTO tenants (name, webhook_secret, created_at) VALUES ('t', 's', 0)")
            )
            raise KeyError(message)

    async with database.snapshot() as tx:
        assert await count(tx, "tenants") == 0


async def test_a_cancelled_writer_leaves_no_lock(database: Database) -> None:
    """Whatever step it is cancelled in: the next writer goes on at once, and nothing is half."""

    async def write(n: int) -> None:
        async with database.transaction() as tx:
            await tx.execute(
                text("INSERT INTO counters (name, value) VALUES (:a, 1), (:b, 1) RETURNING name"),
                {"a": f"a{n}", "b": f"b{n}"},
            )
            await tx.execute(text("SELECT 1"))

    await write(-1)
    cancelled_in = 0
    for n in range(150):
        writing = asyncio.create_task(write(n))
        for _ in range(n if n < 60 else n * 7):
            await asyncio.sleep(0)
        if writing.done():
            continue
        writing.cancel()
        await asyncio.wait([writing], timeout=5)
        assert writing.cancelled(), n
        cancelled_in += 1
        started_at = time.monotonic()
        await write(1000 + n)
        assert time.monotonic() - started_at < 3, n  # the wait for a lock ends after five

    async with database.snapshot() as tx:
        found = await tx.execute(text("SELECT substr(name, 2), count(*) FROM counters GROUP BY 1"))
        halves = [name for name, count in found if count != 2]
    assert cancelled_in >= 10
    assert halves == []


async def test_a_wrong_statement_is_not_called_unavailable(database: Database) -> None:
    """Only what may pass by itself is retryable: a missing table and a duplicate key are not."""
    with pytest.raises(IntegrityError):
        await run_sql(
            database,
            "INSERT INTO tenants (name, webhook_secret, created_at) "
            "VALUES ('t', 's', 0), ('t', 's', 0)",
        )
    with pytest.raises(DBAPIError, match="nothing"):
        await run_sql(database, "SELECT * FROM nothing")


async def test_the_clock_is_the_databases(database: Database) -> None:
    """It gives epoch seconds, and moves on within a transaction."""
    clock = text(f"SELECT {database_now(database.dialect)}")
    async with database.transaction() as tx:
        first = (await tx.execute(clock)).scalar_one()
        await asyncio.sleep(0.01)
        second = (await tx.execute(clock)).scalar_one()

    now = (await run_sql(database, f"SELECT {database_now(database.dialect)}"))[0][0]
    assert first < second <= now < first + 20


async def test_check_passes_where_the_database_answers(database: Database) -> None:
    """A healthy database is no error."""
    await database.check()


@pytest.mark.parametrize(
    "url",
    [
        "sqlite+aiosqlite:////nowhere/at/all.db",
        "postgresql+asyncpg://postgres@127.0.0.1:{port}/x",
    ],
)
async def test_an_unreachable_database_is_unavailable(url: str) -> None:
    """The error is retryable and says when to come back."""
    database = Database(url.format(port=free_port()))

    with pytest.raises(StoreUnavailableError) as caught:
        await database.check()

    assert caught.value.retry_after_s
    await database.close()
    for thread in threading.enumerate():  # aiosqlite's, which outlives the failure a little
        if "_connection_worker_thread" in thread.name:
            await asyncio.to_thread(thread.join, 5)


async def test_a_missing_database_is_unavailable(postgres_server: Postgres) -> None:
    """A server that refuses the connection is translated like one that is away."""
    database = Database(postgres_server.url("missing"))

    with pytest.raises(StoreUnavailableError):
        await database.check()

    await database.close()


async def test_a_connection_that_is_cut_is_unavailable(
    postgres_url: str, postgres_server: Postgres
) -> None:
    """A backend that is terminated amid a transaction gives a retryable error, then works again."""
    database = Database(postgres_url)
    with pytest.raises(StoreUnavailableError):  # noqa: PT012
        async with database.transaction() as tx:
            pid = (await tx.execute(text("SELECT pg_backend_pid()"))).scalar_one()
            await asyncio.to_thread(postgres_server.execute, f"SELECT pg_terminate_backend({pid})")
            await tx.execute(text("SELECT 1"))

    await database.check()
    await database.close()


async def test_a_lock_that_is_not_released_is_unavailable(postgres_url: str) -> None:
    """PostgreSQL's lock timeout is retryable."""
    database = Database(postgres_url)
    async with database.transaction() as first:
        await first.execute(text("LOCK TABLE jobs"))
        with pytest.raises(StoreUnavailableError):  # noqa: PT012
            async with database.transaction() as second:
                await second.execute(text("SET LOCAL lock_timeout = 50"))
                await second.execute(text("SELECT * FROM jobs"))
    await database.close()


async def test_a_timeout_of_the_driver_is_unavailable(postgres_url: str) -> None:
    """Asyncpg's command timeout raises a bare TimeoutError."""
    database = Database(postgres_url)
    with pytest.raises(StoreUnavailableError):
        async with database.transaction():
            raise TimeoutError
    await database.close()


async def test_writers_of_one_process_take_turns(sqlite_database: Database) -> None:
    """Fifty transactions at once all commit: none sees a locked database."""
    await asyncio.gather(*(submit(sqlite_database, new_job()) for _ in range(50)))

    async with sqlite_database.snapshot() as tx:
        assert await count(tx, "jobs") == 50


async def test_a_writer_of_another_process_is_waited_for(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction begins as soon as the other ends, beyond one busy timeout."""
    monkeypatch.setattr(database_module, "_BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(database_module, "_BEGIN_ATTEMPTS", 100)
    database = Database(sqlite_url)
    other = sqlite3.connect(_path(sqlite_url), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writing = asyncio.create_task(submit(database, new_job()))
    async with database.snapshot() as tx:  # a reader is not held up
        assert await count(tx, "jobs") == 0
    await asyncio.sleep(0.15)

    other.execute("COMMIT")

    assert len(await writing) == 1
    other.close()
    await database.close()


async def test_a_database_locked_for_long_is_unavailable(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No "database is locked" reaches a caller as such."""
    monkeypatch.setattr(database_module, "_BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(database_module, "_BEGIN_ATTEMPTS", 2)
    database = Database(sqlite_url)
    other = sqlite3.connect(_path(sqlite_url), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    with pytest.raises(StoreUnavailableError):
        await submit(database, new_job())

    other.close()
    await database.close()


async def test_sqlite_is_set_up_to_keep_its_word(sqlite_database: Database) -> None:
    """Commits are durable, readers do not block, foreign keys hold."""
    async with sqlite_database.snapshot() as tx:
        values = {
            name: (await tx.execute(text(f"PRAGMA {name}"))).scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }

    assert values == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


async def test_no_value_shows_in_an_error(database: Database) -> None:
    """Errors are logged, values are requests and secrets: an error has the statement alone."""
    values = {"name": "t", "secret": "whsec_hidden"}
    insert = text(
        "INSERT INTO tenants (name, webhook_secret, created_at) VALUES (:name, :secret, 0)"
    )
    async with database.transaction() as tx:
        await tx.execute(insert, values)

    for parameters in (values, [values, values], {"name": None, "secret": "whsec_hidden"}):
        with pytest.raises(IntegrityError) as caught:
            async with database.transaction() as tx:
                await tx.execute(insert, parameters)

        logged = "".join(traceback.format_exception(caught.value))
        assert "INSERT INTO tenants" in logged
        assert "whsec_hidden" not in logged


async def test_no_value_shows_in_a_drivers_error(postgres_url: str) -> None:
    """A value that does not fit its column is quoted by the driver, and not by us."""
    database = Database(postgres_url)
    with pytest.raises(DBAPIError) as caught:
        await run_sql(
            database,
            "INSERT INTO jobs (id, state) VALUES ('x', 'y') RETURNING CAST(:n AS integer)",
            n=98765432123456,
        )
    await database.close()

    logged = "".join(traceback.format_exception(caught.value))
    assert "invalid input for query argument" in logged
    assert "98765432123456" not in logged


def _path(url: str) -> Path:
    return Path(url.partition(":///")[2])


async def test_the_reads_of_one_snapshot_agree(database: Database) -> None:
    """What is committed between two reads shows in neither."""
    async with database.snapshot() as tx:
        before = await count(tx, "jobs")
        await submit(database, new_job())
        after = await count(tx, "jobs")

    assert (before, after) == (0, 0)
