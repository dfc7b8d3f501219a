"""One tensor served as a safetensors file: a fresh header, and the blob's bytes behind it.

Nothing here holds a whole large file: digests and answers go through it in pieces.
"""

import asyncio
import base64
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
from aiohttp import web

from api.negotiation import SAFETENSORS
from api.ranges import is_match, select_range
from contract.errors import GoneError, NotFoundError
from storage.blobs import BlobStore

__all__ = ["DigestCache", "Place", "ServedFile", "TensorFile", "render_header", "serve_file"]

_PIECE_BYTES = 4 * 1024 * 1024
_HEADER_ALIGNMENT = 8
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes begin: deleting a neighbour moves them, and changes none of them."""

    key: str
    begin: int


class ServedFile(Protocol):
    """A file whose bytes are made as they are asked for; its size is known before."""

    size_bytes: int

    def pieces(self, begin: int, end: int) -> AsyncIterator[bytes]:
        """Yield the bytes ``begin`` to ``end``."""
        ...

    async def digest(self, begin: int, end: int) -> bytes:
        """Return the SHA-256 of the bytes ``begin`` to ``end``."""
        ...


class TensorFile:
    """A safetensors file: ``header``, then ``tensor_bytes`` of the blob at ``place``.

    ``locate`` tells the place anew once the blob is gone, also in the middle of a file. It raises
    ``NotFoundError`` or ``GoneError`` where the job is gone too.
    """

    def __init__(
        self,
        blobs: BlobStore,
        place: Place,
        tensor_bytes: int,
        *,
        header: bytes,
        locate: Callable[[], Awaitable[Place]],
    ) -> None:
        self._blobs = blobs
        self._place = place
        self._header = header
        self._locate = locate
        self.size_bytes = len(header) + tensor_bytes

    async def pieces(self, begin: int, end: int) -> AsyncIterator[bytes]:
        """Yield the bytes ``begin`` to ``end`` of the file."""
        border = len(self._header)
        if begin < border:
            yield self._header[begin : min(end, border)]
        position = max(begin, border)
        while position < end:
            stop = min(end, position + _PIECE_BYTES)
            yield await self._read(position - border, stop - border)
            position = stop

    async def digest(self, begin: int, end: int) -> bytes:
        """Return the SHA-256 of the bytes ``begin`` to ``end``."""
        sha256 = hashlib.sha256()
        async for piece in self.pieces(begin, end):
            await asyncio.to_thread(sha256.update, piece)
        return sha256.digest()

    async def _read(self, begin: int, end: int) -> bytes:
        """Return bytes of the tensor, wherever they lie by now."""
        for _ in range(_ATTEMPTS):
            key, shift = self._place.key, self._place.begin
            try:
                return await self._blobs.get_range(key, begin + shift, end + shift)
            except NotFoundError:
                self._place = await self._locate()
        message = "the tensor's bytes are gone from the blob store"
        raise GoneError(message)


class DigestCache:
    """The digests of files that cannot change any more, the latest ``size`` of them."""

    def __init__(self, *, size: int = 4096) -> None:
        self._size = size
        self._digests: OrderedDict[object, bytes] = OrderedDict()

    async def digest_of(self, identity: object, file: ServedFile) -> bytes:
        """Return the SHA-256 of the whole file that ``identity`` names."""
        if identity in self._digests:
            self._digests.move_to_end(identity)
            return self._digests[identity]
        digest = await file.digest(0, file.size_bytes)
        self._digests[identity] = digest
        if len(self._digests) > self._size:
            self._digests.popitem(last=False)
        return digest


def render_header(
    name: str, dtype: str, shape: list[int], size_bytes: int, metadata: Mapping[str, str]
) -> bytes:
    """Return a safetensors header for one tensor: its length, then JSON padded with spaces."""
    table = {
        "__metadata__": dict(metadata),
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, size_bytes]},
    }
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


async def serve_file(
    request: web.Request, file: ServedFile, digest: bytes, *, name: str
) -> web.StreamResponse:
    """Answer with the file or the part that ``Range`` asks for. ``ETag`` is the SHA-256 in hex."""
    etag = f'"{digest.hex()}"'
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Repr-Digest": _render_digest(digest),
        "Vary": "Accept",
    }
    if is_match(request.headers.get("If-None-Match"), etag):
        return web.Response(status=304, headers=headers)
    part = select_range(
        request.headers.get("Range"),
        request.headers.get("If-Range"),
        etag=etag,
        size_bytes=file.size_bytes,
    )
    begin, end = 0, file.size_bytes
    if part is not None:
        begin, end = part.begin, part.end
        headers["Content-Range"] = part.render()
    content_digest = digest if part is None else await file.digest(begin, end)
    headers["Content-Digest"] = _render_digest(content_digest)
    headers["Content-Disposition"] = f'attachment; filename="{name}"'
    response = web.StreamResponse(status=200 if part is None else 206, headers=headers)
    response.content_type = SAFETENSORS
    response.content_length = end - begin
    return await _stream(request, response, file, begin, end)


async def _stream(
    request: web.Request, response: web.StreamResponse, file: ServedFile, begin: int, end: int
) -> web.StreamResponse:
    if request.method == "HEAD":
        await response.prepare(request)
        return response
    pieces = aiter(file.pieces(begin, end))
    first = await anext(pieces)  # a blob that is gone is answered as an error, not cut off
    await response.prepare(request)
    await response.write(first)
    async for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response


def _render_digest(digest: bytes) -> str:
    return f"sha-256=:{base64.b64encode(digest).decode()}:"
