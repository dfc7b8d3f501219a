"""Finds ids that appear twice among millions, in memory that does not grow with them."""

import hashlib
import tempfile
from collections.abc import Iterator
from typing import IO, Self

__all__ = ["DuplicateFinder"]

_BUCKETS = 64
_DIGEST_BYTES = 12
_RECORD_BYTES = _DIGEST_BYTES + 8
_SPILL_BYTES = 128 * 1024


class DuplicateFinder:
    """Takes ids with their lines; then says which lines share one. Ids are compared by hash.

    Records go to buckets by hash, and a bucket that grows to its temporary file: a million ids
    take 20 MB of disk, and checking one bucket some hundred kilobytes. Blocks: use a thread.
    """

    def __init__(self) -> None:
        self._buffers = [bytearray() for _ in range(_BUCKETS)]
        self._files: dict[int, IO[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, custom_id: str, line: int) -> None:
        """Remember the id of a line."""
        digest = hashlib.blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
        bucket = digest[0] % _BUCKETS
        buffer = self._buffers[bucket]
        buffer += digest + line.to_bytes(8, "little")
        if len(buffer) >= _SPILL_BYTES:
            if bucket not in self._files:
                self._files[bucket] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
            self._files[bucket].write(buffer)
            buffer.clear()

    def duplicates(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of lines with one id: the first of them, and each later one."""
        for bucket, buffer in enumerate(self._buffers):
            data = bytes(buffer)
            if (file := self._files.get(bucket)) is not None:
                file.seek(0)
                data = file.read() + data
            first: dict[bytes, int] = {}
            for start in range(0, len(data), _RECORD_BYTES):
                digest = data[start : start + _DIGEST_BYTES]
                line = int.from_bytes(data[start + _DIGEST_BYTES : start + _RECORD_BYTES], "little")
                earlier = first.setdefault(digest, line)
                if earlier != line:
                    yield earlier, line
