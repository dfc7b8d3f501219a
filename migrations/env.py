"""Alembic's entry: runs the migrations on the engine's own driver, one process at a time."""

import asyncio

from alembic import context
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from storage import access_tables  # noqa: F401  # its tables are in the metadata
from storage.tables import metadata

_LOCK = 7_360_001  # any constant of our own: PostgreSQL's advisory locks are numbers


def run(connection: Connection) -> None:
    sqlite = connection.dialect.name == "sqlite"
    if sqlite:
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        connection.commit()
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_as_batch=sqlite,
        compare_type=True,
        compare_server_default=True,
        transaction_per_migration=False,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        if sqlite:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
        context.run_migrations()


async def connect_and_run() -> None:
    engine = create_async_engine(context.config.attributes["url"], poolclass=NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(run)
        await connection.commit()
    await engine.dispose()


asyncio.run(connect_and_run())
