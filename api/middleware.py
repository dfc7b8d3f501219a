"""What every request passes through: its id, security headers, and errors made into answers."""

import logging
import re
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

from api.errors import render_error
from api.limits import POLICIES
from contract.errors import ScoreError
from contract.policies import render_policies

__all__ = ["REQUEST_ID", "errors_middleware", "prepare_headers", "request_id_middleware"]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)
_GIVEN_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}")

#: Nothing of ours is to be framed, guessed at, kept by proxies, or to load anything. A page of
#: our own says what it loads.
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

#: The request's id: the client's ``X-Request-Id`` where it is a plain word, else ours.
REQUEST_ID = web.RequestKey("request_id", str)
#: The answer that is under way: its head may be at the client.
_STARTED = web.RequestKey("started", web.StreamResponse)


@web.middleware
async def request_id_middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Give the request its id before anything else sees it."""
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if _GIVEN_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
    return await handler(request)


async def prepare_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add what every answer carries (a signal handler, so that streams get it too)."""
    request[_STARTED] = response
    if REQUEST_ID in request:
        response.headers.setdefault("X-Request-Id", request[REQUEST_ID])
    if POLICIES in request and "RateLimit" not in response.headers:
        response.headers.update(render_policies(request[POLICIES]))
    response.headers["Server"] = "scorekeep"
    for name, value in _SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)


@web.middleware
async def errors_middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Turn every error into an answer in the form of the route's family.

    An error after an answer began cuts the connection: a second answer would lie in the first.
    """
    try:
        return await handler(request)
    except Exception as error:  # the edge: the client is waiting for an answer
        if _STARTED in request:
            return _cut_off(request, request[_STARTED], error)
        if not isinstance(error, ScoreError | web.HTTPException):
            _log.exception("request failed", extra=_describe(request, "request_failed"))
            if request.transport is None or request.transport.is_closing():
                raise
        return render_error(request, error, request_id=request[REQUEST_ID])


def _cut_off(
    request: web.Request, response: web.StreamResponse, error: Exception
) -> web.StreamResponse:
    """End the connection so that the reader sees that the answer is not whole."""
    if not isinstance(error, ConnectionError):  # those are readers who left
        _log.error("answer cut off", exc_info=error, extra=_describe(request, "answer_cut_off"))
    if request.transport is not None:
        request.transport.abort()
    return response


def _describe(request: web.Request, action: str) -> dict[str, str]:
    return {
        "action": action,
        "method": request.method,
        "route": request.path,
        "request_id": request[REQUEST_ID],
    }
