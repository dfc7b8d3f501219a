"""How slowly a body may come: the only place that loses patience with a client that sends one."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from aiohttp import web

__all__ = ["Pace"]

_T = TypeVar("_T", bound="bytes | bytearray")
_BYTES_A_SECOND = 16 * 1024


class Pace:
    """The patience with one body: it ends when 16 KiB a second are ``grace_s`` behind.

    Whoever trickles is cut off after the grace, also after a burst; a slow line that moves is not.
    What we take ourselves between two readings does not count.
    """

    def __init__(self, grace_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._grace_s = grace_s
        self._left_at = self._loop.time()
        self._ends_at = self._left_at + grace_s

    async def keep(self, reading: Awaitable[_T]) -> _T:
        """Return what ``reading`` does. Raises ``HTTPRequestTimeout`` at patience's end."""
        self._ends_at += self._loop.time() - self._left_at
        try:
            async with asyncio.timeout_at(self._ends_at):
                data = await reading
        except TimeoutError as error:
            raise web.HTTPRequestTimeout from error
        self._left_at = self._loop.time()
        earned_s = len(data) / _BYTES_A_SECOND
        self._ends_at = min(self._ends_at + earned_s, self._left_at + self._grace_s)
        return data
