"""One worker process: what runs in it, and how it starts and stops.

It scores if it is given models, and always delivers and tidies up. SIGTERM drains, and a second
one ends the process at once.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvloop

from contract.config import Settings
from contract.errors import SettingsError
from contract.garbage import settle_garbage
from contract.models import ModelConfig, parse_models
from storage.ids import create_id
from worker.deliveries import Deliverer
from worker.loading import Engine, create_engine
from worker.maintenance import Maintenance
from worker.metering import Meter, Source
from worker.scoring import Scoring
from worker.stores import Stores, open_stores
from worker.webhooks import open_session

__all__ = ["Worker", "choose_models", "run"]

_LOG = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: 128 + SIGTERM, as a shell reports it.
_EXIT_AT_ONCE = 143
_NOT_DRAINED_EXIT = 1
_COLLECT_S = 900.0


def run(settings: Settings, models: Sequence[str] | None, *, deliveries_only: bool) -> int:
    """Run a worker until it is told to stop; return its exit code.

    ``models`` names those of the registry to serve, None means all. Raises ``SettingsError``.
    """
    configs = None if deliveries_only else choose_models(settings, models)
    settle_garbage()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Worker(settings, configs).run())


def choose_models(settings: Settings, names: Sequence[str] | None) -> dict[str, ModelConfig]:
    """Return the registry's entries of that name, all without names. Raises ``SettingsError``."""
    if settings.config is None:
        message = "SCOREKEEP_CONFIG names no registry file; a worker needs one to serve models"
        raise SettingsError(message)
    known = parse_models(Path(settings.config))
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        message = f"{settings.config} has no model {', '.join(unknown)}; it has {', '.join(known)}"
        raise SettingsError(message)
    return {name: config for name, config in known.items() if not names or name in names}


class Worker:
    """The parts of one process. ``configs`` None means that it only delivers."""

    def __init__(
        self,
        settings: Settings,
        configs: Mapping[str, ModelConfig] | None,
        engine: Engine | None = None,
    ) -> None:
        self.id = create_id("wrk")
        self._settings = settings
        self._configs = configs
        self._engine = engine or create_engine(Path(settings.data_dir) / "canaries")
        self.ended = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Drain; the second time end the process at once."""
        if self._stopping.is_set():
            _LOG.warning("stopped at once")
            logging.shutdown()
            os._exit(_EXIT_AT_ONCE)
        _LOG.info("draining", extra={"worker": self.id})
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stopping.is_set()

    async def run(self) -> int:
        """Run until stopped; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.stop)
        stores = open_stores(self._settings)
        try:
            return await self._run_parts(stores)
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            await stores.close()
            self.ended.set()

    async def _run_parts(self, stores: Stores) -> int:
        async with open_session(self._settings) as session, asyncio.TaskGroup() as group:
            deliverer = Deliverer(self._settings, stores=stores, session=session, worker=self.id)
            maintenance = Maintenance(self._settings, stores, announced=deliverer.wake)
            parts = [group.create_task(deliverer.run())]
            scoring = None
            if self._configs is not None:
                scoring = Scoring(
                    self._settings,
                    self._configs,
                    self._engine,
                    worker=self.id,
                    stores=stores,
                    announced=deliverer.wake,
                )
                parts.append(group.create_task(scoring.run()))
            sources: list[Source] = [deliverer.totals, lambda: maintenance.totals]
            if scoring is not None:
                sources.append(scoring.totals)
            meter = Meter(stores.database, sources)
            tidying = [
                group.create_task(self._tidy(maintenance, meter)),
                group.create_task(self._collect(maintenance)),
            ]
            listening = group.create_task(_wake_deliveries(stores, deliverer))
            _LOG.info("worker started", extra={"worker": self.id, "pid": os.getpid()})
            await self._wait_for_end(parts)
            self._stopping.set()
            if scoring is not None:
                scoring.stop()
            deliverer.stop()
            await self._drain([*parts, *tidying])
            listening.cancel()
            await meter.add_once()
        return scoring.exit_code if scoring is not None else 0

    async def _wait_for_end(self, parts: Sequence["asyncio.Task[None]"]) -> None:
        """Wait for a stop, or for a part that ends by itself because its device is lost."""
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()

    async def _drain(self, parts: Sequence["asyncio.Task[None]"]) -> None:
        _, pending = await asyncio.wait(parts, timeout=self._settings.drain_s)
        if pending:
            _LOG.error("not drained in time", extra={"drain_s": self._settings.drain_s})
            logging.shutdown()
            os._exit(_NOT_DRAINED_EXIT)

    async def _tidy(self, maintenance: Maintenance, meter: Meter) -> None:
        while not self._stopping.is_set():
            await maintenance.run_once()
            await meter.add_once()
            await self._pause(self._settings.sweep_s)

    async def _collect(self, maintenance: Maintenance) -> None:
        """Look for orphans now and then: it lists every blob."""
        while not await self._pause(_COLLECT_S):
            await maintenance.try_sweep_blobs()

    async def _pause(self, duration_s: float) -> bool:
        """Sleep, but not beyond a stop; tell whether there was one."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), duration_s)
        return self._stopping.is_set()


async def _wake_deliveries(stores: Stores, deliverer: Deliverer) -> None:
    """Look for due deliveries when any worker ends a job; without Redis the sweep finds them."""
    async with contextlib.aclosing(stores.queue.finished()) as finished:
        async for _ in finished:
            deliverer.wake()
