"""A bulk's lines, wherever they come from: a file, a URI in an allowed store, or earlier jobs."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import msgspec

from api.bulk.families import Family, decode_request, gather_items
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
from storage.bulk_chunks import Chunk, Place, places_by_line, read_chunks, read_requests
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
    most = min(settings.max_items, options.max_items or settings.max_items)
    return LineParser(
        statuses,
        endpoint=bulk.endpoint or None,
        model=options.model,
        parameters=options.parameters,
        columns=options.columns,
        hidden_states=options.hidden_states,
        limits=msgspec.structs.replace(settings, max_items=most),
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
    requests = {job_id: decode_request(raw) for job_id, (_, raw) in stored.items()}
    families = {
        job_id: _find_family(parser, request)
        for job_id, request in requests.items()
        if len(request.item_list) > 1
    }
    lines: list[InputLine] = []
    for chunk in chunks:
        for number, line, places in places_by_line(chunk):
            if line.code is not None:
                error = LineError(code=line.code, message=line.message or "", line=number)
                lines.append(InputLine(number, line.custom_id, error=error))
                continue
            family = families.get(places[0][0]) if len(places) == 1 and not line.form else None
            if family is not None:
                job_id, index = places[0]
                text = str(requests[job_id].item_list[index])
                if parser.fits(family, text):
                    lines.append(InputLine.of_family(number, line.custom_id, family, text))
                    continue
            request = _gather(places, requests)
            lines.append(_hold(parser, number, line.custom_id, request, line.form or {}))
    return lines


def _find_family(parser: LineParser, request: ScoreRequest) -> Family | None:
    """Lines of one text that shared a job have the rest of their requests in common."""
    if not all(isinstance(item, str) for item in request.item_list):
        return None
    try:
        return parser.find_family(parser.change(request))
    except ScoreError:  # each line says why it is refused
        return None


def _gather(places: list[Place], requests: Mapping[str, ScoreRequest]) -> ScoreRequest | None:
    """Return one request of these items of several jobs; None where one was deleted."""
    if any(job_id not in requests for job_id, _ in places):
        return None
    if not places:
        return ScoreRequest(items=[])
    return gather_items(places, requests)


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
                decode_request(stored[job_id][1]) if job_id in stored else None,
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
