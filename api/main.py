"""The API process: serve until told to stop, then let the requests in flight finish."""

import asyncio
import logging
import signal
from collections.abc import Mapping

import uvloop
from aiohttp import web

from api.app import create_app, create_runner
from contract.config import Settings, is_loopback
from contract.errors import SettingsError, StoreUnavailableError
from contract.garbage import settle_garbage
from contract.models import ModelConfig
from storage.database import Database
from storage.keys import has_valid_key

__all__ = ["check_keys", "run", "serve"]

_log = logging.getLogger(__name__)
_BACKLOG = 1024


def run(settings: Settings, models: Mapping[str, ModelConfig]) -> None:
    """Serve on uvloop until SIGTERM or SIGINT."""
    settle_garbage()
    uvloop.run(serve(settings, models))


async def serve(settings: Settings, models: Mapping[str, ModelConfig]) -> None:
    """Serve until SIGTERM or SIGINT. Who waits is then answered with the job as it is."""
    if settings.requires_keys and not is_loopback(settings.host):
        await check_keys(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = create_runner(create_app(settings, models))
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port, backlog=_BACKLOG).start()
        _log.info(
            "api is listening",
            extra={"action": "api_listening", "addresses": [str(a) for a in runner.addresses]},
        )
        await stop.wait()
        _log.info("api is stopping", extra={"action": "api_stopping"})
    finally:
        await runner.cleanup()


async def check_keys(settings: Settings) -> None:
    """Raise ``SettingsError`` where there is no key: nobody could be served."""
    database = Database(settings.database)
    try:
        async with database.snapshot() as tx:
            found = await has_valid_key(tx)
    except StoreUnavailableError as error:  # until it is back nobody has a key that is valid
        _log.warning("keys are not looked at", extra={"reason": error.message})
        return
    finally:
        await database.close()
    if not found:
        message = (
            f"{settings.host} can be reached by others, and there is no valid key: make one with "
            "scorekeep keys create --tenant NAME, or say SCOREKEEP_AUTH=off"
        )
        raise SettingsError(message)
