"""``/metrics`` and ``GET /v1/workers``: what operators watch. docs/operations.md names each."""

import time
from collections.abc import Iterable, Mapping, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from api.bodies import json_response
from api.observing import METRICS
from api.state import DATABASE, SETTINGS
from contract.errors import StoreUnavailableError
from contract.histograms import accumulate
from storage import counters, jobs, workers
from storage.database import Database

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "add_routes"]

_KEPT_S = 1.0
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: By the name that workers add under: the metric is ``scorekeep_NAME_total``.
COUNTERS = {
    "jobs_completed": "Jobs whose end a worker wrote",
    "items_scored": "Items that got their scores",
    "tokens_scored": "Prompt tokens of the jobs whose end a worker wrote",
    "tokens_claimed": "Estimated tokens of the jobs that workers took",
    "jobs_released": "Jobs given back untouched",
    "jobs_retried": "Attempts that failed and are due again",
    "jobs_poisoned": "Jobs that ended because their workers kept dying",
    "jobs_expired": "Jobs that no worker took before their deadline",
    "jobs_collected": "Jobs whose retention passed",
    "leases_reaped": "Leases that ran out",
    "fenced_writes": "Results dropped because another attempt owns the job",
    "batches": "Forwards through a model",
    "forward_seconds": "Seconds spent in forwards",
    "commits": "Transactions that wrote results",
    "commit_seconds": "Seconds spent in those transactions",
    "padding_tokens": "Tokens of padding that models computed beside the others",
    "bulk_items": "Items of bulks that were stored",
    "cache_hits": "Items whose scores were known",
    "orphan_blobs_dropped": "Blobs without a row and temporary files that were deleted",
    "delivery_attempts": "Webhook calls",
    "deliveries": "Webhooks that the receiver took",
}
#: Kept in SQL as ``contract.histograms`` says.
HISTOGRAMS = {
    "batch_sequences": "Sequences in one forward",
    "batch_tokens": "Tokens in one forward, a shared prefix counted once",
}
GAUGES = {
    "scorekeep_store_up": "1 while the database answers",
    "scorekeep_queue_jobs": "Jobs that wait",
    "scorekeep_queue_tokens": "Estimated tokens of the jobs that wait",
    "scorekeep_queue_age_seconds": "Age of the oldest job that waits",
    "scorekeep_running_jobs": "Jobs in the hands of workers",
    "scorekeep_workers": "Workers whose heart beats",
    "scorekeep_pending_deliveries": "Webhooks that are not delivered yet",
    "scorekeep_delivery_overdue_seconds": "How long the oldest webhook is overdue",
    "scorekeep_dead_deliveries": "Webhooks that were given up",
}
_WAITING = ("scorekeep_queue_jobs", "scorekeep_queue_tokens", "scorekeep_queue_age_seconds")


class _Families(Collector):
    """Families that are read already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _Scrape:
    """The last answer, which stands for a second: reading the queue's depth has a price."""

    def __init__(self) -> None:
        self.text = b""
        self.read_at = -_KEPT_S


_SCRAPE = web.AppKey("scrape", _Scrape)


def add_routes(app: web.Application) -> None:
    """Add what operators watch to the application."""
    app[_SCRAPE] = _Scrape()
    app.router.add_get("/metrics", get_metrics)
    app.router.add_get("/v1/workers", get_workers)


async def get_metrics(request: web.Request) -> web.StreamResponse:
    """Show the metrics as Prometheus text, also while the store is away."""
    kept = request.app[_SCRAPE]
    if time.monotonic() - kept.read_at >= _KEPT_S:
        alive_within_s = request.app[SETTINGS].alive_within_s
        try:
            families = await _read(request.app[DATABASE], alive_within_s)
        except StoreUnavailableError:
            families = [_gauge("scorekeep_store_up", 0.0)]
        registry = CollectorRegistry()
        registry.register(_Families(families))
        kept.text, kept.read_at = generate_latest(registry), time.monotonic()
    text = kept.text + generate_latest(request.app[METRICS].registry)
    return web.Response(body=text, headers={"Content-Type": _CONTENT_TYPE})


async def get_workers(request: web.Request) -> web.StreamResponse:
    """List the workers, also those that stopped answering within the last hour."""
    alive_within_s = request.app[SETTINGS].alive_within_s
    async with request.app[DATABASE].snapshot() as tx:
        rows = await workers.list_workers(tx)
    data = [
        {
            "id": row.id,
            "object": "worker",
            "alive": row.age_s <= alive_within_s,
            "heartbeat_age_s": round(row.age_s, 3),
            "host": row.host,
            "pid": row.pid,
            "device": row.device,
            "models": {status.name: status.state for status in row.models},
        }
        for row in rows
    ]
    return json_response({"object": "list", "data": data})


async def _read(database: Database, alive_within_s: float) -> list[Metric]:
    async with database.snapshot() as tx:
        depths = await jobs.queue_depth(tx)
        backlog = await counters.read_backlog(tx)
        counts = await counters.read_counts(tx)
        alive = await workers.list_workers(tx, alive_within_s=alive_within_s)
    waiting = [GaugeMetricFamily(name, GAUGES[name], labels=["model", "lane"]) for name in _WAITING]
    for depth in depths:
        values = (depth.count, depth.tokens, max(0.0, depth.oldest_age_s))
        for family, value in zip(waiting, values, strict=True):
            family.add_metric([depth.model, depth.lane], value)
    return [
        _gauge("scorekeep_store_up", 1.0),
        *waiting,
        _gauge("scorekeep_running_jobs", backlog.running_jobs),
        _gauge("scorekeep_workers", len(alive)),
        _gauge("scorekeep_pending_deliveries", backlog.pending_deliveries),
        _gauge("scorekeep_delivery_overdue_seconds", backlog.overdue_s),
        _gauge("scorekeep_dead_deliveries", backlog.dead_deliveries),
        *(
            CounterMetricFamily(f"scorekeep_{name}", text, value=counts.get(name, 0.0))
            for name, text in COUNTERS.items()
        ),
        *(_histogram(name, counts) for name in HISTOGRAMS),
    ]


def _histogram(name: str, counts: Mapping[str, float]) -> Metric:
    buckets, total = accumulate(name, counts)
    family = HistogramMetricFamily(f"scorekeep_{name}", HISTOGRAMS[name])
    family.add_metric([], buckets=buckets, sum_value=total)
    return family


def _gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(name, GAUGES[name], value=value)
