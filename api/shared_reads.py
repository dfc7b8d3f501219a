"""One look into SQL for all who ask the same at once, and only so many looks at a time.

Thousands wait for jobs and are woken in one moment: each reading for itself they would stand in
line for the connections of the pool, and those at its end would be told that the store is away.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

from contract.errors import StoreUnavailableError
from storage.database import Database, Transaction

__all__ = ["SharedReads"]

_T = TypeVar("_T")


class SharedReads:
    """Reads for many; belongs to the event loop. ``most`` of its connections are in use at once.

    Nobody is answered with what was read before they asked. Who stops waiting stops nobody else.
    """

    def __init__(self, database: Database, *, most: int = 4, patience_s: float = 30.0) -> None:
        self._database = database
        self._turns = asyncio.Semaphore(most)
        self._patience_s = patience_s
        self._gathering: dict[Hashable, asyncio.Task[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def read(self, key: Hashable, look: Callable[[Transaction], Awaitable[_T]]) -> _T:
        """Return what ``look`` does; all who ask with ``key`` before it begins share it.

        ``key`` names all that ``look`` depends on, the tenant too: it runs in the name of who asked
        first. Raises what ``look`` does, and ``StoreUnavailableError`` where no turn came in time.
        """
        task = self._gathering.get(key)
        if task is None:
            task = self._gathering[key] = asyncio.create_task(self._look(key, look))
            self._tasks.add(task)
            task.add_done_callback(self._end)
        found: _T = await asyncio.shield(task)
        return found

    async def close(self) -> None:
        """Let the looks that are under way come to their end."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look(self, key: Hashable, look: Callable[[Transaction], Awaitable[_T]]) -> _T:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._turns.acquire()
        except TimeoutError as error:
            message = f"no turn to read came within {self._patience_s:g} s: too many ask"
            raise StoreUnavailableError(message, retry_after_s=2.0) from error
        finally:
            del self._gathering[key]  # who asks from now on wants a later look
        try:
            async with self._database.snapshot() as tx:
                return await look(tx)
        finally:
            self._turns.release()

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # those who asked were told; they may all have left
