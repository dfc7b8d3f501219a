"""Another run for items of a bulk that have no score: each line a job of its own.

Also what becomes of lines that shared a job with one that kills workers: they run apart.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from api.bulk.families import decode_request, gather_items
from api.bulk.inputs import BulkInput
from api.bulk.packing import make_job
from api.bulk.settings import parse_options
from api.rendering import parse_result
from contract.bulks import ENDED_BULKS
from contract.jobs import JobState
from contract.scores import ScoreRequest
from storage.bulk_chunks import (
    Chunk,
    ChunkJob,
    Place,
    Segment,
    join_segment,
    places_by_line,
    read_chunks,
    read_requests,
    replace_sources,
)
from storage.bulks import BulkRow, reopen_bulk, rewind_index
from storage.database import Transaction
from storage.jobs import JobRow, read_jobs

__all__ = ["retry_bulk", "retry_chunk"]

_Admit = Callable[[Transaction], Awaitable[None]]
_SCORED = {JobState.SUCCEEDED, JobState.PARTIAL}


@dataclass(slots=True)
class _Change:
    """What a retry does to a chunk."""

    sources: list[Segment] = field(default_factory=list)
    jobs: list[ChunkJob] = field(default_factory=list)
    failed: int = 0
    cancelled: int = 0
    lines_failed: int = 0
    lines_cancelled: int = 0


async def retry_bulk(
    given: BulkInput, bulk: BulkRow, admit: _Admit | None = None
) -> tuple[int, list[str]]:
    """Queue every item without a score again; return how many, and hints of some new jobs.

    The bulk runs again until they have ended. Lines that were refused stay refused. ``admit`` is
    asked in the transaction that opens the bulk again; what it raises leaves all as it was.
    """
    position, count, hints = 0, 0, []
    while True:
        async with given.database.snapshot() as tx:
            chunks = await read_chunks(tx, bulk.id, from_line=position, limit=8)
        if not chunks:
            break
        for chunk in chunks:
            new = await retry_chunk(given, bulk, chunk, admit=admit)
            count += sum(job.item_count for job in new)
            hints += [job.hint for job in new[:1]]
        position = chunks[-1].first_line + chunks[-1].line_count
    return count, hints


async def retry_chunk(
    given: BulkInput,
    bulk: BulkRow,
    chunk: Chunk,
    *,
    only: frozenset[str] | None = None,
    admit: _Admit | None = None,
) -> list[ChunkJob]:
    """Put new jobs in place of those items of a chunk that have no score, one per line.

    ``only`` limits it to items of these jobs.
    """
    if chunk.open_jobs:
        return []
    async with given.database.snapshot() as tx:
        ids = {segment.job_id for segment in chunk.sources}
        rows = await read_jobs(tx, ids)
        bad = {job_id for job_id, row in rows.items() if row.failed_count or _is_lost(row)}
        bad = bad if only is None else bad & only
        stored = await read_requests(tx, bulk.tenant, bad)
    change = _plan(
        chunk, rows, {job_id: decode_request(raw) for job_id, (_, raw) in stored.items()}
    )
    if not change.jobs:
        return []
    options = parse_options(bulk)
    async with given.database.transaction() as tx:
        replaced = await replace_sources(
            tx,
            chunk,
            change.sources,
            change.jobs,
            tenant=bulk.tenant,
            lane=options.lane,
            expires_after_s=options.expires_after_s,
            failed=change.failed,
            cancelled=change.cancelled,
            lines_failed=change.lines_failed,
            lines_cancelled=change.lines_cancelled,
        )
        if replaced and bulk.state in ENDED_BULKS:
            if await reopen_bulk(tx, bulk) and admit is not None:
                await admit(tx)
        elif replaced:
            await rewind_index(tx, bulk.id, chunk.first_line)
    return change.jobs if replaced else []


def _plan(
    chunk: Chunk, rows: Mapping[str, JobRow], requests: Mapping[str, ScoreRequest]
) -> _Change:
    change = _Change()
    failed = {job_id: _failed_items(rows[job_id]) for job_id in requests}
    for _, _, places in places_by_line(chunk):
        bad = [place for place in places if place[1] in failed.get(place[0], ())]
        mine = _replace(change, places, bad, rows, requests) if bad else places
        for job_id, index in mine:
            join_segment(change.sources, Segment(job_id, index, 1))
    return change


def _replace(
    change: _Change,
    mine: Sequence[Place],
    bad: Sequence[Place],
    rows: Mapping[str, JobRow],
    requests: Mapping[str, ScoreRequest],
) -> list[Place]:
    """Give a line's items without a score a job; return the line's places then."""
    whole = len(bad) == len(mine)
    job = make_job(gather_items(bad, requests), lines=int(whole))
    change.jobs.append(job)
    cancelled = sum(1 for old, _ in bad if rows[old].state is JobState.CANCELLED)
    change.cancelled += cancelled
    change.failed += len(bad) - cancelled
    if whole:
        # A line counts once, where its first item's job ended.
        change.lines_cancelled += int(cancelled == len(bad))
        change.lines_failed += int(cancelled != len(bad))
    order = {place: position for position, place in enumerate(bad)}
    return [(job.id, order[place]) if place in order else place for place in mine]


def _is_lost(row: JobRow) -> bool:
    return row.state not in _SCORED


def _failed_items(row: JobRow) -> set[int]:
    if _is_lost(row):
        return set(range(row.item_count))
    return {error.index for error in parse_result(row).errors}
