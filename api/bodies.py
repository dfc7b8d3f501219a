"""Request bodies in, JSON out: the only place that reads a body or encodes an answer."""

import asyncio
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from api.negotiation import JSON, check_json_body
from contract.errors import (
    InvalidRequestError,
    MalformedRequestError,
    TooLargeError,
    UnsupportedMediaTypeError,
)
from contract.scores import parse_json

__all__ = ["check_plain_text", "json_response", "parse_body", "read_body"]

_T = TypeVar("_T")
_BODY_TIMEOUT_S = 120.0
#: zlib's window argument, by content coding.
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


async def read_body(request: web.Request, *, max_bytes: int) -> bytes:
    """Return the body, decompressed (gzip, deflate).

    Raises ``TooLargeError`` that names the limit (also for a body that only unpacks to more),
    ``MalformedRequestError`` for one that does not unpack, ``UnsupportedMediaTypeError`` for
    another coding.
    """
    if (request.content_length or 0) > max_bytes:
        _refuse_size(max_bytes)
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        _refuse_size(max_bytes)
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error
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
