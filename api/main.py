"""The API process: serve until told to stop, then let the requests in flight finish."""

import asyncio
import logging
import signal
from collections.abc import Mapping

import uvloop
from aiohttp import web

from api.app import create_app, create_runner
from contract.config import Settings
from contract.garbage import settle_garbage
from contract.models import ModelConfig

__all__ = ["run", "serve"]

_log = logging.getLogger(__name__)
_BACKLOG = 1024


def run(settings: Settings, models: Mapping[str, ModelConfig]) -> None:
    """Serve on uvloop until SIGTERM or SIGINT."""
    settle_garbage()
    uvloop.run(serve(settings, models))


async def serve(settings: Settings, models: Mapping[str, ModelConfig]) -> None:
    """Serve until SIGTERM or SIGINT. Who waits is then answered with the job as it is."""
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
