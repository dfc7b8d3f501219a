"""What every route about bulks shares: the runner's key, finding a bulk, showing one."""

import re
import time
from typing import Any

import msgspec
from aiohttp import web

from api.bulk.runner import BulkRunner
from api.bulk.settings import parse_options, parse_source
from api.state import DATABASE, tenant_of
from contract.bulks import ENDED_BULKS, Bulk, BulkCounts, LineError
from contract.errors import NotFoundError
from contract.moments import render_moment
from storage.bulk_counts import read_counts
from storage.bulks import BulkRow, get_bulk
from storage.database import Transaction

__all__ = [
    "BULKS",
    "counts_of",
    "errors_of",
    "find_bulk",
    "parse_bulk_id",
    "render_bulk",
    "show_bulk",
]

BULKS = web.AppKey("bulks", BulkRunner)

_BULK_ID = re.compile(r"blk_[0-9a-f]{32}")


def parse_bulk_id(text: str) -> str:
    """Return an id of ours. What cannot be one is not found, and not looked up."""
    if not _BULK_ID.fullmatch(text):
        message = f"there is no bulk {text[:100]!r}"
        raise NotFoundError(message)
    return text


async def find_bulk(request: web.Request, name: str = "id") -> BulkRow:
    """Return the bulk that the path names."""
    bulk_id = parse_bulk_id(request.match_info[name])
    async with request.app[DATABASE].snapshot() as tx:
        return await get_bulk(tx, tenant_of(request), bulk_id)


async def counts_of(tx: Transaction, bulk: BulkRow) -> BulkCounts:
    """Return what became of the bulk's lines and items so far."""
    return await read_counts(tx, bulk.id)


def errors_of(bulk: BulkRow) -> list[LineError]:
    """Return why lines, or all of the input, were refused."""
    if bulk.errors is None:
        return []
    return msgspec.json.decode(bulk.errors, type=list[LineError])


async def show_bulk(request: web.Request, bulk: BulkRow) -> Bulk:
    """Return the bulk as our own routes show it."""
    async with request.app[DATABASE].snapshot() as tx:
        counts = await counts_of(tx, bulk)
    return render_bulk(bulk, counts)


def render_bulk(bulk: BulkRow, counts: BulkCounts) -> Bulk:
    """Return the bulk as our own routes show it, with what became of its lines."""
    options, source = parse_options(bulk), parse_source(bulk)
    rate, eta_s = _speed(bulk, counts)
    url = f"/v1/bulks/{bulk.id}"
    links = {"self": url, "results": f"{url}/results", "events": f"{url}/events"}
    if bulk.state in ENDED_BULKS and options.hidden_states:
        links["hidden_states"] = f"{url}/hidden_states"
    shown: dict[str, Any] = msgspec.to_builtins(source)
    if source.jobs is not None:
        shown["jobs"] = len(source.jobs)
    return Bulk(
        id=bulk.id,
        state=bulk.state,
        paused=bulk.paused_at is not None,
        model=options.model,
        counts=counts,
        ingested_lines=bulk.ingested_lines,
        items_per_s=rate,
        eta_s=eta_s,
        created_at=render_moment(bulk.created_at),
        started_at=_moment(bulk.started_at),
        finished_at=_moment(bulk.finished_at),
        metadata=bulk.metadata,
        cache=options.cache,
        hidden_states=bool(options.hidden_states),
        source=shown,
        errors=errors_of(bulk),
        links=links,
    )


def _speed(bulk: BulkRow, counts: BulkCounts) -> tuple[float | None, float | None]:
    """Return items a second since the start, cached ones apart, and the seconds left.

    What is left is judged by all lines that have ended: it may be as well known to the cache.
    """
    if bulk.started_at is None:
        return None, None
    until = time.time() if bulk.finished_at is None else bulk.finished_at
    elapsed_s = max(1e-3, until - bulk.started_at)
    rate = round((counts.scored + counts.failed - counts.from_cache) / elapsed_s, 1)
    if bulk.finished_at is not None:
        return rate, 0.0
    ended = counts.lines_completed + counts.lines_failed + counts.lines_cancelled
    if not ended or bulk.paused_at is not None:
        return rate, None
    return rate, round(max(0.0, (counts.lines - ended) * elapsed_s / ended), 1)


def _moment(seconds: float | None) -> str | None:
    return None if seconds is None else render_moment(seconds)
