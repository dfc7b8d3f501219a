"""Leases are renewed here, in a thread with an event loop and a database connection of its own.

A blocked event loop in the main thread therefore cannot lose the leases; what blocks for ever is
the hard deadline's business: the same thread looks at it and ends the process.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable

from contract.config import Settings
from contract.errors import StoreUnavailableError
from storage import workers
from storage.claims import Claim, ClaimedJob, Renewal, renew_leases
from storage.database import Database
from worker.deadlines import HardDeadline
from worker.memory import measure_memory

__all__ = ["HUNG_EXIT", "LeaseKeeper"]

_LOG = logging.getLogger(__name__)
#: The exit code of a process that ended itself because something hangs.
HUNG_EXIT = 75
_TICK_S = 1.0


class LeaseKeeper:
    """Renews what is held, and tells ``on_change(lost, cancelled)`` in the loop of ``start``.

    ``hold``, ``drop`` and ``alive`` are safe from any thread.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        worker: str,
        deadline: HardDeadline,
        on_change: Callable[[set[str], set[str]], object],
        on_forgotten: Callable[[], object] = lambda: None,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._settings = settings
        self._worker = worker
        self._deadline = deadline
        self._on_change = on_change
        self._on_forgotten = on_forgotten
        self._exit_process = exit_process
        self._lock = threading.Lock()
        self._held: dict[str, tuple[int, float]] = {}  # id -> attempt, end by our own clock
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="leases", daemon=True)

    def start(self) -> None:
        """Begin to renew; call it in the event loop that is to hear of changes."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Waits for a renewal that is under way."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._settings.lease_s)

    def hold(self, jobs: Iterable[ClaimedJob], *, since: float) -> None:
        """Renew these from now on. ``since`` is ``time.monotonic()`` before the claim."""
        end = since + self._settings.lease_s
        with self._lock:
            self._held.update((job.id, (job.attempt, end)) for job in jobs)

    def drop(self, claims: Iterable[Claim]) -> None:
        """Renew these no longer; a later attempt of the same job, claimed here too, stays."""
        with self._lock:
            for claim in claims:
                if self._end_of(claim) is not None:
                    del self._held[claim.id]

    def alive(self, claims: Iterable[Claim]) -> bool:
        """Return whether we may still hold one of these, by our own clock."""
        now = time.monotonic()
        with self._lock:
            ends = [self._end_of(claim) for claim in claims]
        return any(end is not None and end > now for end in ends)

    def holds(self, claim: Claim) -> bool:
        """Return whether the store has not yet told us that the job is another's."""
        with self._lock:
            return self._end_of(claim) is not None

    def _end_of(self, claim: Claim) -> float | None:
        attempt, end = self._held.get(claim.id, (-1, 0.0))
        return end if attempt == claim.attempt else None

    async def renew_once(self, database: Database) -> int:
        """Renew what is held in one statement, and the worker's own heartbeat; return how many."""
        with self._lock:
            claims = [Claim(job_id, attempt) for job_id, (attempt, _) in self._held.items()]
        memory = measure_memory()
        since = time.monotonic()
        async with database.transaction() as tx:
            known = await workers.heartbeat(tx, self._worker, memory=memory)
            renewal = await renew_leases(
                tx, worker=self._worker, claims=claims, lease_s=self._settings.lease_s
            )
        self._record(claims, renewal, since + self._settings.lease_s)
        if not known:
            self._tell(self._on_forgotten)
        return len(claims) - len(renewal.lost)

    def _record(self, claims: list[Claim], renewal: Renewal, end: float) -> None:
        lost: set[str] = set()
        with self._lock:
            for claim in claims:
                if self._end_of(claim) is None:  # dropped, or claimed again, meanwhile
                    continue
                if claim.id in renewal.lost:
                    del self._held[claim.id]
                    lost.add(claim.id)
                else:
                    self._held[claim.id] = (claim.attempt, end)
        if lost or renewal.cancelled:
            extra = {"lost": len(lost), "cancelled": len(renewal.cancelled)}
            _LOG.info("claims changed", extra=extra)
            self._tell(lambda: self._on_change(lost, set(renewal.cancelled)))

    def _tell(self, callback: Callable[[], object]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _work(self) -> None:
        asyncio.run(self._renew_for_ever())

    async def _renew_for_ever(self) -> None:
        database = Database(
            self._settings.database, command_timeout_s=self._settings.database_timeout_s
        )
        renewed_at = time.monotonic()
        tick_s = min(_TICK_S, self._settings.heartbeat_s)
        try:
            while not await asyncio.to_thread(self._stopping.wait, tick_s):
                self._check_deadline()
                if time.monotonic() - renewed_at < self._settings.heartbeat_s:
                    continue
                try:
                    await self.renew_once(database)
                except StoreUnavailableError as error:  # next tick again, while leases live
                    _LOG.warning("leases not renewed", extra={"reason": error.message})
                else:
                    renewed_at = time.monotonic()
        finally:
            await database.close()

    def _check_deadline(self) -> None:
        overdue = self._deadline.find_overdue()
        if overdue is not None:
            _LOG.critical(
                "hung: the process ends so that it is restarted",
                extra={"what": overdue, "limit_s": self._settings.batch_deadline_s},
            )
            logging.shutdown()
            self._exit_process(HUNG_EXIT)
