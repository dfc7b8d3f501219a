"""A bulk's hidden states as a set of safetensors files that exist only while they are read.

Shard ``n`` holds the rows ``n * SHARD_ROWS`` and on, in input order, as one tensor
``hidden_states`` [rows, hidden]. Its size is known before its bytes are, so that ranges work.
"""

import asyncio
import hashlib
import math
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from api.rendering import HIDDEN_STATES, find_tensor, parse_result
from api.tensor_files import render_header
from contract.errors import NotFoundError
from contract.jobs import JobState
from storage.blobs import BlobStore
from storage.bulk_chunks import Chunk, read_chunks
from storage.bulks import BulkRow
from storage.database import Database
from storage.jobs import JobRow, read_jobs

__all__ = ["SHARD_ROWS", "ShardFile", "VectorSet", "describe_vectors", "shard_name"]

SHARD_ROWS = 65_536
_CHUNKS_A_PAGE = 16
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_NAN = {
    "F64": struct.pack("<d", math.nan),
    "F32": struct.pack("<f", math.nan),
    "F16": struct.pack("<e", math.nan),
    "BF16": struct.pack("<f", math.nan)[2:],
}
_SCORED = {JobState.SUCCEEDED, JobState.PARTIAL}
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class VectorSet:
    """The rows of a bulk: how many, of which width and dtype, in how many shards."""

    bulk_id: str
    rows: int
    width: int
    dtype: str

    @property
    def shards(self) -> int:
        """How many files there are."""
        return -(-self.rows // SHARD_ROWS)

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return self.width * _ITEM_BYTES[self.dtype]

    def shard_rows(self, number: int) -> int:
        """The rows of one shard."""
        return min(SHARD_ROWS, self.rows - number * SHARD_ROWS)

    def render_index(self) -> dict[str, Any]:
        """Return the JSON of ``hidden_states.index.json``."""
        return {
            "metadata": {
                "bulk": self.bulk_id,
                "rows": self.rows,
                "hidden": self.width,
                "dtype": self.dtype,
                "rows_per_shard": SHARD_ROWS,
                "total_size": self.rows * self.row_bytes,
            },
            "tensor": HIDDEN_STATES,
            "ids": "ids.jsonl",
            "shards": [
                {"file": shard_name(number, self.shards), "rows": self.shard_rows(number)}
                for number in range(self.shards)
            ],
        }


def shard_name(number: int, count: int) -> str:
    """Return a shard's file name, in the manner of sharded checkpoints."""
    return f"hidden_states-{number + 1:05d}-of-{count:05d}.safetensors"


async def describe_vectors(database: Database, bulk: BulkRow) -> VectorSet:
    """Return the set of an ended bulk. Raises ``NotFoundError`` where no row was kept."""
    position, rows = 0, 0
    found: tuple[int, str] | None = None
    while True:
        async with database.snapshot() as tx:
            chunks = await read_chunks(tx, bulk.id, from_line=position, limit=_CHUNKS_A_PAGE)
            if found is None:
                ids = {segment.job_id for chunk in chunks for segment in chunk.sources}
                found = _shape_of(await read_jobs(tx, ids))
        if not chunks:
            break
        rows = chunks[-1].first_item + chunks[-1].item_count
        position = chunks[-1].first_line + chunks[-1].line_count
        if found is not None:
            rows, position = bulk.ingested_items, bulk.ingested_lines
            break
    if found is None:
        message = f"bulk {bulk.id} has no hidden states; submit it with hidden_states"
        raise NotFoundError(message)
    return VectorSet(bulk.id, rows, *found)


class ShardFile:
    """One shard, in the form that ``tensor_files.serve_file`` serves."""

    def __init__(
        self, database: Database, blobs: BlobStore, vectors: VectorSet, number: int
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._vectors = vectors
        self._first_row = number * SHARD_ROWS
        rows = vectors.shard_rows(number)
        told = {"bulk": vectors.bulk_id, "first_row": str(self._first_row), "format": "pt"}
        size = rows * vectors.row_bytes
        self._header = render_header(
            HIDDEN_STATES, vectors.dtype, [rows, vectors.width], size, told
        )
        self._rows = rows
        self.size_bytes = len(self._header) + size

    async def pieces(self, begin: int, end: int) -> AsyncIterator[bytes]:
        """Yield the bytes ``begin`` to ``end`` of the file, some chunks at a time."""
        border, width = len(self._header), self._vectors.row_bytes
        if begin < border:
            yield self._header[begin : min(end, border)]
        if end <= border:
            return
        low, high = max(0, begin - border), end - border
        position = low // width * width
        async for data in self._read_rows(low // width, -(-high // width)):
            piece = data[max(0, low - position) : max(0, high - position)]
            position += len(data)
            if piece:
                yield piece

    async def digest(self, begin: int, end: int) -> bytes:
        """Return the SHA-256 of the bytes ``begin`` to ``end``."""
        sha256 = hashlib.sha256()
        async for piece in self.pieces(begin, end):
            await asyncio.to_thread(sha256.update, piece)
        return sha256.digest()

    async def _read_rows(self, begin: int, end: int) -> AsyncIterator[bytes]:
        """Yield whole rows of the shard, from ``begin`` up to ``end``."""
        row, stop = self._first_row + begin, self._first_row + end
        while row < stop:
            async with self._database.snapshot() as tx:
                chunks = await read_chunks(
                    tx, self._vectors.bulk_id, from_item=row, limit=_CHUNKS_A_PAGE
                )
            if not chunks:
                message = f"rows of bulk {self._vectors.bulk_id} are gone"
                raise NotFoundError(message)
            for chunk in chunks:
                last = min(stop, chunk.first_item + chunk.item_count)
                if last <= row:
                    continue
                data = await self._read_chunk(chunk)
                width = self._vectors.row_bytes
                offset = row - chunk.first_item
                yield data[offset * width : (last - chunk.first_item) * width]
                row = last
                if row >= stop:
                    return

    async def _read_chunk(self, chunk: Chunk) -> bytes:
        """Return all rows of a chunk; NaN where an item has none."""
        attempt = 0
        while True:
            attempt += 1
            async with self._database.snapshot() as tx:
                jobs = await read_jobs(tx, {segment.job_id for segment in chunk.sources})
            try:
                data = {job_id: await self._read_job(row) for job_id, row in jobs.items()}
            except NotFoundError:  # the blob moved: a neighbour was deleted
                if attempt == _ATTEMPTS:
                    raise
                continue
            return b"".join(
                self._cut(segment.count, segment.first, data.get(segment.job_id))
                for segment in chunk.sources
            )

    async def _read_job(self, row: JobRow) -> bytes | None:
        tensor = find_tensor(row, HIDDEN_STATES)
        if tensor is None or row.blob_key is None or row.state not in _SCORED:
            return None
        if (tensor.shape[-1], tensor.dtype) != (self._vectors.width, self._vectors.dtype):
            return None
        data = await self._blobs.get_range(row.blob_key, tensor.begin, tensor.end)
        failed = {error.index for error in parse_result(row).errors} if row.failed_count else set()
        return self._blank(data, failed) if failed else data

    def _cut(self, count: int, first: int, data: bytes | None) -> bytes:
        width = self._vectors.row_bytes
        if data is None:
            return _NAN[self._vectors.dtype] * (self._vectors.width * count)
        return data[first * width : (first + count) * width]

    def _blank(self, data: bytes, failed: set[int]) -> bytes:
        width, blank = self._vectors.row_bytes, _NAN[self._vectors.dtype] * self._vectors.width
        made = bytearray(data)
        for index in failed:
            made[index * width : (index + 1) * width] = blank
        return bytes(made)


def _shape_of(rows: Mapping[str, JobRow]) -> tuple[int, str] | None:
    for row in rows.values():
        tensor = find_tensor(row, HIDDEN_STATES)
        if tensor is not None and row.state in _SCORED:
            return int(tensor.shape[-1]), tensor.dtype
    return None
