"""What is done with a bulk's input: validated whole, then stored as chunks and jobs.

Both may be cut off at any moment: the next reader takes over at the last line that is stored.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from api.bulk.duplicates import DuplicateFinder
from api.bulk.inputs import BulkInput, is_rescore, make_parser, read_input
from api.bulk.lines import InputLine
from api.bulk.packing import CHUNK_LINES, pack_chunk
from api.bulk.settings import parse_options, parse_source
from contract.bulks import BulkState, CacheUse, LineError
from contract.errors import NotFoundError, RequestError
from contract.models import ModelStatus
from storage.bulk_chunks import NewChunk, add_chunks
from storage.bulks import BulkRow, change_bulk, get_bulk
from storage.queue import Queue
from storage.score_cache import CacheEntry, cache_key, find_cached

__all__ = ["LEASE_S", "Validation", "ingest", "outcome_of", "render_errors", "validate"]

#: How long a reader may take for one block before another takes over.
LEASE_S = 60.0
_CHUNKS_A_COMMIT = 16
#: Of the jobs of one commit so many are hinted: a worker that wakes takes all there is.
_HINTS = 4


@dataclass(slots=True)
class Validation:
    """What a look at every line found. ``errors`` are the first ones, ``refused`` counts all."""

    lines: int = 0
    refused: int = 0
    errors: list[LineError] = field(default_factory=list)


async def validate(
    given: BulkInput, bulk: BulkRow, statuses: Mapping[str, ModelStatus]
) -> Validation:
    """Read every line once; nothing of it runs yet. Earlier jobs are only counted."""
    if is_rescore(bulk):
        return await _count_earlier(given, bulk)
    found = Validation()
    limit = given.settings.max_reported_lines
    parser = make_parser(bulk, given.settings, statuses)
    with DuplicateFinder() as finder:
        try:
            async for lines in read_input(given, bulk, parser):
                await asyncio.to_thread(_look_at, lines, finder, found, limit)
                if not await _renew(given, bulk):
                    break
        except (RequestError, NotFoundError) as error:
            refusal = LineError(code=error.code, message=error.message, param=error.param)
            found.errors.insert(0, refusal)
            found.refused = max(1, found.refused)
            return found
        twice = await asyncio.to_thread(lambda: list(finder.duplicates()))
    found.refused += len(twice)
    found.errors += [_name_both(first, second) for first, second in sorted(twice)[:limit]]
    if not found.lines:
        refusal = LineError(code="empty_file", message="the file has no lines")
        found.errors.append(refusal)
        found.refused = 1
    return found


async def ingest(
    given: BulkInput, bulk: BulkRow, statuses: Mapping[str, ModelStatus], queue: Queue
) -> None:
    """Store the lines that are not stored yet; return early where the bulk is no longer ours."""
    parser = make_parser(bulk, given.settings, statuses)
    pending: list[InputLine] = []
    line, item = bulk.ingested_lines, bulk.ingested_items
    size = CHUNK_LINES * _CHUNKS_A_COMMIT
    async for lines in read_input(given, bulk, parser, skip=line):
        pending += lines
        while len(pending) >= size:
            some, pending = pending[:size], pending[size:]
            stored = await _store(given, bulk, some, line, item, queue)
            if stored is None:
                return
            line, item = stored
    if pending:
        stored = await _store(given, bulk, pending, line, item, queue)
        if stored is None:
            return
        line, item = stored
    async with given.database.transaction() as tx:
        # The input may have changed since it was validated: what there was is what there is.
        await change_bulk(tx, bulk, lease_s=None, total_lines=line)


async def _store(  # a page of lines, and where it stands
    given: BulkInput,
    bulk: BulkRow,
    lines: Sequence[InputLine],
    first_line: int,
    first_item: int,
    queue: Queue,
) -> tuple[int, int] | None:
    """Store a page in one transaction; return where the next begins, or None: not ours."""
    options = parse_options(bulk)
    hashes = [""] * len(lines)
    if options.cache is not CacheUse.OFF:
        hashes = await asyncio.to_thread(lambda: [line.hash() for line in lines])
    cached = await _look_up(given, bulk, lines, hashes)

    def pack() -> list[NewChunk]:
        chunks: list[NewChunk] = []
        line, item = first_line, first_item
        for start in range(0, len(lines), CHUNK_LINES):
            chunk = pack_chunk(
                lines[start : start + CHUNK_LINES],
                first_line=line,
                first_item=item,
                batch_tokens=given.settings.batch_tokens,
                hashes=hashes[start : start + CHUNK_LINES],
                cached=cached[start : start + CHUNK_LINES],
            )
            chunks.append(chunk)
            line, item = line + len(chunk.lines), item + chunk.item_count
        return chunks

    chunks = await asyncio.to_thread(pack)
    line = first_line + len(lines)
    item = first_item + sum(chunk.item_count for chunk in chunks)
    async with given.database.transaction() as tx:
        kept = await change_bulk(
            tx, bulk, lease_s=LEASE_S, ingested_lines=line, ingested_items=item
        )
        if not kept:
            return None
        paused = (await get_bulk(tx, bulk.tenant, bulk.id)).paused_at is not None
        await add_chunks(
            tx,
            bulk.id,
            chunks,
            tenant=bulk.tenant,
            lane=options.lane,
            paused=paused,
            expires_after_s=options.expires_after_s,
        )
    hints = [job.hint for chunk in chunks for job in chunk.jobs]
    if not paused:
        await queue.hint(hints[:: max(1, len(hints) // _HINTS)])
    return line, item


async def _look_up(
    given: BulkInput, bulk: BulkRow, lines: Sequence[InputLine], hashes: Sequence[str]
) -> list[CacheEntry | None]:
    """Return what the cache knows of each line."""
    nothing: list[CacheEntry | None] = [None] * len(lines)
    if parse_options(bulk).cache is not CacheUse.READ:
        return nothing
    keys = await asyncio.to_thread(
        lambda: [
            cache_key(bulk.tenant, line.fingerprint, digest) if digest and line.fingerprint else ""
            for line, digest in zip(lines, hashes, strict=True)
        ]
    )
    wanted = set(keys) - {""}
    if not wanted:
        return nothing
    hidden = any(line.wants_hidden for line in lines)
    async with given.database.snapshot() as tx:
        found = await find_cached(tx, bulk.tenant, wanted, hidden=hidden)
    return [found.get(key) for key in keys] if found else nothing


async def _renew(given: BulkInput, bulk: BulkRow) -> bool:
    async with given.database.transaction() as tx:
        return await change_bulk(tx, bulk, lease_s=LEASE_S)


async def _count_earlier(given: BulkInput, bulk: BulkRow) -> Validation:
    source = parse_source(bulk)
    if source.jobs is not None:
        return Validation(lines=len(source.jobs))
    async with given.database.snapshot() as tx:
        earlier = await get_bulk(tx, bulk.tenant, source.bulk or "")
    return Validation(lines=earlier.total_lines)


def _look_at(
    lines: Sequence[InputLine], finder: DuplicateFinder, found: Validation, limit: int
) -> None:
    found.lines += len(lines)
    for line in lines:
        finder.add(line.custom_id, line.number)
        if line.error is not None:
            found.refused += 1
            if len(found.errors) < limit:
                found.errors.append(line.error)


def _name_both(first: int, second: int) -> LineError:
    return LineError(
        code="duplicate_custom_id",
        message=f"lines {first} and {second} have the same custom_id",
        line=second,
        param="custom_id",
    )


def render_errors(errors: Sequence[LineError]) -> str:
    """Return the JSON that the bulk's row keeps."""
    return msgspec.json.encode(list(errors)).decode()


def outcome_of(bulk: BulkRow, found: Validation) -> BulkState:
    """Return what becomes of a bulk after its validation."""
    whole = any(error.line is None for error in found.errors)
    twice = any(error.code == "duplicate_custom_id" for error in found.errors)
    refused = found.refused and parse_options(bulk).on_invalid == "fail"
    return BulkState.FAILED if whole or twice or refused else BulkState.RUNNING
