"""What jobs that ask for the score cache need not run, and what others may find of them.

A known score is copied: its job keeps it when the job that it came from is deleted.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from contract.errors import NotFoundError, StoreUnavailableError
from contract.inputs import hash_input
from contract.results import StoredResult
from contract.scores import CacheUse, ScoreRequest, Usage
from storage.jobs import JobRow, read_jobs
from storage.refs import TensorRef
from storage.score_cache import CacheEntry, cache_key, find_cached
from worker.earlier import list_open
from worker.engine.merging import EarlierScores, EarlierTensor, merge
from worker.engine.seam import JobScores, Scorer
from worker.stores import Stores
from worker.work import Work

__all__ = ["list_entries", "recall", "tell_known"]

_LOG = logging.getLogger(__name__)
_HIDDEN = "hidden_states"
#: known scores that are read at a time, in front of the device
_READS = 16


async def recall(stores: Stores, scorer: Scorer, works: Sequence[Work]) -> None:
    """Give prepared works the scores that are known of all their items: those need no forward.

    Where the store cannot be asked they run.
    """
    asking = [work for work in works if work.job.cache is not None and work.prepared is not None]
    if not asking or not scorer.description.fingerprint:
        return
    await asyncio.to_thread(_name_inputs, scorer, asking)
    reading = [w for w in asking if w.job.cache == CacheUse.READ and w.earlier is None]
    try:
        found, rows = await _find(stores, reading)
        turns = asyncio.Semaphore(_READS)

        async def take(work: Work, entry: CacheEntry) -> None:
            async with turns:
                await _take(stores, scorer, work, entry, rows[entry.job_id])

        async with asyncio.TaskGroup() as group:  # none goes on when this has given up
            for work in reading:
                entry = found.get(work.cache_key)
                if entry is not None and entry.job_id in rows:
                    group.create_task(take(work, entry))
    except* (StoreUnavailableError, OSError) as errors:
        _LOG.warning("score cache not asked", extra={"reason": str(errors.exceptions[0])})


def list_entries(works: Sequence[Work]) -> list[CacheEntry]:
    """Return what others may find: whole jobs that went through the model, by their inputs."""
    return [
        CacheEntry(work.cache_key, work.job.id, 0, work.job.item_count, _HIDDEN in scores.tensors)
        for work in works
        if (scores := work.scores) is not None
        and work.cache_key
        and work.earlier is None  # what a job kept may be of an older model
        and not scores.errors
    ]


def tell_known(scores: JobScores, earlier: EarlierScores) -> JobScores:
    """Return ``scores``, of which none was computed now, with those that are known."""
    merged = merge(scores, earlier)
    receipt = {name: value for name, value in merged.receipt.items() if name != "kept_items"}
    count = len(earlier.kept)
    usage = msgspec.structs.replace(merged.usage, computed_tokens=0, from_cache=count)
    return replace(merged, usage=usage, receipt=receipt | {"from_cache": count})


def _name_inputs(scorer: Scorer, works: Sequence[Work]) -> None:
    """As submitted: what a scorer makes of a request is its own."""
    for work in works:
        if work.job.item_count:
            digest = hash_input(msgspec.json.decode(work.job.request, type=ScoreRequest))
            work.cache_key = cache_key(work.job.tenant, scorer.description.fingerprint, digest)


async def _find(
    stores: Stores, works: Sequence[Work]
) -> tuple[dict[str, CacheEntry], Mapping[str, JobRow]]:
    """Return what the cache knows, tenant by tenant, and the jobs that it lies in."""
    keys: dict[str, set[str]] = {}
    for work in works:
        if work.cache_key:
            keys.setdefault(work.job.tenant, set()).add(work.cache_key)
    found: dict[str, CacheEntry] = {}
    if not keys:
        return found, {}
    async with stores.database.snapshot() as tx:
        for tenant, wanted in keys.items():
            found |= await find_cached(tx, tenant, wanted, hidden=False)
        return found, await read_jobs(tx, {entry.job_id for entry in found.values()})


async def _take(stores: Stores, scorer: Scorer, work: Work, entry: CacheEntry, row: JobRow) -> None:
    """Let a work keep an entry's scores, where it holds all that the work is asked for."""
    prepared = work.prepared
    if prepared is None or row.result is None or row.blob_key is None:
        return
    wants_hidden = prepared.request.return_pooled_hidden_states
    refs = [ref for ref in row.tensors if wants_hidden or ref.name != _HIDDEN]
    if wants_hidden and all(ref.name != _HIDDEN for ref in refs):
        return
    places = [_slice(ref, entry) for ref in refs]
    try:
        read = await asyncio.gather(
            *(stores.blobs.get_range(row.blob_key, begin, end) for begin, end in places)
        )
    except NotFoundError:  # deleted, or written anew, since the row was read
        return
    tensors = {
        ref.name: EarlierTensor(ref.dtype, (entry.item_count, *ref.shape[1:]), data)
        for ref, data in zip(refs, read, strict=True)
    }
    earlier = EarlierScores(_cut_result(row, entry), Usage(), tensors)
    open_places = list_open(scorer, prepared, earlier)
    if open_places == []:  # a known score for each; anything else runs as a whole
        work.earlier, work.places, work.is_known = earlier, [], True


def _slice(ref: TensorRef, entry: CacheEntry) -> tuple[int, int]:
    """Return which bytes of the blob are the entry's rows of a tensor."""
    row_bytes = (ref.end - ref.begin) // ref.shape[0]
    begin = ref.begin + entry.first_item * row_bytes
    return begin, begin + entry.item_count * row_bytes


def _cut_result(row: JobRow, entry: CacheEntry) -> StoredResult:
    """Return the entry's part of a job's result; of a part the job's warnings may not be true."""
    result = msgspec.json.decode(row.result or b"{}", type=StoredResult)
    end = entry.first_item + entry.item_count
    return StoredResult(
        labels=result.labels,
        label_counts=result.label_counts[entry.first_item : end],
        tokens=result.tokens[entry.first_item : end],
        warnings=result.warnings if entry.item_count == row.item_count else [],
    )
