"""Results of a bulk in the order of its lines, put together from the jobs that hold them.

Reads a page of chunks at a time: memory does not grow with the bulk.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from api.numbers import decode_floats, finite_row, rows_of
from api.rendering import find_tensor, parse_result, recorded_error
from contract.errors import NotFoundError
from contract.jobs import TERMINAL, JobState
from contract.scores import ItemError
from storage.blobs import BlobStore
from storage.bulk_chunks import Chunk, places_by_line, read_chunks
from storage.database import Database
from storage.jobs import JobRow, read_jobs

__all__ = ["LineResult", "ScoredItems", "load_items", "read_results", "take_done"]

_CHUNKS_A_PAGE = 8
#: Tensors of one blob that lie within so many bytes are read at once.
_SPAN_BYTES = 4 * 1024 * 1024
_SCORED = {JobState.SUCCEEDED, JobState.PARTIAL}
_ATTEMPTS = 3


class LineResult(msgspec.Struct, frozen=True):
    """What became of one line; ``number`` counts from 1. A refused line has ``refused`` alone."""

    number: int
    custom_id: str
    model: str = ""
    labels: list[Any] = []
    scores: list[list[float] | None] = []
    errors: list[ItemError] = []
    refused: tuple[str, str] | None = None
    form: dict[str, Any] = {}

    @property
    def failed(self) -> bool:
        """Whether it has no score at all."""
        return self.refused is not None or (bool(self.scores) and not any(self.scores))


@dataclass(frozen=True, slots=True)
class ScoredItems:
    """A job's items: rows and errors by index, both by position in the job."""

    model: str
    labels: list[Any]
    rows: list[list[float] | None]
    errors: dict[int, tuple[str, str]]
    problem: tuple[str, str] | None = None

    def row(self, index: int) -> list[float] | None:
        """The item's scores."""
        return self.rows[index] if index < len(self.rows) else None

    def error(self, index: int) -> tuple[str, str]:
        """Why the item has none."""
        return self.errors.get(index) or self.problem or ("no_score", "the item has no score")


_GONE = ScoredItems("", [], [], {}, ("gone", "the scores were deleted, or their retention passed"))


async def read_results(
    database: Database, blobs: BlobStore, bulk_id: str, *, after: int = 0
) -> AsyncIterator[list[LineResult]]:
    """Yield results by line, a page at a time, from the line after ``after`` on.

    Ends at the first chunk that is not done: nothing is skipped, the rest can be asked for later.
    """
    position = after
    while True:
        async with database.snapshot() as tx:
            chunks = await read_chunks(tx, bulk_id, from_line=position, limit=_CHUNKS_A_PAGE)
        done = take_done(chunks)
        if done:
            ids = {segment.job_id for chunk in done for segment in chunk.sources}
            items = await load_items(database, blobs, ids)
            lines = await asyncio.to_thread(_render, done, items)
            yield [line for line in lines if line.number > after]
            position = done[-1].first_line + done[-1].line_count
        if len(done) < _CHUNKS_A_PAGE:
            return


async def load_items(database: Database, blobs: BlobStore, ids: set[str]) -> dict[str, ScoredItems]:
    """Return what the jobs scored, by id; a job that was deleted is missing.

    A blob may move between reading the rows and its bytes: the rows are then read again.
    """
    attempt = 0
    while True:
        attempt += 1
        async with database.snapshot() as tx:
            rows = await read_jobs(tx, ids)
        try:
            data = await _read_scores(blobs, list(rows.values()))
        except NotFoundError:
            if attempt == _ATTEMPTS:
                raise
            continue
        return await asyncio.to_thread(_decode_all, rows, data)


def take_done(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks before the first that has work left."""
    done: list[Chunk] = []
    for chunk in chunks:
        if chunk.open_jobs:
            break
        done.append(chunk)
    return done


async def _read_scores(blobs: BlobStore, rows: Sequence[JobRow]) -> dict[str, bytes]:
    """Read the jobs' scores, neighbours in a blob together."""
    by_blob: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for row in rows:
        tensor = find_tensor(row, "scores")
        if tensor is not None and row.blob_key is not None and row.state in _SCORED:
            by_blob[row.blob_key].append((tensor.begin, tensor.end, row.id))
    found: dict[str, bytes] = {}
    for key, places in by_blob.items():
        for span in _spans(sorted(places)):
            begin = span[0][0]
            data = await blobs.get_range(key, begin, max(end for _, end, _ in span))
            found |= {job_id: data[low - begin : high - begin] for low, high, job_id in span}
    return found


def _spans(places: Sequence[tuple[int, int, str]]) -> list[list[tuple[int, int, str]]]:
    spans: list[list[tuple[int, int, str]]] = []
    for place in places:
        if spans and place[1] - spans[-1][0][0] <= _SPAN_BYTES:
            spans[-1].append(place)
        else:
            spans.append([place])
    return spans


def _decode_all(rows: Mapping[str, JobRow], data: Mapping[str, bytes]) -> dict[str, ScoredItems]:
    return {job_id: _decode(row, data.get(job_id)) for job_id, row in rows.items()}


def _decode(row: JobRow, data: bytes | None) -> ScoredItems:
    tensor = find_tensor(row, "scores")
    result = parse_result(row)
    errors = {error.index: (error.code, error.message) for error in result.errors}
    if tensor is None or data is None:
        return ScoredItems(row.model, result.labels, [], errors, _problem_of(row))
    rows = rows_of(decode_floats(data, tensor.dtype), max(1, tensor.shape[-1]))
    counts = result.label_counts or [tensor.shape[-1]] * len(rows)
    return ScoredItems(
        row.model,
        result.labels,
        [
            None if index in errors else finite_row(one[:count])
            for index, (one, count) in enumerate(zip(rows, counts, strict=True))
        ],
        errors,
    )


def _problem_of(row: JobRow) -> tuple[str, str]:
    if row.state not in TERMINAL:
        return ("not_ready", "the item has not been scored yet")
    problem = recorded_error(row)
    if problem is not None:
        return (problem.code, problem.message)
    return (row.state.value, f"the job ended as {row.state.value}")


def _render(chunks: Sequence[Chunk], items: Mapping[str, ScoredItems]) -> list[LineResult]:
    lines: list[LineResult] = []
    for chunk in chunks:
        for number, line, places in places_by_line(chunk):
            if line.code is not None:
                refused = (line.code, line.message or "")
                lines.append(LineResult(number, line.custom_id, refused=refused))
                continue
            mine = [(items.get(job_id, _GONE), index) for job_id, index in places]
            lines.append(_render_line(number, line.custom_id, mine, line.form or {}))
    return lines


def _render_line(
    number: int,
    custom_id: str,
    places: Sequence[tuple[ScoredItems, int]],
    form: dict[str, Any],
) -> LineResult:
    if len(places) == 1:  # most lines by far
        job, index = places[0]
        row = job.row(index)
        if row is not None:
            labels = _labels_of(places, job)
            return LineResult(number, custom_id, job.model, labels, [row], form=form)
    scores = [job.row(index) for job, index in places]
    errors = [
        ItemError(position, *job.error(index))
        for position, ((job, index), row) in enumerate(zip(places, scores, strict=True))
        if row is None
    ]
    first = next((job for job, _ in places if job.model), _GONE)
    return LineResult(
        number, custom_id, first.model, _labels_of(places, first), scores, errors, form=form
    )


def _labels_of(places: Sequence[tuple[ScoredItems, int]], first: ScoredItems) -> list[Any]:
    """The columns' names; where a job had lists of its own per item, those of these items."""
    nested = bool(first.labels) and isinstance(first.labels[0], list)
    if not nested or len(first.labels) != len(first.rows):
        return first.labels
    return [job.labels[index] for job, index in places if index < len(job.labels)]
