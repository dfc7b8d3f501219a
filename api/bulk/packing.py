"""Lines packed into chunks and jobs: neighbours with the same parameters share a job.

A job per line would cost two updates and an event each; some hundred lines of one item cost as
much together. A job never holds more than one batch goes through the model with, so that bulk
work delays what is urgent by one batch at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from api.bulk.families import Family, has_own_parts
from api.bulk.lines import InputLine
from api.submission import estimate_tokens
from contract.scores import ScoreRequest
from storage.bulk_chunks import ChunkJob, ChunkLine, NewChunk, Segment, join_segment
from storage.ids import create_id
from storage.score_cache import CacheEntry

__all__ = ["CHUNK_LINES", "make_job", "pack_chunk"]

CHUNK_LINES = 512
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Pack:
    """A job while lines are put into it."""

    id: str
    base: ScoreRequest
    items: list[str | list[int]] = field(default_factory=list)
    tokens: int = 0


def pack_chunk(
    lines: Sequence[InputLine],
    *,
    first_line: int,
    first_item: int,
    batch_tokens: int,
    hashes: Sequence[str],
    cached: Sequence[CacheEntry | None],
) -> NewChunk:
    """Return a chunk of ``lines``; those that are ``cached`` have no job of their own.

    ``hashes`` are the lines' input hashes, empty where none is kept.
    """
    packer = _Packer(batch_tokens)
    chunk = NewChunk(first_line=first_line, first_item=first_item, lines=[])
    for line, digest, entry in zip(lines, hashes, cached, strict=True):
        if line.error is not None:
            error = line.error
            chunk.lines.append(ChunkLine(line.custom_id, 0, "", error.code, error.message))
            continue
        count = line.item_count
        chunk.lines.append(ChunkLine(line.custom_id, count, digest, form=line.form or None))
        if entry is not None and count and entry.item_count == count:
            chunk.cached_lines += 1
            chunk.cached_items += count
            join_segment(chunk.sources, Segment(entry.job_id, entry.first_item, count))
        else:
            join_segment(chunk.sources, packer.add(line, count))
    chunk.jobs = packer.finish()
    return chunk


class _Packer:
    """Puts requests into jobs: one-item requests that differ in the item alone share one."""

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        self._open: dict[bytes | Family, _Pack] = {}
        self._jobs: list[ChunkJob] = []

    def add(self, line: InputLine, count: int) -> Segment:
        """Return which items of which job the line became."""
        family, request = line.family, line.request
        if family is not None:
            return self._share(family, family.request, line.text, family.tokens(line.text))
        if request is None:
            message = f"line {line.number} has neither request nor error"
            raise AssertionError(message)
        if count == 1 and not has_own_parts(request):
            key = _encode(msgspec.structs.replace(request, items=[]))
            return self._share(key, request, request.item_list[0], estimate_tokens(request))
        job = make_job(request, lines=1)
        self._jobs.append(job)
        return Segment(job.id, 0, count)

    def finish(self) -> list[ChunkJob]:
        """Return all jobs, in the order of their ids."""
        for pack in self._open.values():
            self._close(pack)
        return sorted(self._jobs, key=lambda job: job.id)

    def _share(
        self, key: bytes | Family, base: ScoreRequest, item: str | list[int], tokens: int
    ) -> Segment:
        pack = self._open.get(key)
        if pack is None or pack.tokens + tokens > self._batch_tokens:
            if pack is not None:
                self._close(pack)
            pack = self._open[key] = _Pack(create_id("job"), base)
        pack.items.append(item)
        pack.tokens += tokens
        return Segment(pack.id, len(pack.items) - 1, 1)

    def _close(self, pack: _Pack) -> None:
        request = msgspec.structs.replace(pack.base, items=pack.items)
        self._jobs.append(
            make_job(request, lines=len(pack.items), job_id=pack.id, tokens=pack.tokens)
        )


def make_job(
    request: ScoreRequest, *, lines: int, job_id: str = "", tokens: int | None = None
) -> ChunkJob:
    """Return a job to be stored that decides ``lines`` lines."""
    return ChunkJob(
        id=job_id or create_id("job"),
        model=request.model or "",
        request=_encode(request),
        item_count=len(request.item_list),
        lines=lines,
        estimated_tokens=estimate_tokens(request) if tokens is None else tokens,
    )
