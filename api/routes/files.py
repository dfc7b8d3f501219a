"""``/v1/files``: upload, look, list, read, delete, as OpenAI's clients do. Bytes are streamed."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from api.bodies import check_plain_text, json_response
from api.bulk.file_store import FileWriter, read_pieces
from api.limits import GATE, refuse_bytes
from api.pacing import Pace
from api.pages import parse_limit
from api.state import BLOBS, DATABASE, SETTINGS, tenant_of
from contract.bulks import LONGEST_FILE_S
from contract.errors import InvalidRequestError, MalformedRequestError, NotFoundError
from storage import files
from storage.files import FileRow

__all__ = ["add_routes"]

_FILE_ID = re.compile(r"fil_[0-9a-f]{32}")
_PURPOSES = frozenset({"batch"})
_FIELD_BYTES = 1024
_READ_BYTES = 256 * 1024


def add_routes(app: web.Application) -> None:
    """Add the routes of files to the application."""
    app.router.add_post("/v1/files", post_file)
    app.router.add_get("/v1/files", get_files)
    app.router.add_get("/v1/files/{id}", get_file)
    app.router.add_get("/v1/files/{id}/content", get_content)
    app.router.add_delete("/v1/files/{id}", delete_file)


async def post_file(request: web.Request) -> web.StreamResponse:
    """Take a file, part by part, into the blob store."""
    if not request.content_type.startswith("multipart/"):
        message = "the body must be multipart/form-data with the fields purpose and file"
        raise InvalidRequestError(message, param="Content-Type")
    fields: dict[str, str] = {}
    writers: list[FileWriter] = []
    try:
        await _read_form(request, fields, writers)
        purpose, expires_after_s = _parse_purpose(fields), _parse_expiry(fields)
    except BaseException:
        if writers:  # refused, or the client left: nobody would count these bytes
            await asyncio.shield(writers[0].abort())
        raise
    row = await writers[0].finish(purpose=purpose, expires_after_s=expires_after_s)
    request.app[GATE].forget_bytes(tenant_of(request))
    return json_response(render_file(row))


async def get_file(request: web.Request) -> web.StreamResponse:
    """Show a file."""
    return json_response(render_file(await _find(request)))


async def get_files(request: web.Request) -> web.StreamResponse:
    """List files, newest first; ``after`` is the last id of the page before."""
    limit = parse_limit(request.query.get("limit"))
    after, purpose = request.query.get("after"), request.query.get("purpose")
    check_plain_text(purpose or "", "purpose")
    if after is not None:
        after = _parse_id(after)
    async with request.app[DATABASE].snapshot() as tx:
        rows = await files.list_files(
            tx, tenant_of(request), purpose=purpose, after=after, limit=limit + 1
        )
    page = [render_file(row) for row in rows[:limit]]
    return json_response(render_list(page, has_more=len(rows) > limit))


async def get_content(request: web.Request) -> web.StreamResponse:
    """Stream a file's bytes."""
    row = await _find(request)
    response = web.StreamResponse()
    response.content_type = "application/octet-stream"
    response.content_length = row.size_bytes
    pieces = read_pieces(request.app[BLOBS], row)
    first = await anext(pieces, b"")  # a part that is gone is answered as an error
    await response.prepare(request)
    await response.write(first)
    async for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response


async def delete_file(request: web.Request) -> web.StreamResponse:
    """Delete a file; its bytes go soon after."""
    file_id = (await _find(request)).id
    async with request.app[DATABASE].transaction() as tx:
        await files.delete_file(tx, tenant_of(request), file_id)
    request.app[GATE].forget_bytes(tenant_of(request))
    return json_response({"id": file_id, "object": "file", "deleted": True})


def render_file(row: FileRow) -> dict[str, Any]:
    """Return the file as OpenAI's clients read it."""
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.size_bytes,
        "created_at": int(row.created_at),
        "expires_at": None if row.expires_at is None else int(row.expires_at),
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed",
    }


def render_list(page: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a page as OpenAI's clients read it."""
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }


async def _find(request: web.Request) -> FileRow:
    file_id = _parse_id(request.match_info["id"])
    async with request.app[DATABASE].snapshot() as tx:
        return await files.get_file(tx, tenant_of(request), file_id)


def _parse_id(text: str) -> str:
    """Return an id of ours. What cannot be one is not found, and not looked up."""
    if not _FILE_ID.fullmatch(text):
        message = f"there is no file {text[:100]!r}"
        raise NotFoundError(message)
    return text


async def _parts(request: web.Request) -> AsyncIterator[BodyPartReader]:
    reader = await request.multipart()
    while (part := await reader.next()) is not None:
        if isinstance(part, BodyPartReader):
            yield part


async def _read_form(
    request: web.Request, fields: dict[str, str], writers: list[FileWriter]
) -> None:
    """Read every part; the file's writer is in ``writers`` from its last byte on."""
    try:
        async for part in _parts(request):
            if part.name == "file":
                if writers:
                    message = "there is more than one field named file"
                    raise InvalidRequestError(message, param="file")
                writers.append(await _receive(request, part))
            elif part.name is not None:
                fields[part.name] = await _read_field(part)
    except (ValueError, AssertionError, HttpProcessingError) as error:
        message = f"the multipart body cannot be read: {error}"
        raise MalformedRequestError(message) from error
    if not writers:
        message = "there is no field named file"
        raise InvalidRequestError(message, param="file")


async def _receive(request: web.Request, part: BodyPartReader) -> FileWriter:
    filename = check_plain_text((part.filename or "upload")[:255], "file")
    free_bytes = await request.app[GATE].free_bytes(tenant_of(request))
    writer = await FileWriter.start(
        request.app[DATABASE],
        request.app[BLOBS],
        tenant_of(request),
        filename=filename,
        purpose="",
        max_bytes=request.app[SETTINGS].max_file_bytes,
    )
    pace = Pace(request.app[SETTINGS].body_timeout_s)
    try:
        while data := await pace.keep(part.read_chunk(_READ_BYTES)):
            await writer.write(bytes(data))
            if free_bytes is not None and writer.size_bytes > free_bytes:
                refuse_bytes(free_bytes)
    except BaseException:
        await asyncio.shield(writer.abort())
        raise
    return writer


async def _read_field(part: BodyPartReader) -> str:
    data = bytearray()
    while chunk := await part.read_chunk(_READ_BYTES):
        data += chunk
        if len(data) > _FIELD_BYTES:
            message = f"the field {str(part.name)[:100]!r} is too long"
            raise InvalidRequestError(message, param=str(part.name)[:100])
    return bytes(data).decode(errors="replace")


def _parse_purpose(fields: dict[str, str]) -> str:
    purpose = fields.get("purpose", "")
    if purpose not in _PURPOSES:
        message = f"purpose must be batch, not {purpose[:100]!r}"
        raise InvalidRequestError(message, param="purpose")
    return purpose


def _parse_expiry(fields: dict[str, str]) -> float | None:
    text = fields.get("expires_after[seconds]")
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 0 < int(text) <= LONGEST_FILE_S:
        message = "expires_after[seconds] is a whole number of seconds, up to a year"
        raise InvalidRequestError(message, param="expires_after")
    return float(text)
