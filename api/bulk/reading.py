"""From the bytes of an input to its lines: plain, gzip or Parquet, in memory that stays flat."""

import asyncio
import contextlib
import logging
import os
import sys
import tempfile
import zlib
from collections.abc import AsyncGenerator, AsyncIterator

from api.bulk import parquet
from contract.errors import MalformedRequestError, TooLargeError, UnsupportedMediaTypeError

__all__ = ["RawLine", "read_lines"]

_log = logging.getLogger(__name__)
#: Its number from 1, its bytes, or None and the reason why there are none.
RawLine = tuple[int, bytes | None, str]

_GZIP_MAGIC = b"\x1f\x8b"
_PARQUET_MAGIC = b"PAR1"
_GZIP_WINDOW = 31
_UNPACKED_BYTES = 1024 * 1024
_BLANK_LINES = 10_000
#: What a gzip may unpack to, beside its first mebibytes: rows of JSON reach 50 times.
_LARGEST_RATIO = 200
_UNPACKED_FREE_BYTES = 64 * 1024 * 1024
#: What the process that reads Parquet may take; a good file needs some pages and 64 rows.
_PARQUET_MEMORY_BYTES = 1024 * 1024 * 1024
_PARQUET_SILENCE_S = 60.0
_REASON_BYTES = 4096
_KEPT_VARIABLES = ("COVERAGE_", "HOME", "LANG", "LC_", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ")


async def read_lines(
    pieces: AsyncIterator[bytes], *, max_line_bytes: int
) -> AsyncIterator[list[RawLine]]:
    """Yield blocks of lines. Empty lines at the end are none.

    Raises ``MalformedRequestError`` for a gzip that is broken or ends too early, and for a file
    that says it is Parquet and is not; ``TooLargeError`` for Parquet that unpacks to too much.
    """
    first = await anext(pieces, b"")
    splitter = _LineSplitter(max_line_bytes)
    if first.startswith(_PARQUET_MAGIC):
        async with contextlib.aclosing(_read_parquet(first, pieces, splitter)) as blocks:
            async for rows in blocks:
                yield rows
        return
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


async def _read_parquet(
    first: bytes, pieces: AsyncIterator[bytes], splitter: _LineSplitter
) -> AsyncGenerator[list[RawLine], None]:
    """Parquet is read from its end: a temporary file first, then a process of its own reads it."""
    with tempfile.TemporaryFile() as file:
        async for piece in _chain(first, pieces):
            await asyncio.to_thread(file.write, piece)
        most = _UNPACKED_FREE_BYTES + file.tell() * _LARGEST_RATIO
        file.seek(0)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "api.bulk.parquet", str(_PARQUET_MEMORY_BYTES), str(most)),
            stdin=file,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_plain_environment(),
        )
        try:
            async for data in _read_output(process, most):
                if lines := await asyncio.to_thread(splitter.feed, data):
                    yield lines
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.communicate()  # its end is seen only once its pipes are read out
    if lines := splitter.finish():
        yield lines


async def _read_output(process: asyncio.subprocess.Process, most: int) -> AsyncIterator[bytes]:
    """Yield what the reader of Parquet writes. Raises as it says, also for what it does not say."""
    if process.stdout is None or process.stderr is None:
        raise AssertionError
    while True:
        try:
            async with asyncio.timeout(_PARQUET_SILENCE_S):
                data = await process.stdout.read(_UNPACKED_BYTES)
        except TimeoutError as error:
            message = f"the Parquet file is broken: no row came for {_PARQUET_SILENCE_S:g} s"
            raise MalformedRequestError(message) from error
        if not data:
            break
        most -= len(data)
        if most < 0:
            message = f"the Parquet file unpacks to more than {_LARGEST_RATIO} times its size"
            raise TooLargeError(message)
        yield data
    reason = (await process.stderr.read(_REASON_BYTES)).decode(errors="replace")
    code = await process.wait()
    if code == parquet.NO_READER:
        raise UnsupportedMediaTypeError(reason)
    if code == parquet.TOO_LARGE:
        raise TooLargeError(reason)
    if code == parquet.BROKEN:
        raise MalformedRequestError(reason)
    if code:
        _log.warning("reading Parquet ended", extra={"action": "parquet_ended", "code": code})
        message = "the Parquet file is broken: nothing could read it to its end"
        raise MalformedRequestError(message)


def _plain_environment() -> dict[str, str]:
    """What a process needs to run Python, and no secret: it reads what strangers wrote."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT_VARIABLES)}
    return {**kept, "ARROW_DEFAULT_MEMORY_POOL": "system", "PYTHONPATH": os.pathsep.join(sys.path)}
