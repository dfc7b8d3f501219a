"""``/v1/jobs/{a}/compare/{b}`` and ``/v1/bulks/{a}/compare/{b}``: what changed between two runs."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from api.bodies import json_response
from api.bulk.access import find_bulk
from api.bulk.comparing import Comparer, Comparison, differing_fields
from api.bulk.results import LineResult, read_results
from api.job_access import parse_job_id
from api.results import read_scores
from api.state import BLOBS, DATABASE, tenant_of
from contract.bulks import ENDED_BULKS
from contract.errors import ConflictError, ResultNotReadyError
from storage.bulk_chunks import read_chunks
from storage.bulks import BulkRow
from storage.database import Transaction
from storage.jobs import JobRow, get_job, read_jobs
from storage.receipts import get_receipt

__all__ = ["add_routes"]


def add_routes(app: web.Application) -> None:
    """Add the routes to the application."""
    app.router.add_get("/v1/jobs/{a}/compare/{b}", compare_jobs)
    app.router.add_get("/v1/bulks/{a}/compare/{b}", compare_bulks)


async def compare_jobs(request: web.Request) -> web.StreamResponse:
    """Compare two jobs item by item."""
    names = [parse_job_id(request, name) for name in ("a", "b")]
    async with request.app[DATABASE].snapshot() as tx:
        rows = [await get_job(tx, tenant_of(request), name) for name in names]
        receipts = [await _receipt_of(tx, row) for row in rows]
    found = [await read_scores(request, row) for row in rows]
    first, second = [scores.scores for scores in found]
    comparer = Comparer()
    comparer.labels = [*found[0].labels]
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        comparer.add(str(index), index, a, b)
    shared = min(len(first), len(second))
    comparison = await asyncio.to_thread(
        comparer.finish,
        *names,
        receipt=differing_fields(*receipts),
        only_in_a=len(first) - shared,
        only_in_b=len(second) - shared,
    )
    return json_response(comparison)


async def compare_bulks(request: web.Request) -> web.StreamResponse:
    """Compare two bulks line by line; both have ended, with the same lines in the same order."""
    a, b = await find_bulk(request, "a"), await find_bulk(request, "b")
    for bulk in (a, b):
        if bulk.state not in ENDED_BULKS:
            message = f"bulk {bulk.id} is {bulk.state.value}; compare it once it has ended"
            raise ResultNotReadyError(message, retry_after_s=5)
    return json_response(await _compare(request, a, b))


async def _compare(request: web.Request, a: BulkRow, b: BulkRow) -> Comparison:
    database, blobs = request.app[DATABASE], request.app[BLOBS]
    comparer = Comparer()
    left = _Lines(read_results(database, blobs, a.id))
    right = _Lines(read_results(database, blobs, b.id))
    while (lines := await left.take()) and (others := await right.take(len(lines))):
        lines, spare = lines[: len(others)], lines[len(others) :]
        left.give_back(spare)
        await asyncio.to_thread(_compare_lines, comparer, lines, others)
    async with database.snapshot() as tx:
        receipts = [await _first_receipt(tx, bulk) for bulk in (a, b)]
    return await asyncio.to_thread(
        comparer.finish,
        a.id,
        b.id,
        receipt=differing_fields(*receipts),
        only_in_a=max(0, a.ingested_lines - b.ingested_lines),
        only_in_b=max(0, b.ingested_lines - a.ingested_lines),
    )


class _Lines:
    """Pages of results, handed out in pieces of any length."""

    def __init__(self, pages: AsyncIterator[list[LineResult]]) -> None:
        self._pages = pages
        self._rest: list[LineResult] = []

    async def take(self, count: int | None = None) -> list[LineResult]:
        """Return up to ``count`` lines; none at the end."""
        while not self._rest:
            page = await anext(self._pages, None)
            if page is None:
                return []
            self._rest = page
        count = len(self._rest) if count is None else count
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def give_back(self, lines: list[LineResult]) -> None:
        """Take lines back that the other side could not match yet."""
        self._rest = lines + self._rest


def _compare_lines(comparer: Comparer, lines: list[LineResult], others: list[LineResult]) -> None:
    for line, other in zip(lines, others, strict=True):
        comparer.labels = comparer.labels or [*line.labels]
        if line.custom_id != other.custom_id:
            message = (
                f"line {line.number} is {line.custom_id!r} in one and {other.custom_id!r} in the "
                "other: only bulks of the same lines can be compared"
            )
            raise ConflictError(message)
        for index in range(max(len(line.scores), len(other.scores))):
            a = line.scores[index] if index < len(line.scores) else None
            b = other.scores[index] if index < len(other.scores) else None
            comparer.add(line.custom_id, index, a, b)


async def _first_receipt(tx: Transaction, bulk: BulkRow) -> dict[str, Any]:
    """The receipt of the bulk's first job that has one: the others have the same model."""
    for chunk in await read_chunks(tx, bulk.id, limit=1):
        rows = await read_jobs(tx, {segment.job_id for segment in chunk.sources})
        for row in rows.values():
            if row.receipt_hash is not None:
                return await _receipt_of(tx, row)
    return {}


async def _receipt_of(tx: Transaction, row: JobRow) -> dict[str, Any]:
    raw = None if row.receipt_hash is None else await get_receipt(tx, row.receipt_hash)
    return {} if raw is None else msgspec.json.decode(raw, type=dict[str, Any])
