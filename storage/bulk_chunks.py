"""Chunks of a bulk: some hundred lines, and which items of which jobs their scores are.

A chunk is written once with its jobs, in one transaction. A line's items may be of a job of
another bulk: scores that were found in the cache. A retry puts other jobs in place of some.
"""

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import Row, insert, literal_column, select

from contract.jobs import LANES, JobState, Lane
from storage.bulk_tables import bulk_chunks
from storage.counters import add_counts
from storage.database import Transaction, database_now
from storage.events import ENDED, add_events
from storage.statements import execute, render_hint
from storage.tables import PARKED_AT, jobs

__all__ = [
    "Chunk",
    "ChunkJob",
    "ChunkLine",
    "NewChunk",
    "Place",
    "Segment",
    "add_chunks",
    "cancel_chunk_jobs",
    "find_poisoned",
    "has_open_chunks",
    "join_segment",
    "places_by_line",
    "read_chunks",
    "read_requests",
    "replace_sources",
]

_IDS_A_STATEMENT = 500
#: A job, and the position of an item in it.
Place = tuple[str, int]


class ChunkLine(msgspec.Struct, frozen=True, array_like=True):
    """One line: its id, items, the hash of its input, why it was refused, what form it wants."""

    custom_id: str
    item_count: int
    input_hash: str = ""
    code: str | None = None
    message: str | None = None
    form: dict[str, Any] | None = None


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive items of a chunk: ``count`` items of a job from ``first`` on."""

    job_id: str
    first: int
    count: int


def join_segment(segments: list[Segment], new: Segment) -> None:
    """Add a segment, to the last one where it continues it. One without items adds none."""
    if not new.count:
        return
    last = segments[-1] if segments else None
    if last is not None and last.job_id == new.job_id and last.first + last.count == new.first:
        segments[-1] = Segment(last.job_id, last.first, last.count + new.count)
    else:
        segments.append(new)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkJob:
    """A job of a chunk, before it is stored. ``lines`` is how many lines it decides."""

    id: str
    model: str
    request: bytes
    item_count: int
    lines: int
    estimated_tokens: int

    @property
    def hint(self) -> str:
        """What the queue is told of it once it is stored."""
        return render_hint(self.id, 0, self.model)


@dataclass(slots=True, kw_only=True)
class NewChunk:
    """A chunk to be stored."""

    first_line: int
    first_item: int
    lines: list[ChunkLine]
    sources: list[Segment] = field(default_factory=list)
    jobs: list[ChunkJob] = field(default_factory=list)
    cached_lines: int = 0
    cached_items: int = 0

    @property
    def item_count(self) -> int:
        """All items, also those of lines that were refused: they have none."""
        return sum(line.item_count for line in self.lines)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk as stored."""

    bulk_id: str
    first_line: int
    line_count: int
    first_item: int
    item_count: int
    open_jobs: int
    lines: list[ChunkLine]
    sources: list[Segment]


def places_by_line(chunk: Chunk) -> Iterator[tuple[int, ChunkLine, list[Place]]]:
    """Yield each line's number, counted from 1, the line, and where its items are."""
    places = [
        (segment.job_id, segment.first + offset)
        for segment in chunk.sources
        for offset in range(segment.count)
    ]
    begin = 0
    for number, line in enumerate(chunk.lines, start=chunk.first_line + 1):
        end = begin + line.item_count
        yield number, line, places[begin:end]
        begin = end


_lines = msgspec.json.Decoder(list[ChunkLine])
_segments = msgspec.json.Decoder(list[Segment])


async def add_chunks(  # what is the same for all of them
    tx: Transaction,
    bulk_id: str,
    chunks: Sequence[NewChunk],
    *,
    tenant: str,
    lane: Lane,
    paused: bool,
    expires_after_s: float | None,
) -> None:
    """Store chunks and their jobs. Bulk statements: no row is read back."""
    rows = [_render_chunk(bulk_id, chunk) for chunk in chunks]
    if rows:
        await tx.execute(insert(bulk_chunks), rows)
    new = [_render_job(bulk_id, chunk.first_line, job) for chunk in chunks for job in chunk.jobs]
    await _add_jobs(
        tx, new, tenant=tenant, lane=lane, paused=paused, expires_after_s=expires_after_s
    )
    items = sum(chunk.item_count for chunk in chunks)
    hits = sum(chunk.cached_items for chunk in chunks)
    await add_counts(tx, {"bulk_items": items, "cache_hits": hits})  # last: others wait for these


async def replace_sources(  # noqa: PLR0913  # a retry is a change and new jobs
    tx: Transaction,
    chunk: Chunk,
    sources: Sequence[Segment],
    new: Sequence[ChunkJob],
    *,
    tenant: str,
    lane: Lane,
    expires_after_s: float | None,
    failed: int,
    cancelled: int,
    lines_failed: int,
    lines_cancelled: int,
) -> bool:
    """Put ``new`` jobs in place of items that failed, and take those out of the counters.

    False where somebody else was first: nothing is written then.
    """
    parameters = {
        "bulk_id": chunk.bulk_id,
        "first_line": chunk.first_line,
        "sources": _compress(list(sources)),
        "old": _compress(chunk.sources),
        "jobs": len(new),
        "failed": failed,
        "cancelled": cancelled,
        "lines_failed": lines_failed,
        "lines_cancelled": lines_cancelled,
    }
    if (await execute(tx, _REPLACE, parameters)).one_or_none() is None:
        return False
    rows = [_render_job(chunk.bulk_id, chunk.first_line, job) for job in new]
    await _add_jobs(
        tx, rows, tenant=tenant, lane=lane, paused=False, expires_after_s=expires_after_s
    )
    return True


async def read_chunks(
    tx: Transaction, bulk_id: str, *, from_line: int = 0, from_item: int = 0, limit: int
) -> list[Chunk]:
    """Return chunks in order, from the one that holds a line, or an item, on."""
    query = (
        select(bulk_chunks)
        .where(
            bulk_chunks.c.bulk_id == bulk_id,
            bulk_chunks.c.first_line + bulk_chunks.c.line_count > from_line,
            bulk_chunks.c.first_item + bulk_chunks.c.item_count > from_item
            if from_item
            else literal_column("1") == literal_column("1"),
        )
        .order_by(bulk_chunks.c.first_line)
        .limit(limit)
    )
    return [_parse_chunk(row) for row in await tx.execute(query)]


async def has_open_chunks(tx: Transaction, bulk_id: str) -> bool:
    """Whether some job of the bulk has not ended."""
    statement = "SELECT 1 FROM bulk_chunks WHERE bulk_id = :id AND open_jobs > 0 LIMIT 1"
    return (await execute(tx, statement, {"id": bulk_id})).one_or_none() is not None


async def read_requests(
    tx: Transaction, tenant: str, ids: Collection[str]
) -> dict[str, tuple[str, bytes]]:
    """Return model and compressed request of the tenant's jobs, by id."""
    found: dict[str, tuple[str, bytes]] = {}
    wanted = sorted(ids)
    for start in range(0, len(wanted), _IDS_A_STATEMENT):
        some = wanted[start : start + _IDS_A_STATEMENT]
        query = select(jobs.c.id, jobs.c.model, jobs.c.request).where(
            jobs.c.id.in_(some), jobs.c.tenant == tenant, jobs.c.request.is_not(None)
        )
        found |= {row.id: (row.model, row.request) for row in await tx.execute(query)}
    return found


async def cancel_chunk_jobs(tx: Transaction, bulk_id: str, *, limit: int) -> list[str]:
    """Cancel a page of the bulk's queued jobs and ask for the end of running ones.

    Returns the ids touched; empty when nothing is left to be told.
    """
    rows = (await execute(tx, _CANCEL, {"bulk_id": bulk_id, "limit": limit})).all()
    await add_events(tx, rows)
    return [row.id for row in rows]


async def find_poisoned(tx: Transaction, bulk_id: str, *, limit: int) -> list[tuple[str, int]]:
    """Return jobs of several lines that ended as poisoned, with their chunks.

    One line of them is to blame: the others deserve another run.
    """
    rows = await execute(tx, _POISONED, {"bulk_id": bulk_id, "limit": limit})
    return [(row.id, int(row.bulk_chunk)) for row in rows]


async def _add_jobs(
    tx: Transaction,
    rows: list[dict[str, Any]],
    *,
    tenant: str,
    lane: Lane,
    paused: bool,
    expires_after_s: float | None,
) -> None:
    if not rows:
        return
    now = literal_column(database_now(tx.dialect.name), jobs.c.created_at.type)
    constants = {
        "tenant": tenant,
        "lane": LANES.index(lane),
        "state": JobState.QUEUED.value,
        "created_at": now,
        "available_at": literal_column(PARKED_AT) if paused else now,
        "hinted_at": now,  # hinted in chunks: the sweep for lost hints leaves them alone
        "expires_after_s": expires_after_s,
    }
    counters = ("error_count", "crash_count", "scored_count", "failed_count")
    constants |= dict.fromkeys([*counters, "attempt", "generation", "version"], 0)
    await tx.execute(insert(jobs).values(constants), rows)


def _render_job(bulk_id: str, first_line: int, job: ChunkJob) -> dict[str, Any]:
    return {
        "id": job.id,
        "model": job.model,
        "request": (packed := zlib.compress(job.request, 1)),
        "stored_bytes": len(packed),
        "item_count": job.item_count,
        "estimated_tokens": job.estimated_tokens,
        "bulk_id": bulk_id,
        "bulk_chunk": first_line,
        "bulk_lines": job.lines,
        "metadata": {},
    }


def _render_chunk(bulk_id: str, chunk: NewChunk) -> dict[str, Any]:
    refused = sum(1 for line in chunk.lines if line.code is not None)
    return {
        "bulk_id": bulk_id,
        "first_line": chunk.first_line,
        "line_count": len(chunk.lines),
        "first_item": chunk.first_item,
        "item_count": chunk.item_count,
        "lines": _compress(chunk.lines),
        "sources": _compress(chunk.sources),
        "open_jobs": len(chunk.jobs),
        "lines_completed": chunk.cached_lines,
        "lines_failed": refused,
        "lines_cancelled": 0,
        "scored": chunk.cached_items,
        "failed": 0,
        "cancelled": 0,
        "from_cache": chunk.cached_items,
        "tokens": 0,
        "estimated_tokens": sum(job.estimated_tokens for job in chunk.jobs),
    }


def _parse_chunk(row: Row[Any]) -> Chunk:
    return Chunk(
        row.bulk_id,
        row.first_line,
        row.line_count,
        row.first_item,
        row.item_count,
        row.open_jobs,
        _lines.decode(zlib.decompress(row.lines)),
        _segments.decode(zlib.decompress(row.sources)),
    )


def _compress(value: object) -> bytes:
    return zlib.compress(msgspec.json.encode(value), 1)


_REPLACE = """
UPDATE bulk_chunks SET sources = :sources, open_jobs = open_jobs + :jobs,
    failed = failed - :failed, cancelled = cancelled - :cancelled,
    lines_failed = lines_failed - :lines_failed,
    lines_cancelled = lines_cancelled - :lines_cancelled
WHERE bulk_id = :bulk_id AND first_line = :first_line AND sources = :old AND open_jobs = 0
RETURNING first_line
"""

_CANCEL = f"""
WITH due AS MATERIALIZED (
    SELECT j.id AS due_id FROM jobs j
    WHERE j.bulk_id = :bulk_id AND (j.state = 'queued'
          OR (j.state = 'running' AND j.cancel_requested_at IS NULL))
    ORDER BY j.id LIMIT :limit {{skip j}})
UPDATE jobs SET
    state = CASE state WHEN 'queued' THEN 'cancelled' ELSE state END,
    finished_at = CASE state WHEN 'queued' THEN {{now}} ELSE NULL END,
    expires_at = CASE state WHEN 'queued' THEN {{now}} + expires_after_s ELSE NULL END,
    cancel_requested_at = coalesce(cancel_requested_at, {{now}}), version = version + 1
FROM due WHERE jobs.id = due_id
RETURNING {ENDED}
"""  # noqa: S608  # constants of ours

_POISONED = """
SELECT id, bulk_chunk FROM jobs
WHERE bulk_id = :bulk_id AND state = 'failed' AND bulk_lines > 1
  AND error LIKE '%"code":"poisoned"%' ORDER BY id LIMIT :limit
"""
