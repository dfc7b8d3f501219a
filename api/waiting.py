"""Waiting for jobs to end: one Redis listener per process fans out, SQL is asked as a fallback."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator

from aiohttp import web

from api.auth import check_again
from contract.errors import StoreUnavailableError
from storage import jobs
from storage.database import Database
from storage.queue import Queue

__all__ = ["Waiters", "wait_for", "wait_while_allowed"]

_log = logging.getLogger(__name__)
_ASK_AGAIN_S = 1.0


class Waiters:
    """Who waits for which job in this process.

    A job's end is told through Redis within milliseconds. What Redis loses is found by ``poll``,
    which asks SQL about all waited ids at once, every ``poll_s``.
    """

    def __init__(self, database: Database, queue: Queue, *, poll_s: float = 1.0) -> None:
        self._database = database
        self._queue = queue
        self._poll_s = poll_s
        self._events: dict[str, tuple[asyncio.Event, int]] = {}
        self.is_stopping = False

    def __len__(self) -> int:
        return len(self._events)

    def count_of(self, job_id: str) -> int:
        """Return how many wait for this job."""
        return self._events[job_id][1] if job_id in self._events else 0

    @contextlib.contextmanager
    def watch(self, job_id: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set once the job ended.

        Open it before reading the row: an end between the two is then not missed.
        """
        event, count = self._events.get(job_id, (asyncio.Event(), 0))
        self._events[job_id] = (event, count + 1)
        if self.is_stopping:
            event.set()
        try:
            yield event
        finally:
            event, count = self._events.pop(job_id)
            if count > 1:
                self._events[job_id] = (event, count - 1)

    def wake(self, job_ids: Iterable[str]) -> None:
        """Tell all who wait for these jobs that they ended."""
        for job_id in job_ids:
            if found := self._events.get(job_id):
                found[0].set()

    def stop(self) -> None:
        """Let everybody go: the process ends, their jobs go on."""
        self.is_stopping = True
        self.wake(list(self._events))

    async def listen(self) -> None:
        """Pass on what Redis tells, for ever; the queue reconnects by itself."""
        async for job_id in self._queue.finished():
            self.wake([job_id])

    async def poll(self) -> None:
        """Ask SQL about the waited ids, for ever. A store that is away is asked again."""
        away = False
        while True:
            await asyncio.sleep(self._poll_s)
            waited = [job_id for job_id, (event, _) in self._events.items() if not event.is_set()]
            if not waited:
                continue
            try:
                async with self._database.snapshot() as tx:
                    self.wake(await jobs.finished_among(tx, waited))
                away = False
            except StoreUnavailableError:
                if not away:
                    _log.warning("cannot ask about jobs", extra={"action": "poll_failed"})
                away = True


async def wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    """Answer whether ``event`` was set within ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def wait_while_allowed(request: web.Request, event: asyncio.Event, timeout_s: float) -> bool:
    """Answer as ``wait_for`` does; raise ``UnauthorizedError`` soon after the key was revoked."""
    until = time.monotonic() + timeout_s
    while (left_s := until - time.monotonic()) > 0:
        if await wait_for(event, min(left_s, _ASK_AGAIN_S)):
            return True
        await check_again(request)
    return event.is_set()
