"""The overview, computed once per process for all who watch: the only place that makes one."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import msgspec

from api.catalog import Catalog
from contract.errors import StoreUnavailableError
from contract.jobs import LANES
from contract.models import ModelStatus
from contract.moments import render_moment
from contract.overview import (
    DeliveriesOverview,
    LaneOverview,
    ModelOverview,
    Overview,
    ThroughputOverview,
    WorkerOverview,
)
from storage import counters, jobs, workers
from storage.database import Database
from storage.jobs import QueueDepth, RunningJobs
from storage.throughput import SLOT_S, Throughput, read_throughput
from storage.workers import WorkerRow

__all__ = ["Overviews"]

_KEPT_S = 1.0
#: A reading that took long is kept this many times as long, so that it costs a tenth at the most.
_COST_FACTOR = 10.0
#: A quarter of an hour.
_SLOTS = 900 // SLOT_S


class Overviews:
    """The overview as last read; read again when it is old, and only when somebody asks."""

    def __init__(self, database: Database, catalog: Catalog, *, alive_within_s: float) -> None:
        self._database = database
        self._catalog = catalog
        self._alive_within_s = alive_within_s
        self._lock = asyncio.Lock()
        self._body = b""
        self._error: StoreUnavailableError | None = None
        self._stale_at = 0.0
        self.stopping = asyncio.Event()

    async def read(self) -> bytes:
        """Return the overview as JSON. Raises ``StoreUnavailableError``, to all who ask."""
        async with self._lock:
            if time.monotonic() >= self._stale_at:
                await self._renew()
        if self._error is not None:
            raise StoreUnavailableError(self._error.message, retry_after_s=_KEPT_S)
        return self._body

    async def _renew(self) -> None:
        started_at = time.monotonic()
        self._error = None
        try:
            self._body = msgspec.json.encode(await self._compute())
        except StoreUnavailableError as error:
            self._error = error
            self._stale_at = time.monotonic() + _KEPT_S
        else:
            took_s = time.monotonic() - started_at
            self._stale_at = started_at + max(_KEPT_S, _COST_FACTOR * took_s)

    async def _compute(self) -> Overview:
        statuses = await self._catalog.statuses()
        async with self._database.snapshot() as tx:
            depths = await jobs.queue_depth(tx)
            running = await jobs.running_jobs(tx)
            rows = await workers.list_workers(tx)
            backlog = await counters.read_backlog(tx)
            throughput = await read_throughput(tx, slots=_SLOTS)
        return Overview(
            models=_render_models(statuses, depths, running),
            workers=[self._render_worker(row, running) for row in rows],
            throughput=_render_throughput(throughput),
            deliveries=DeliveriesOverview(
                pending=backlog.pending_deliveries,
                overdue_s=round(backlog.overdue_s, 1),
                dead=backlog.dead_deliveries,
            ),
        )

    def _render_worker(self, row: WorkerRow, running: Sequence[RunningJobs]) -> WorkerOverview:
        return WorkerOverview(
            id=row.id,
            host=row.host,
            pid=row.pid,
            device=row.device,
            alive=row.age_s <= self._alive_within_s,
            heartbeat_age_s=round(max(0.0, row.age_s), 1),
            started_at=render_moment(row.started_at),
            memory_bytes=row.memory.memory_bytes,
            device_memory_bytes=row.memory.device_memory_bytes,
            device_memory_total_bytes=row.memory.device_memory_total_bytes,
            running=sum(held.count for held in running if held.worker == row.id),
            models={status.name: status.state for status in row.models},
        )


def _render_models(
    statuses: Mapping[str, ModelStatus],
    depths: Sequence[QueueDepth],
    running: Sequence[RunningJobs],
) -> list[ModelOverview]:
    names = {*statuses, *(depth.model for depth in depths), *(held.model for held in running)}
    waiting = {(depth.model, depth.lane): depth for depth in depths}
    return [
        ModelOverview(
            id=name,
            state=statuses[name].state if name in statuses else None,
            reason=statuses[name].reason if name in statuses else "no worker serves it",
            lanes=[
                LaneOverview(
                    lane=lane,
                    waiting=depth.count if (depth := waiting.get((name, lane))) else 0,
                    tokens=depth.tokens if depth else 0,
                    oldest_age_s=round(max(0.0, depth.oldest_age_s), 1) if depth else 0.0,
                    running=sum(h.count for h in running if (h.model, h.lane) == (name, lane)),
                )
                for lane in LANES
            ],
        )
        for name in sorted(names)
    ]


def _render_throughput(throughput: Throughput) -> ThroughputOverview:
    series = throughput.series
    return ThroughputOverview(
        slot_s=SLOT_S,
        last_at=render_moment(throughput.last_at),
        jobs=series["jobs_completed"],
        items=series["items_scored"],
        tokens=series["tokens_scored"],
    )
