"""A bulk's lines, wherever they come from: a file, a URI in an allowed store, or earlier jobs."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import msgspec

from api.bulk.file_store import read_pieces
from api.bulk.lines import InputLine, LineParser
from api.bulk.reading import RawLine, read_lines
from api.bulk.settings import BulkSource, parse_options, parse_source
from api.bulk.uris import open_uri
from contract.bulks import LineError
from contract.config import Settings
from contract.errors import ScoreError
from contract.models import ModelStatus
from contract.scores import ScoreRequest
from storage.blobs import BlobStore
from storage.bulk_chunks import Chunk, read_chunks, read_requests
from storage.bulks import BulkRow
from storage.database import Database
from storage.files import get_file

__all__ = ["BulkInput", "is_rescore", "make_parser", "read_input"]

_CHUNKS_A_PAGE = 4
_JOBS_A_PAGE = 500
_GONE = LineError(code="gone", message="what was scored was deleted, or its retention passed")


@dataclass(frozen=True, slots=True)
class BulkInput:
    """What is needed to read any bulk's lines."""

    database: Database
    blobs: BlobStore
    settings: Settings


def make_parser(
    bulk: BulkRow, settings: Settings, statuses: Mapping[str, ModelStatus]
) -> LineParser:
    """Return the parser of a bulk's lines, with the models as they are now."""
    options = parse_options(bulk)
    return LineParser(
        statuses,
        endpoint=bulk.endpoint or None,
        model=options.model,
        parameters=options.parameters,
        columns=options.columns,
        hidden_states=options.hidden_states,
        max_items=settings.max_items,
    )


def is_rescore(bulk: BulkRow) -> bool:
    """Whether its lines are earlier jobs: then they are not validated before."""
    source = parse_source(bulk)
    return source.bulk is not None or source.jobs is not None


async def read_input(
    given: BulkInput, bulk: BulkRow, parser: LineParser, *, skip: int = 0
) -> AsyncIterator[list[InputLine]]:
    """Yield the bulk's lines in blocks, without the first ``skip``.

    Raises a ``ScoreError`` where the input as a whole cannot be read.
    """
    source = parse_source(bulk)
    if source.bulk is not None:
        async for lines in _read_bulk(given, bulk, source.bulk, parser, skip):
            yield lines
        return
    if source.jobs is not None:
        for start in range(skip, len(source.jobs), _JOBS_A_PAGE):
            some = source.jobs[start : start + _JOBS_A_PAGE]
            yield await _read_job_lines(given, bulk, some, parser, start)
        return
    seen = 0
    pieces = _open(given, bulk, source)
    async for raw in read_lines(pieces, max_line_bytes=given.settings.max_line_bytes):
        wanted = raw[max(0, skip - seen) :]
        seen += len(raw)
        if wanted:
            yield await asyncio.to_thread(_parse_all, parser, wanted)


def _parse_all(parser: LineParser, raw: list[RawLine]) -> list[InputLine]:
    return [parser.parse(number, data, reason) for number, data, reason in raw]


async def _open(given: BulkInput, bulk: BulkRow, source: BulkSource) -> AsyncIterator[bytes]:
    if source.uri is not None:
        store, key = open_uri(source.uri, given.settings)
        async for piece in store.stream(key):
            yield piece
        return
    async with given.database.snapshot() as tx:
        file = await get_file(tx, bulk.tenant, source.file or "")
    async for piece in read_pieces(given.blobs, file):
        yield piece


async def _read_bulk(
    given: BulkInput, bulk: BulkRow, source_id: str, parser: LineParser, skip: int
) -> AsyncIterator[list[InputLine]]:
    position = skip
    while True:
        async with given.database.snapshot() as tx:
            chunks = await read_chunks(tx, source_id, from_line=position, limit=_CHUNKS_A_PAGE)
            ids = {segment.job_id for chunk in chunks for segment in chunk.sources}
            stored = await read_requests(tx, bulk.tenant, ids)
        if not chunks:
            return
        lines = await asyncio.to_thread(_rebuild, chunks, stored, parser)
        yield lines[position - chunks[0].first_line :]
        position = chunks[-1].first_line + chunks[-1].line_count


def _rebuild(
    chunks: list[Chunk], stored: Mapping[str, tuple[str, bytes]], parser: LineParser
) -> list[InputLine]:
    """Put lines together from the requests of the jobs that hold their items."""
    requests = {job_id: _decode(raw) for job_id, (_, raw) in stored.items()}
    lines: list[InputLine] = []
    for chunk in chunks:
        places = [
            (segment.job_id, segment.first + offset)
            for segment in chunk.sources
            for offset in range(segment.count)
        ]
        begin = 0
        for offset, line in enumerate(chunk.lines):
            number = chunk.first_line + offset + 1
            mine = places[begin : begin + line.item_count]
            begin += line.item_count
            if line.code is not None:
                error = LineError(code=line.code, message=line.message or "", line=number)
                lines.append(InputLine(number, line.custom_id, error=error))
                continue
            request = _gather(mine, requests)
            form = line.form or {}
            lines.append(_hold(parser, number, line.custom_id, request, form))
    return lines


def _gather(
    places: list[tuple[str, int]], requests: Mapping[str, ScoreRequest]
) -> ScoreRequest | None:
    if any(job_id not in requests for job_id, _ in places):
        return None
    if not places:
        return ScoreRequest(items=[])
    base = requests[places[0][0]]
    items = [requests[job_id].item_list[index] for job_id, index in places]
    labels = base.label_token_ids
    if labels and isinstance(labels[0], list):
        labels = [(requests[job_id].label_token_ids or labels)[index] for job_id, index in places]
    queries = base.queries
    if queries is not None:
        queries = [(requests[job_id].queries or queries)[index] for job_id, index in places]
    return msgspec.structs.replace(base, items=items, label_token_ids=labels, queries=queries)


async def _read_job_lines(
    given: BulkInput, bulk: BulkRow, ids: list[str], parser: LineParser, start: int
) -> list[InputLine]:
    async with given.database.snapshot() as tx:
        stored = await read_requests(tx, bulk.tenant, ids)
    return await asyncio.to_thread(
        lambda: [
            _hold(
                parser,
                start + offset,
                job_id,
                _decode(stored[job_id][1]) if job_id in stored else None,
                {},
            )
            for offset, job_id in enumerate(ids, start=1)
        ]
    )


def _hold(
    parser: LineParser,
    number: int,
    custom_id: str,
    request: ScoreRequest | None,
    form: dict[str, object],
) -> InputLine:
    if request is None:
        return InputLine(number, custom_id, error=msgspec.structs.replace(_GONE, line=number))
    try:
        return parser.resolve(number, custom_id, parser.change(request), form)
    except ScoreError as error:
        refusal = LineError(code=error.code, message=error.message, line=number, param=error.param)
        return InputLine(number, custom_id, error=refusal)


def _decode(compressed: bytes) -> ScoreRequest:
    return msgspec.json.decode(zlib.decompress(compressed), type=ScoreRequest)
