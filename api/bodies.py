"""Request bodies in, JSON out: the only place that reads a body or encodes an answer."""

import asyncio
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from api.limits import OWN_LIMITS
from api.negotiation import JSON, check_json_body
from api.pacing import Pace
from api.state import SETTINGS
from contract.errors import (
    InvalidRequestError,
    MalformedRequestError,
    TooLargeError,
    UnsupportedMediaTypeError,
)
from contract.scores import parse_in_slices, parse_json

__all__ = [
    "check_metadata",
    "check_plain_text",
    "is_large",
    "json_response",
    "parse_body",
    "parse_large_body",
    "read_body",
    "run_for",
]

_T = TypeVar("_T")
#: Bodies beyond this are worked on in a thread: the event loop has others to answer.
_LARGE_BYTES = 256 * 1024
#: zlib's window argument, by content coding.
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


async def read_body(request: web.Request, *, max_bytes: int) -> bytes:
    """Return the body, decompressed (gzip, deflate).

    Raises ``TooLargeError`` that names the limit (also for a body that only unpacks to more),
    ``MalformedRequestError`` for one that does not unpack, ``UnsupportedMediaTypeError`` for
    another coding.
    """
    if OWN_LIMITS in request:
        max_bytes = min(max_bytes, request[OWN_LIMITS].body_bytes or max_bytes)
    if (request.content_length or 0) > max_bytes:
        _refuse_size(max_bytes)
    try:
        body = await _receive(request, max_bytes)
    except (web.RequestPayloadError, HttpProcessingError) as error:
        message = f"the body cannot be read: {error}"
        raise MalformedRequestError(message) from error
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding == "identity":
        return body
    if coding not in _WINDOWS:
        message = f"the body may be coded as gzip or deflate, not {coding[:100]}"
        raise UnsupportedMediaTypeError(message, param="Content-Encoding")
    return await asyncio.to_thread(_decompress, body, _WINDOWS[coding], max_bytes)


def parse_body(request: web.Request, body: bytes, kind: type[_T]) -> _T:
    """Decode a JSON body as ``kind`` after a look at its declared type."""
    check_json_body(request.headers.get("Content-Type"), request.charset)
    return parse_json(body, kind)


async def parse_large_body(request: web.Request, body: bytes, kind: type[_T]) -> _T:
    """Do what ``parse_body`` does; a large body does not hold the event loop up."""
    check_json_body(request.headers.get("Content-Type"), request.charset)
    parse = parse_in_slices if is_large(body) else parse_json
    return await run_for(body, lambda: parse(body, kind))


def is_large(body: bytes) -> bool:
    """Tell whether work on ``body`` would hold the event loop up."""
    return len(body) > _LARGE_BYTES


async def run_for(body: bytes, work: Callable[[], _T]) -> _T:
    """Return what ``work`` on ``body`` returns; in a thread where the body is large."""
    return await asyncio.to_thread(work) if is_large(body) else work()


def json_response(
    value: Any,  # noqa: ANN401  # whatever msgspec encodes
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """Return ``value`` as JSON. Numbers in it are finite: msgspec has no NaN."""
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type=JSON, headers=headers
    )


def check_plain_text(text: str, param: str) -> str:
    """Return ``text``; raise ``InvalidRequestError`` for what SQL text cannot hold."""
    if "\x00" in text or any("\ud800" <= character <= "\udfff" for character in text):
        message = f"{param} holds a NUL or an unpaired surrogate"
        raise InvalidRequestError(message, param=param)
    return text


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise ``InvalidRequestError`` for keys or values that SQL text cannot hold."""
    for name, value in metadata.items():
        check_plain_text(name + value, "metadata")


async def _receive(request: web.Request, max_bytes: int) -> bytes:
    """Read to the end, at a pace, and no further than the limit."""
    pace, parts, size = Pace(request.app[SETTINGS].body_timeout_s), [], 0
    while data := await pace.keep(request.content.readany()):
        size += len(data)
        if size > max_bytes:
            _refuse_size(max_bytes)
        parts.append(data)
    return b"".join(parts)


def _decompress(body: bytes, window: int, max_bytes: int) -> bytes:
    """Unpack no more than one byte above the limit."""
    unpacker = zlib.decompressobj(window)
    try:
        unpacked = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        message = f"the body cannot be unpacked: {error}"
        raise MalformedRequestError(message) from error
    if len(unpacked) > max_bytes:
        _refuse_size(max_bytes)
    if not unpacker.eof:
        message = "the body cannot be unpacked: it ends too early"
        raise MalformedRequestError(message)
    return unpacked


def _refuse_size(max_bytes: int) -> NoReturn:
    message = f"the body exceeds the limit max_body_bytes of {max_bytes} bytes"
    raise TooLargeError(message)
