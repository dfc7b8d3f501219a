"""The filling of SQL templates."""

import pytest

from storage.database import Database
from storage.statements import execute


async def test_an_unknown_piece_is_refused(sqlite_database: Database) -> None:
    """A typing error in a template is not sent to the database."""
    async with sqlite_database.transaction() as tx:
        with pytest.raises(ValueError, match="unknown piece"):
            await execute(tx, "SELECT {nothing}", {})
