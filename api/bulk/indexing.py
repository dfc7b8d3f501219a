"""Fills the score cache from bulks that have ended: what they scored, others need not run again."""

import asyncio
from collections.abc import Mapping

import msgspec

from api.bulk.ingestion import LEASE_S
from api.bulk.inputs import BulkInput
from api.bulk.settings import parse_options
from api.rendering import HIDDEN_STATES, find_tensor, parse_result
from contract.bulks import CacheUse
from contract.jobs import JobState
from storage.bulk_chunks import Chunk, read_chunks, read_jobs
from storage.bulks import BulkRow, change_bulk
from storage.jobs import JobRow
from storage.receipts import get_receipt
from storage.score_cache import CacheEntry, cache_key, put_cached

__all__ = ["index"]

_CHUNKS_A_PAGE = 8
_SCORED = {JobState.SUCCEEDED, JobState.PARTIAL}


class _Receipt(msgspec.Struct):
    fingerprint: str = ""


async def index(given: BulkInput, bulk: BulkRow) -> None:
    """Keep every fully scored line of a bulk, a page a transaction, in the order of its lines.

    The key is by the model that answered, as its receipt says, not by the one that was expected.
    """
    if parse_options(bulk).cache is CacheUse.OFF:
        async with given.database.transaction() as tx:
            await change_bulk(tx, bulk, indexed_lines=bulk.ingested_lines)
        return
    fingerprints: dict[str, str] = {}
    position = bulk.indexed_lines
    while position < bulk.ingested_lines:
        async with given.database.snapshot() as tx:
            chunks = await read_chunks(tx, bulk.id, from_line=position, limit=_CHUNKS_A_PAGE)
            ids = {segment.job_id for chunk in chunks for segment in chunk.sources}
            rows = await read_jobs(tx, ids)
            for receipt_hash in {row.receipt_hash for row in rows.values()} - set(fingerprints):
                raw = None if receipt_hash is None else await get_receipt(tx, receipt_hash)
                found = _Receipt() if raw is None else msgspec.json.decode(raw, type=_Receipt)
                fingerprints[receipt_hash or ""] = found.fingerprint
        if not chunks:
            position = bulk.ingested_lines
        else:
            position = chunks[-1].first_line + chunks[-1].line_count
        entries = await asyncio.to_thread(_list_entries, chunks, rows, bulk.id, fingerprints)
        ended = position >= bulk.ingested_lines
        async with given.database.transaction() as tx:
            if not await change_bulk(
                tx, bulk, lease_s=None if ended else LEASE_S, indexed_lines=position
            ):
                return
            await put_cached(tx, entries)


def _list_entries(
    chunks: list[Chunk], rows: Mapping[str, JobRow], bulk_id: str, fingerprints: Mapping[str, str]
) -> list[CacheEntry]:
    failed = {
        job_id: {error.index for error in parse_result(row).errors} if row.failed_count else set()
        for job_id, row in rows.items()
    }
    hidden = {job_id: find_tensor(row, HIDDEN_STATES) is not None for job_id, row in rows.items()}
    entries: list[CacheEntry] = []
    for chunk in chunks:
        places = [
            (segment.job_id, segment.first + offset)
            for segment in chunk.sources
            for offset in range(segment.count)
        ]
        begin = 0
        for line in chunk.lines:
            mine = places[begin : begin + line.item_count]
            begin += line.item_count
            if not mine or not line.input_hash:
                continue
            job_id, first = mine[0]
            row = rows.get(job_id)
            if row is None or row.bulk_id != bulk_id or row.state not in _SCORED:
                continue
            fingerprint = fingerprints.get(row.receipt_hash or "", "")
            whole = all(
                place == (job_id, first + n) and place[1] not in failed[job_id]
                for n, place in enumerate(mine)
            )
            if whole and fingerprint:
                key = cache_key(fingerprint, line.input_hash)
                entries.append(CacheEntry(key, job_id, first, len(mine), hidden[job_id]))
    return entries
