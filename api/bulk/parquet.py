"""Parquet to lines of JSON, in a process of its own: ``python -m api.bulk.parquet`` reads stdin.

A file may say in a few kilobytes that it holds terabytes, and pyarrow believes it. What it says is
held against limits before it is read; what it does not say meets the end of this process's memory,
and not of the API's.
"""

import os
import resource
import sys
from collections.abc import Iterator
from typing import IO, Any, NoReturn

import msgspec

__all__ = ["BROKEN", "NO_READER", "TOO_LARGE", "RefusedError", "run"]

#: Exit codes; the reason is on stderr.
BROKEN, TOO_LARGE, NO_READER = 3, 4, 5
_MAGIC = b"PAR1"
_MIB = 1024 * 1024
_FOOTER_BYTES = 16 * _MIB
#: of a processor, for one file: a file of 8 GiB takes a few minutes
_CPU_S = 3600
_ROW_GROUP_BYTES = 1024 * _MIB
_COLUMNS = 1024
_ROW_GROUPS = 100_000
#: How deep lists and structs may lie in one another, and optional values count as well.
_LEVELS = 16
_ROWS_A_BLOCK = 2048
_ROWS_AT_ONCE = 64
_REASON_CHARACTERS = 500


class RefusedError(Exception):
    """The file is not to be read; ``code`` is how this process ends."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def run(file: IO[bytes], output: IO[bytes], *, memory_bytes: int, unpacked_bytes: int) -> None:
    """Write a line for each row of ``file``, whose columns may unpack to ``unpacked_bytes``."""
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415  # an optional dependency
    except ImportError as error:
        reason = "this service reads no Parquet: pip install 'scorekeep[parquet]'"
        raise RefusedError(NO_READER, reason) from error
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    _check_footer(file)
    try:
        opened = parquet.ParquetFile(
            file, thrift_string_size_limit=_FOOTER_BYTES, thrift_container_size_limit=10**6
        )
    except (ArrowException, OSError) as error:
        raise RefusedError(BROKEN, f"the file is not Parquet: {error}") from error
    _check_shape(opened.metadata, unpacked_bytes)
    try:
        for block in _read_blocks(parquet, opened, file):
            output.write(block)
    except MemoryError as error:
        reason = f"the Parquet file takes more than {memory_bytes // _MIB} MiB of memory to read"
        raise RefusedError(TOO_LARGE, reason) from error
    except BrokenPipeError:
        raise
    except (ArrowException, OSError, ValueError, TypeError) as error:  # the last two: no JSON in it
        raise RefusedError(BROKEN, f"the Parquet file is broken: {error}") from error


def _check_footer(file: IO[bytes]) -> None:
    """Refuse what is no Parquet, or has a footer that alone would fill the memory."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 8))
    tail = file.read(8)
    file.seek(0)
    if end < 12 or tail[4:] != _MAGIC:
        raise RefusedError(BROKEN, "the file is not Parquet: it does not end as one")
    if (length := int.from_bytes(tail[:4], "little")) > _FOOTER_BYTES:
        _refuse("footer", length, _FOOTER_BYTES)


def _check_shape(metadata: Any, unpacked_bytes: int) -> None:  # noqa: ANN401  # pyarrow has no types
    if metadata.num_columns > _COLUMNS:
        reason = f"the Parquet file has {metadata.num_columns} columns; there may be {_COLUMNS}"
        raise RefusedError(TOO_LARGE, reason)
    if metadata.num_row_groups > _ROW_GROUPS:
        reason = f"it has {metadata.num_row_groups} row groups; there may be {_ROW_GROUPS}"
        raise RefusedError(TOO_LARGE, f"the Parquet file is too large: {reason}")
    columns = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    levels = max((each.max_definition_level for each in columns), default=0)
    if levels > _LEVELS:
        reason = f"the Parquet file's columns lie {levels} deep; it may be {_LEVELS}"
        raise RefusedError(TOO_LARGE, reason)
    total = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        sizes = [group.column(each).total_uncompressed_size for each in range(len(columns))]
        size = max(group.total_byte_size, sum(sizes))
        if min([size, *sizes]) < 0:
            raise RefusedError(BROKEN, "the Parquet file is broken: a size is negative")
        if size > _ROW_GROUP_BYTES:
            _refuse(f"row group {number}", size, _ROW_GROUP_BYTES)
        total += size
    if total > unpacked_bytes:
        _refuse("columns together", total, unpacked_bytes)


def _refuse(what: str, size: int, most: int) -> NoReturn:
    reason = f"the Parquet file is too large: {what} of {size} bytes unpacked; {most} may be"
    raise RefusedError(TOO_LARGE, reason)


def _read_blocks(parquet: Any, opened: Any, file: IO[bytes]) -> Iterator[bytes]:  # noqa: ANN401
    """Yield lines of some rows. Texts stay where they lie until their row is written."""
    flat = [field.name for field in opened.schema_arrow if str(field.type) in {"string", "binary"}]
    with parquet.ParquetFile(file, read_dictionary=flat, pre_buffer=False) as reader:
        for batch in reader.iter_batches(batch_size=_ROWS_A_BLOCK, use_threads=False):
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                rows = batch.slice(start, _ROWS_AT_ONCE).to_pylist()
                yield b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def main() -> int:
    """Read the two limits from the command line, the file from stdin."""
    memory_bytes, unpacked_bytes = map(int, sys.argv[1:3])
    try:
        run(
            sys.stdin.buffer,
            sys.stdout.buffer,
            memory_bytes=memory_bytes,
            unpacked_bytes=unpacked_bytes,
        )
        sys.stdout.buffer.flush()
    except RefusedError as error:
        sys.stderr.write(str(error)[:_REASON_CHARACTERS])
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
