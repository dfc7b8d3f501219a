"""Connections that cost us something and bring nothing: the only place that closes them.

aiohttp waits for ever for the head of a connection's first request, and for a reader that is gone.
"""

import asyncio
import os
import socket
from typing import Any

from aiohttp import web

__all__ = ["GuardedRunner", "HeadWatch"]

_LOOKS = 4
#: Bytes that nobody acknowledges, or takes, for so long end the connection: the kernel sees to it.
_UNREAD_S = 60
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: _UNREAD_S * 1000,
}


class HeadWatch:
    """Closes connections whose first request has no whole head after ``timeout_s``.

    Between requests aiohttp's own keep-alive timeout holds, also for a head that trickles.
    """

    def __init__(self, server: web.Server, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._since: dict[Any, float] = {}
        self._served: set[Any] = set()
        self._make_request = server.request_factory
        server.request_factory = self._note

    async def run(self) -> None:
        """Look at all connections, for ever."""
        while True:
            self.look()
            await asyncio.sleep(self._timeout_s / _LOOKS)

    def look(self) -> int:
        """Close those that have had their time; return how many."""
        now = asyncio.get_running_loop().time()
        alive = set(self._server.connections)
        self._served &= alive
        waiting = alive - self._served
        self._since = {each: self._since.get(each, now) for each in waiting}
        late = [each for each, since in self._since.items() if now - since >= self._timeout_s]
        for connection in late:
            if connection.transport is not None:
                connection.transport.abort()
        return len(late)

    def _note(self, *arguments: Any) -> web.BaseRequest:  # noqa: ANN401  # aiohttp's own
        connection = arguments[2]
        if connection not in self._served:
            self._served.add(connection)
            _set_options(connection.transport)
        return self._make_request(*arguments)


class GuardedRunner(web.AppRunner):
    """An ``AppRunner`` with a ``HeadWatch`` for as long as it serves."""

    def __init__(self, app: web.Application, *, header_timeout_s: float, **options: Any) -> None:  # noqa: ANN401  # AppRunner's
        super().__init__(app, **options)
        self._header_timeout_s = header_timeout_s
        self._watching: asyncio.Task[None] | None = None

    async def setup(self) -> None:
        """Make the server, and watch it."""
        await super().setup()
        if self.server is not None:
            watch = HeadWatch(self.server, self._header_timeout_s)
            self._watching = asyncio.create_task(watch.run())

    async def cleanup(self) -> None:
        """Stop watching, then serving."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        await super().cleanup()


def _set_options(transport: asyncio.BaseTransport | None) -> None:
    found = None if transport is None else transport.get_extra_info("socket")
    if found is None or found.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    with socket.socket(fileno=os.dup(found.fileno())) as own:  # uvloop's object sets no options
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            own.setsockopt(socket.IPPROTO_TCP, option, value)
