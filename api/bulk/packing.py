"""Lines packed into chunks and jobs: neighbours with the same parameters share a job.

A job per line would cost two updates and an event each; some hundred lines of one item cost as
much together. A job never holds more than one batch goes through the model with, so that bulk
work delays what is urgent by one batch at most.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from api.bulk.lines import InputLine
from api.submission import estimate_tokens
from contract.scores import ScoreRequest
from storage.bulk_chunks import ChunkJob, ChunkLine, NewChunk, Segment
from storage.ids import create_id
from storage.score_cache import CacheEntry, cache_key

__all__ = ["CHUNK_LINES", "hash_input", "hash_lines", "pack_chunk"]

CHUNK_LINES = 512
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Pack:
    """A job while lines are put into it."""

    id: str
    base: ScoreRequest
    items: list[str | list[int]] = field(default_factory=list)
    tokens: int = 0


def hash_input(request: ScoreRequest) -> str:
    """Return the hash of what a request asks, whatever model answers and what is kept of it."""
    plain = msgspec.structs.replace(request, model=None, return_pooled_hidden_states=False)
    return hashlib.blake2b(_encode(plain), digest_size=16).hexdigest()


def hash_lines(lines: Sequence[InputLine]) -> list[str]:
    """Return the input hash of each line; empty for those that were refused."""
    return ["" if line.request is None else hash_input(line.request) for line in lines]


def pack_chunk(
    lines: Sequence[InputLine],
    *,
    first_line: int,
    first_item: int,
    batch_tokens: int,
    cached: Mapping[str, CacheEntry],
    hashes: Sequence[str],
) -> NewChunk:
    """Return a chunk of ``lines``; those that are ``cached``, by key, have no job of their own.

    ``hashes`` are the lines' input hashes, empty where none is kept.
    """
    packer = _Packer(batch_tokens)
    chunk = NewChunk(first_line=first_line, first_item=first_item, lines=[])
    for line, digest in zip(lines, hashes, strict=True):
        if line.request is None:
            error = line.error
            code, message = ("refused", "") if error is None else (error.code, error.message)
            chunk.lines.append(ChunkLine(line.custom_id, 0, "", code, message))
            continue
        count = len(line.request.item_list)
        chunk.lines.append(ChunkLine(line.custom_id, count, digest, form=line.form or None))
        entry = None
        if cached and line.fingerprint and count:
            entry = cached.get(cache_key(line.fingerprint, digest))
        if entry is not None and entry.item_count == count:
            chunk.cached_lines += 1
            chunk.cached_items += count
            _join(chunk.sources, Segment(entry.job_id, entry.first_item, count))
        else:
            _join(chunk.sources, packer.add(line.request, count, line.family))
    chunk.jobs = packer.finish()
    return chunk


class _Packer:
    """Puts requests into jobs: one-item requests that differ in the item alone share one."""

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        self._open: dict[bytes, _Pack] = {}
        self._jobs: list[ChunkJob] = []

    def add(self, request: ScoreRequest, count: int, family: bytes) -> Segment:
        """Return which items of which job the request became."""
        tokens = estimate_tokens(request)
        if not family and not _can_share(request, count):
            job_id = create_id("job")
            self._jobs.append(_make_job(job_id, request, count, 1, tokens))
            return Segment(job_id, 0, count)
        key = family or _encode(msgspec.structs.replace(request, items=[]))
        pack = self._open.get(key)
        if pack is None or pack.tokens + tokens > self._batch_tokens:
            if pack is not None:
                self._close(pack)
            pack = self._open[key] = _Pack(create_id("job"), request)
        pack.items.append(request.item_list[0])
        pack.tokens += tokens
        return Segment(pack.id, len(pack.items) - 1, 1)

    def finish(self) -> list[ChunkJob]:
        """Return all jobs, in the order of their ids."""
        for pack in self._open.values():
            self._close(pack)
        return sorted(self._jobs, key=lambda job: job.id)

    def _close(self, pack: _Pack) -> None:
        request = msgspec.structs.replace(pack.base, items=pack.items)
        count = len(pack.items)
        self._jobs.append(_make_job(pack.id, request, count, count, pack.tokens))


def _can_share(request: ScoreRequest, count: int) -> bool:
    """Whether the item may be one of many; not with labels or a query that are its own."""
    own = any(isinstance(each, list) for each in request.label_token_ids or ())
    return count == 1 and not own and request.queries is None


def _make_job(job_id: str, request: ScoreRequest, count: int, lines: int, tokens: int) -> ChunkJob:
    return ChunkJob(
        id=job_id,
        model=request.model or "",
        request=_encode(request),
        item_count=count,
        lines=lines,
        estimated_tokens=tokens,
    )


def _join(sources: list[Segment], new: Segment) -> None:
    """Add a segment, to the last one where it continues it. Lines without items have none."""
    if not new.count:
        return
    last = sources[-1] if sources else None
    if last is not None and last.job_id == new.job_id and last.first + last.count == new.first:
        sources[-1] = Segment(last.job_id, last.first, last.count + new.count)
    else:
        sources.append(new)
