"""From the bytes of an input to its lines: plain, gzip or Parquet, in memory that stays flat."""

import asyncio
import contextlib
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import IO, Any

import msgspec

from contract.errors import MalformedRequestError, UnsupportedMediaTypeError

__all__ = ["RawLine", "read_lines"]

#: Its number from 1, its bytes, or None and the reason why there are none.
RawLine = tuple[int, bytes | None, str]

_GZIP_MAGIC = b"\x1f\x8b"
_PARQUET_MAGIC = b"PAR1"
_GZIP_WINDOW = 31
_UNPACKED_BYTES = 1024 * 1024
_ROWS_A_BLOCK = 2048
_BLANK_LINES = 10_000
#: What a gzip may unpack to, beside its first mebibytes: rows of JSON reach 50 times.
_LARGEST_RATIO = 200
_UNPACKED_FREE_BYTES = 64 * 1024 * 1024


async def read_lines(
    pieces: AsyncIterator[bytes], *, max_line_bytes: int
) -> AsyncIterator[list[RawLine]]:
    """Yield blocks of lines. Empty lines at the end are none.

    Raises ``MalformedRequestError`` for a gzip that is broken or ends too early, and for a file
    that says it is Parquet and is not.
    """
    first = await anext(pieces, b"")
    if first.startswith(_PARQUET_MAGIC):
        async for rows in _read_parquet(first, pieces):
            yield rows
        return
    splitter = _LineSplitter(max_line_bytes)
    async for data in _unpack(first, pieces):
        if lines := await asyncio.to_thread(splitter.feed, data):
            yield lines
    if lines := splitter.finish():
        yield lines


class _LineSplitter:
    """Cuts bytes at newlines. A line beyond the limit is dropped as it arrives, and reported."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max = max_line_bytes
        self._rest = b""
        self._skipping = False
        self._number = 0
        self._blank = 0

    def feed(self, data: bytes) -> list[RawLine]:
        """Return the lines that end in ``data``."""
        head, *ends = data.split(b"\n")
        lines: list[RawLine] = []
        self._append(head)
        for part in ends:
            self._end(lines)
            self._append(part)
        return lines

    def finish(self) -> list[RawLine]:
        """Return the last line where no newline ends it."""
        lines: list[RawLine] = []
        if self._rest or self._skipping:
            self._end(lines)
        return lines

    def _append(self, part: bytes) -> None:
        if not self._skipping:
            self._rest = self._rest + part if self._rest else part
            if len(self._rest) > self._max:
                self._rest, self._skipping = b"", True

    def _end(self, lines: list[RawLine]) -> None:
        self._number += 1
        text, self._rest = self._rest.strip(), b""
        if self._skipping:
            self._flush_blank(lines)
            reason = f"the line exceeds the limit max_line_bytes of {self._max} bytes"
            lines.append((self._number, None, reason))
            self._skipping = False
        elif not text:
            self._blank += 1
            if self._blank > _BLANK_LINES:  # a megabyte of gzip may hold a thousand million of them
                message = f"more than {_BLANK_LINES} empty lines follow line {self._number}"
                raise MalformedRequestError(message)
        else:
            if self._blank:
                self._flush_blank(lines)
            lines.append((self._number, text, ""))

    def _flush_blank(self, lines: list[RawLine]) -> None:
        """Empty lines count once something follows them."""
        lines += [(self._number - n, b"", "") for n in range(self._blank, 0, -1)]
        self._blank = 0


async def _unpack(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if not first.startswith(_GZIP_MAGIC):
        if first:
            yield first
        async for piece in pieces:
            yield piece
        return
    unpacker = _Unpacker()
    async for packed in _chain(first, pieces):
        data = packed
        while data:
            unpacked, data = await asyncio.to_thread(unpacker.unpack, data)
            if unpacked:
                yield unpacked
    unpacker.check_end()


class _Unpacker:
    """Unpacks gzip, also of several members, in bounded steps."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(_GZIP_WINDOW)
        self._left = _UNPACKED_FREE_BYTES

    def unpack(self, data: bytes) -> tuple[bytes, bytes]:
        """Return at most a mebibyte, and what is left to be unpacked."""
        if self._inner.eof:
            self._inner = zlib.decompressobj(_GZIP_WINDOW)
        try:
            unpacked = self._inner.decompress(data, _UNPACKED_BYTES)
        except zlib.error as error:
            message = f"the gzip is broken: {error}"
            raise MalformedRequestError(message) from error
        rest = self._inner.unconsumed_tail or self._inner.unused_data
        self._left += (len(data) - len(rest)) * _LARGEST_RATIO - len(unpacked)
        if self._left < 0:
            message = f"the gzip unpacks to more than {_LARGEST_RATIO} times its size"
            raise MalformedRequestError(message)
        return unpacked, rest

    def check_end(self) -> None:
        """Raise ``MalformedRequestError`` where the last member has no end."""
        if not self._inner.eof:
            message = "the gzip ends too early: the file was cut off"
            raise MalformedRequestError(message)


async def _chain(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in pieces:
        yield piece


async def _read_parquet(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[list[RawLine]]:
    """Parquet is read from its end: the bytes go to a temporary file first."""
    with tempfile.TemporaryFile() as file:
        async for piece in _chain(first, pieces):
            await asyncio.to_thread(file.write, piece)
        blocks = await asyncio.to_thread(_open_parquet, file)
        number = 0
        while (rows := await asyncio.to_thread(next, blocks, None)) is not None:
            lines: list[RawLine] = [
                (number + offset, row, "") for offset, row in enumerate(rows, start=1)
            ]
            number += len(lines)
            yield lines


def _open_parquet(file: IO[bytes]) -> Iterator[list[bytes]]:
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415  # an optional dependency
    except ImportError as error:
        message = "this service reads no Parquet: pip install 'scorekeep[parquet]'"
        raise UnsupportedMediaTypeError(message) from error
    file.seek(0)
    try:
        opened = parquet.ParquetFile(file)
    except (ArrowException, OSError) as error:
        message = f"the file is not Parquet: {error}"
        raise MalformedRequestError(message) from error
    return _iterate_parquet(opened, ArrowException)


def _iterate_parquet(opened: Any, broken: type[Exception]) -> Iterator[list[bytes]]:  # noqa: ANN401  # pyarrow has no types
    with contextlib.closing(opened):
        try:
            for batch in opened.iter_batches(batch_size=_ROWS_A_BLOCK):
                yield [msgspec.json.encode(row) for row in batch.to_pylist()]
        except (broken, OSError) as error:
            message = f"the Parquet file is broken: {error}"
            raise MalformedRequestError(message) from error
