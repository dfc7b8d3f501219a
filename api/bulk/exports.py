"""A bulk's results as JSONL, Parquet or an Arrow stream: written as they are read."""

import io
from typing import Any

import msgspec
from aiohttp import web

from api.bulk.results import LineResult, read_results
from api.negotiation import choose_type
from api.state import BLOBS, DATABASE
from contract.bulks import BulkResult
from contract.errors import NotAcceptableError
from contract.rows import result_schema
from contract.scores import ItemError
from storage.bulks import BulkRow

__all__ = ["ARROW", "JSONL", "PARQUET", "render_result", "serve_results"]

JSONL = "application/jsonl"
PARQUET = "application/vnd.apache.parquet"
ARROW = "application/vnd.apache.arrow.stream"

_encode = msgspec.json.Encoder().encode


async def serve_results(request: web.Request, bulk: BulkRow, after: int) -> web.StreamResponse:
    """Answer with the results after a line, as far as they are done."""
    kind = choose_type(request.headers.get("Accept"), (JSONL, PARQUET, ARROW))
    sink = _Jsonl() if kind == JSONL else _open_table(kind)
    pages = read_results(request.app[DATABASE], request.app[BLOBS], bulk.id, after=after)
    first: list[LineResult] = await anext(pages, [])  # a store that is away is answered as an error
    response = web.StreamResponse()
    response.content_type = kind
    await response.prepare(request)
    await response.write(sink.write(first))
    async for page in pages:
        await response.write(sink.write(page))
    await response.write(sink.close())
    await response.write_eof()
    return response


def render_result(line: LineResult) -> BulkResult:
    """Return a line as JSONL shows it. A refused line has one error, of item 0."""
    errors = line.errors
    if line.refused is not None:
        errors = [ItemError(0, *line.refused)]
    return BulkResult(
        line=line.number,
        custom_id=line.custom_id,
        model=line.model or None,
        labels=line.labels,
        scores=line.scores,
        errors=errors,
    )


class _Jsonl:
    """One JSON object a line."""

    def write(self, page: list[LineResult]) -> bytes:
        """Return the bytes of a page."""
        return b"".join(_encode(render_result(line)) + b"\n" for line in page)

    def close(self) -> bytes:
        """Return the bytes of the end."""
        return b""


class _Table:
    """One row per item, in columns; pages become record batches, or row groups."""

    def __init__(self, arrow: Any, open_writer: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        self._arrow = arrow
        self._schema = result_schema(arrow)
        self._sink = _Draining()
        self._writer = open_writer(self._sink, self._schema)

    def write(self, page: list[LineResult]) -> bytes:
        """Return the bytes of a page."""
        rows = [row for line in page for row in _rows_of(line)]
        if rows:
            batch = self._arrow.RecordBatch.from_pylist(rows, schema=self._schema)
            self._writer.write_batch(batch)
        return self._take()

    def close(self) -> bytes:
        """Return the bytes of the end."""
        self._writer.close()
        return self._take()

    def _take(self) -> bytes:
        """Hand over what was written; positions go on counting."""
        return self._sink.take()


class _Draining(io.RawIOBase):
    """A sink that gives away its bytes and still knows its position, as Parquet's footer needs."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = bytearray()
        self._position = 0

    def writable(self) -> bool:
        """It is written to."""
        return True

    def tell(self) -> int:
        """How many bytes were written in all."""
        return self._position

    def write(self, data: Any) -> int:  # noqa: ANN401  # a buffer
        """Keep the bytes until they are taken."""
        view = memoryview(data).cast("B")
        self._bytes += view
        self._position += len(view)
        return len(view)

    def take(self) -> bytes:
        """Return what was written since the last time."""
        taken = bytes(self._bytes)
        self._bytes.clear()
        return taken


def _open_table(kind: str) -> _Table:
    try:
        import pyarrow  # noqa: PLC0415  # an optional dependency
        from pyarrow import ipc, parquet  # noqa: PLC0415
    except ImportError as error:
        message = f"this service writes no {kind}: pip install 'scorekeep[parquet]'"
        raise NotAcceptableError(message, param="Accept") from error
    return _Table(pyarrow, parquet.ParquetWriter if kind == PARQUET else ipc.new_stream)


def _rows_of(line: LineResult) -> list[dict[str, Any]]:
    base = {"line": line.number, "custom_id": line.custom_id, "model": line.model or None}
    if line.refused is not None:
        code, message = line.refused
        return [base | {"item": 0, "scores": None, "error_code": code, "error_message": message}]
    errors = {error.index: error for error in line.errors}
    rows = []
    for index, scores in enumerate(line.scores):
        error = errors.get(index)
        rows.append(
            base
            | {
                "item": index,
                "scores": scores,
                "error_code": None if error is None else error.code,
                "error_message": None if error is None else error.message,
            }
        )
    return rows
