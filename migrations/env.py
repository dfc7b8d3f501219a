"""Alembic's entry: runs the migrations on the engine's own driver, one process at a time.

On PostgreSQL a migration never waits for long behind a lock, because whoever writes would then wait
behind it: it gives up after two seconds, lets them pass, and tries again.
"""

import asyncio
import logging
import time

from alembic import context
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from storage import access_tables, bulk_tables  # noqa: F401  # their tables are in the metadata
from storage.tables import metadata

_LOCK = 7_360_001  # any constant of our own: PostgreSQL's advisory locks are numbers
_LOCK_TIMEOUT = "2s"
_TRIES = 60
_PAUSE_S = 1.0
_NOT_LOCKED = "55P03"
_LOG = logging.getLogger("storage.migrating")


def run(connection: Connection) -> None:
    sqlite = connection.dialect.name == "sqlite"
    if sqlite:
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        connection.commit()
    else:
        take_turns(connection)
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_as_batch=sqlite,
        compare_type=True,
        compare_server_default=True,
        transaction_per_migration=not sqlite,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        if sqlite:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        context.run_migrations()


def take_turns(connection: Connection) -> None:
    """Lock out other migrations until the connection is closed.

    Asked for again and again: one that waits inside a statement would have a snapshot, for whose
    end ``CREATE INDEX CONCURRENTLY`` of the one before it waits.
    """
    connection.execute(text(f"SET lock_timeout = '{_LOCK_TIMEOUT}'"))
    while not connection.scalar(text(f"SELECT pg_try_advisory_lock({_LOCK})")):
        connection.commit()
        time.sleep(0.05)
    connection.commit()


async def connect_and_run() -> None:
    engine = create_async_engine(context.config.attributes["url"], poolclass=NullPool)
    for tries in range(1, _TRIES + 1):
        try:
            async with engine.connect() as connection:
                await connection.run_sync(run)
                await connection.commit()
            break
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != _NOT_LOCKED or tries == _TRIES:
                raise
            _LOG.warning("a table is in use, the migration tries again", extra={"tries": tries})
            await asyncio.sleep(_PAUSE_S)
    await engine.dispose()


asyncio.run(connect_and_run())
