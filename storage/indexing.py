"""For migrations: an index is built while others write."""

from collections.abc import Sequence
from contextlib import nullcontext

import sqlalchemy as sa
from alembic import op

__all__ = ["build_index", "is_postgresql"]


def is_postgresql() -> bool:
    """Whether the migration under way is one of PostgreSQL."""
    return op.get_context().dialect.name == "postgresql"


def build_index(
    table: str,
    name: str,
    columns: Sequence[str],
    *,
    where: str | None = None,
    unique: bool = False,
) -> None:
    """Build an index of a table that may be large and in use.

    On PostgreSQL outside of any transaction: what the migration did before is committed and comes
    again where this is interrupted, so it must say ``if_not_exists``. What was half built is built
    anew.
    """
    condition = None if where is None else sa.text(where)
    with op.get_context().autocommit_block() if is_postgresql() else nullcontext():
        op.drop_index(name, table, if_exists=True, postgresql_concurrently=True)
        op.create_index(
            name,
            table,
            columns,
            unique=unique,
            sqlite_where=condition,
            postgresql_where=condition,
            postgresql_concurrently=True,
        )
