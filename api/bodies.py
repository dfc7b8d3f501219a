"""Request bodies in, JSON out: the only place that reads a body or encodes an answer."""

import asyncio
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from api.negotiation import JSON, check_json_body
from contract.errors import InvalidRequestError, MalformedRequestError, TooLargeError
from contract.scores import parse_json

__all__ = ["check_plain_text", "json_response", "parse_body", "read_body"]

_T = TypeVar("_T")
_BODY_TIMEOUT_S = 120.0


async def read_body(request: web.Request, *, max_bytes: int) -> bytes:
    """Return the body, decompressed.

    Raises ``TooLargeError`` that names the limit (also for a body that only unpacks to more), and
    ``MalformedRequestError`` for one that does not unpack.
    """
    if (request.content_length or 0) > max_bytes:
        _refuse_size(max_bytes)
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        _refuse_size(max_bytes)
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error
    except (web.RequestPayloadError, HttpProcessingError) as error:
        message = f"the body cannot be read: {error}"
        raise MalformedRequestError(message) from error


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


def _refuse_size(max_bytes: int) -> NoReturn:
    message = f"the body exceeds the limit max_body_bytes of {max_bytes} bytes"
    raise TooLargeError(message)
