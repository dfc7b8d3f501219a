"""The API process and keys: where it does not listen."""

import asyncio

import pytest

from api.main import check_keys, serve
from contract.config import Settings
from contract.errors import SettingsError
from contract.keys import Scope
from storage.database import Database
from storage.keys import add_key
from tests.services import free_port


async def test_it_does_not_listen_elsewhere_without_a_key(
    sqlite_url: str, sqlite_database: Database, blob_url: str
) -> None:
    """The error says how to make one and how to do without; with a key it would go on."""
    settings = Settings(host="0.0.0.0", database_url=sqlite_url, blob_url=blob_url)  # noqa: S104

    with pytest.raises(SettingsError, match=r"scorekeep keys create.*SCOREKEEP_AUTH=off"):
        await asyncio.wait_for(serve(settings, {}), 5)

    async with sqlite_database.transaction() as tx:
        await add_key(tx, "t", [Scope.READ])
    await check_keys(settings)


async def test_a_store_that_is_away_does_not_keep_it_from_starting() -> None:
    """Nobody has a valid key meanwhile; readiness tells."""
    url = f"postgresql+asyncpg://nobody@127.0.0.1:{free_port()}/nothing"

    await check_keys(Settings(host="0.0.0.0", database_url=url))  # noqa: S104
