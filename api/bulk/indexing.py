"""Fills the score cache while a bulk runs: what it has scored, others need not run again."""

import asyncio
from collections.abc import Mapping

import msgspec

from api.bulk.ingestion import LEASE_S
from api.bulk.inputs import BulkInput
from api.bulk.results import take_done
from api.bulk.settings import parse_options
from api.rendering import HIDDEN_STATES, find_tensor, parse_result
from contract.bulks import CacheUse
from contract.jobs import JobState
from storage.bulk_chunks import Chunk, Place, places_by_line, read_chunks
from storage.bulks import BulkRow, change_bulk
from storage.jobs import JobRow, read_jobs
from storage.receipts import get_receipt
from storage.score_cache import CacheEntry, cache_key, put_cached

__all__ = ["index"]

_CHUNKS_A_PAGE = 8
#: So many pages are a turn: then a bulk that waits for its reader comes first.
_PAGES = 16
_SCORED = {JobState.SUCCEEDED, JobState.PARTIAL}


class _Receipt(msgspec.Struct):
    fingerprint: str = ""


async def index(given: BulkInput, bulk: BulkRow) -> bool:
    """Keep the fully scored lines of chunks that have ended, in their order, a page a transaction.

    The key is by the model that answered, as its receipt says, not by the one that was expected.
    Returns whether more may be done at once.
    """
    if parse_options(bulk).cache is CacheUse.OFF:
        async with given.database.transaction() as tx:
            await change_bulk(tx, bulk, indexed_lines=bulk.ingested_lines)
        return False
    fingerprints: dict[str, str] = {}
    position = bulk.indexed_lines
    for _ in range(_PAGES):
        async with given.database.snapshot() as tx:
            found = await read_chunks(tx, bulk.id, from_line=position, limit=_CHUNKS_A_PAGE)
            chunks = take_done(found)
            ids = {segment.job_id for chunk in chunks for segment in chunk.sources}
            rows = await read_jobs(tx, ids)
            for receipt_hash in {row.receipt_hash for row in rows.values()} - set(fingerprints):
                raw = None if receipt_hash is None else await get_receipt(tx, receipt_hash)
                receipt = _Receipt() if raw is None else msgspec.json.decode(raw, type=_Receipt)
                fingerprints[receipt_hash or ""] = receipt.fingerprint
        if chunks:
            position = chunks[-1].first_line + chunks[-1].line_count
        elif not found:  # lines that never became chunks: the bulk was deleted
            position = bulk.ingested_lines
        entries = await asyncio.to_thread(_list_entries, chunks, rows, bulk, fingerprints)
        async with given.database.transaction() as tx:
            if not await change_bulk(tx, bulk, lease_s=LEASE_S, indexed_lines=position):
                return False
            await put_cached(tx, entries)
        if len(chunks) < _CHUNKS_A_PAGE:
            return False
    return True


def _list_entries(
    chunks: list[Chunk], rows: Mapping[str, JobRow], bulk: BulkRow, fingerprints: Mapping[str, str]
) -> list[CacheEntry]:
    jobs = {
        job_id: _describe(row, fingerprints.get(row.receipt_hash or "", ""))
        for job_id, row in rows.items()
        if row.bulk_id == bulk.id and row.state in _SCORED
    }
    entries: list[CacheEntry] = []
    for chunk in chunks:
        for _, line, places in places_by_line(chunk):
            if not places or not line.input_hash:
                continue
            job_id, first = places[0]
            fingerprint, has_hidden, failed = jobs.get(job_id, _UNKNOWN)
            if fingerprint and _is_whole(places, failed):
                key = cache_key(bulk.tenant, fingerprint, line.input_hash)
                entries.append(CacheEntry(key, job_id, first, len(places), has_hidden))
    return entries


_UNKNOWN: tuple[str, bool, frozenset[int]] = ("", False, frozenset())


def _describe(row: JobRow, fingerprint: str) -> tuple[str, bool, frozenset[int]]:
    """Return what answered, whether hidden states were kept, and which items have no score.

    An item beyond the rows that were stored has none either.
    """
    has_hidden = find_tensor(row, HIDDEN_STATES) is not None
    failed: set[int] = set()
    if row.scored_count != row.item_count:
        result = parse_result(row)
        failed = {error.index for error in result.errors}
        failed.update(range(len(result.label_counts), row.item_count))
    return fingerprint, has_hidden, frozenset(failed)


def _is_whole(places: list[Place], failed: frozenset[int]) -> bool:
    """Whether a line's items all have scores and lie side by side in one job."""
    job_id, first = places[0]
    return all(
        place == (job_id, first + n) and first + n not in failed for n, place in enumerate(places)
    )
