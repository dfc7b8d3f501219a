"""Files streamed into and out of the blob store, a part at a time: the only place that does."""

import asyncio
import hashlib
from collections.abc import AsyncIterator

from contract.errors import TooLargeError
from storage.blobs import BlobStore
from storage.database import Database
from storage.files import FileRow, drop_file, finish_file, part_key, start_file

__all__ = ["PART_BYTES", "FileWriter", "read_pieces"]

PART_BYTES = 4 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024


class FileWriter:
    """Writes one file; nobody sees it before ``finish``. Holds at most one part in memory."""

    def __init__(
        self, database: Database, blobs: BlobStore, file_id: str, *, max_bytes: int = 0
    ) -> None:
        self.file_id = file_id
        self.size_bytes = 0
        self._database = database
        self._blobs = blobs
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._parts = 0
        self._sha256 = hashlib.sha256()

    @classmethod
    async def start(  # what a file is, and where it goes
        cls,
        database: Database,
        blobs: BlobStore,
        tenant: str,
        *,
        filename: str,
        purpose: str,
        max_bytes: int = 0,
    ) -> "FileWriter":
        """Record the file and return its writer."""
        async with database.transaction() as tx:
            file_id = await start_file(
                tx, tenant, filename=filename, purpose=purpose, part_bytes=PART_BYTES
            )
        return cls(database, blobs, file_id, max_bytes=max_bytes)

    async def write(self, data: bytes) -> None:
        """Add bytes. Raises ``TooLargeError`` beyond ``max_bytes``."""
        self.size_bytes += len(data)
        if self._max_bytes and self.size_bytes > self._max_bytes:
            message = f"the file exceeds the limit max_file_bytes of {self._max_bytes} bytes"
            raise TooLargeError(message, param="file")
        self._buffer += data
        while len(self._buffer) >= PART_BYTES:
            part = bytes(self._buffer[:PART_BYTES])
            del self._buffer[:PART_BYTES]
            await self._put(part)

    async def finish(self, *, purpose: str, expires_after_s: float | None = None) -> FileRow:
        """Make the last part durable, then the row visible."""
        if self._buffer:
            await self._put(bytes(self._buffer))
            self._buffer.clear()
        async with self._database.transaction() as tx:
            return await finish_file(
                tx,
                self.file_id,
                purpose=purpose,
                size_bytes=self.size_bytes,
                sha256=self._sha256.hexdigest(),
                expires_after_s=expires_after_s,
            )

    async def abort(self) -> None:
        """Take back what was written: nobody will finish it."""
        await self._blobs.delete([part_key(self.file_id, part) for part in range(self._parts + 1)])
        async with self._database.transaction() as tx:
            await drop_file(tx, self.file_id)

    async def _put(self, part: bytes) -> None:
        await asyncio.to_thread(self._sha256.update, part)
        await self._blobs.put(part_key(self.file_id, self._parts), part)
        self._parts += 1


async def read_pieces(
    blobs: BlobStore, file: FileRow, begin: int = 0, end: int | None = None
) -> AsyncIterator[bytes]:
    """Yield the bytes ``begin`` to ``end`` of a file in pieces of at most a mebibyte."""
    position, stop = begin, file.size_bytes if end is None else end
    while position < stop:
        number, offset = divmod(position, file.part_bytes)
        length = min(_PIECE_BYTES, file.part_bytes - offset, stop - position)
        yield await blobs.get_range(part_key(file.id, number), offset, offset + length)
        position += length
