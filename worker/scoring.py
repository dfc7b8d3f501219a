"""A process that scores: models, leases, the pump and the listener put together.

Separate from ``main`` so that a process that only delivers loads nothing of the engine.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping

from contract.config import Settings
from contract.errors import StoreUnavailableError
from contract.models import ModelConfig
from storage import workers
from storage.workers import WorkerRow
from worker.batcher import MicroBatcher
from worker.canaries import Canaries
from worker.deadlines import HardDeadline
from worker.engine.seam import Padding
from worker.leases import LeaseKeeper
from worker.listener import listen
from worker.loading import Engine
from worker.pump import Pump
from worker.serving import Serving
from worker.stores import Stores
from worker.tasks import Tasks

__all__ = ["DEVICE_LOST_EXIT", "Scoring"]

_LOG = logging.getLogger(__name__)
#: The exit code of a process whose device is poisoned: a supervisor starts a new one.
DEVICE_LOST_EXIT = 70
_TURN_S = 1.0


class Scoring:
    """Runs the scoring part of a worker until ``stop``. Belongs to the event loop."""

    def __init__(
        self,
        settings: Settings,
        configs: Mapping[str, ModelConfig],
        engine: Engine,
        *,
        worker: str,
        stores: Stores,
        announced: Callable[[], object],
    ) -> None:
        self.exit_code = 0
        self._settings = settings
        self._worker = worker
        self._stores = stores
        self._loop = asyncio.get_running_loop()
        self._deadline = HardDeadline(settings.batch_deadline_s)
        self.serving = Serving(configs, engine.load_model)
        self._batcher = MicroBatcher(
            budget_tokens=settings.batch_tokens,
            deadline=self._deadline,
            on_device_lost=lambda: self._loop.call_soon_threadsafe(self._lose_device),
        )
        self._canaries = Canaries(self.serving, self._batcher, period_s=settings.canary_s)
        self._leases = LeaseKeeper(
            settings,
            worker=worker,
            deadline=self._deadline,
            on_change=self._change_claims,
            on_forgotten=self._publish_soon,
        )
        self.tasks = Tasks(
            settings=settings,
            stores=stores,
            leases=self._leases,
            batcher=self._batcher,
            deadline=self._deadline,
            encode=engine.encode,
            announced=announced,
        )
        self.pump = Pump(self.tasks, self.serving, worker=worker)
        self._padding: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._publishing: set[asyncio.Task[None]] = set()

    def totals(self) -> dict[str, float]:
        """Return what was done since the start, by counter."""
        counts = self.tasks.counts
        return {
            "jobs_completed": counts.completed,
            "items_scored": counts.items,
            "tokens_scored": counts.tokens,
            "fenced_writes": counts.fenced,
            "jobs_released": counts.released,
            "jobs_retried": counts.retried,
            "cache_hits": counts.from_cache,
            "commits": counts.commits,
            "commit_seconds": counts.commit_s,
            "tokens_claimed": self.pump.tokens_claimed,
            "batches": self._batcher.batches,
            "forward_seconds": self._batcher.forward_s,
            "padding_tokens": self._count_padding(),
            **self._batcher.batch_sequences.totals(),
            **self._batcher.batch_tokens.totals(),
        }

    def _count_padding(self) -> int:
        """Add up what the models padded; one that was dropped keeps what it had."""
        for name, scorer in self.serving.ready.items():
            if isinstance(scorer, Padding):
                self._padding[name] = scorer.padding_tokens
        return sum(self._padding.values())

    def stop(self) -> None:
        """Drain: claim no more, end the batch in flight, give the rest back."""
        self.pump.stop()

    async def run(self) -> None:
        """Score until ``stop``; returns when everything claimed is written or given back."""
        await self._publish()
        self._leases.start()
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(self.serving.load_all(self._announce_models)),
                    group.create_task(self._hear()),
                    group.create_task(self._turn()),
                    group.create_task(self._canaries.run(self._announce_models)),
                ]
                await self.pump.run()
                for task in background:
                    task.cancel()
        finally:
            await asyncio.to_thread(self._leases.stop)
            await asyncio.to_thread(self._batcher.stop)
            await asyncio.gather(*self._publishing, return_exceptions=True)
            await self._withdraw()

    async def _turn(self) -> None:
        """Show the hard deadline that the event loop turns."""
        while True:
            self._deadline.move()
            await asyncio.sleep(_TURN_S)

    async def _hear(self) -> None:
        """Take the hints of each model that is ready here; the others' are for other workers."""
        ears: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for name in self.serving.ready.keys() - ears.keys():
                    ear = listen(self._stores.queue, name, self.pump.take_hint)
                    ears[name] = group.create_task(ear)
                for name in ears.keys() - self.serving.ready.keys():
                    ears.pop(name).cancel()
                await self._changed.wait()

    async def _announce_models(self) -> None:
        self._changed.set()
        await self._publish()
        self.pump.wake()

    async def _publish(self) -> None:
        """Tell the others what is served here; the heartbeat repeats it where that fails."""
        row = WorkerRow(
            id=self._worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=self.serving.device,
            models=list(self.serving.statuses.values()),
        )
        try:
            async with self._stores.database.transaction() as tx:
                await workers.put_worker(tx, row)
        except StoreUnavailableError as error:
            _LOG.warning("models not published", extra={"reason": error.message})

    async def _withdraw(self) -> None:
        try:
            async with self._stores.database.transaction() as tx:
                await workers.drop_worker(tx, self._worker)
        except StoreUnavailableError as error:  # its heartbeat ends, which says the same
            _LOG.warning("worker not withdrawn", extra={"reason": error.message})

    def _publish_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self._publish())
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)

    def _change_claims(self, lost: set[str], cancelled: set[str]) -> None:
        self.tasks.abandon(lost, cancelled)

    def _lose_device(self) -> None:
        self.exit_code = DEVICE_LOST_EXIT
        self.stop()
