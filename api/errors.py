"""The one place where an error becomes a status, headers and a body."""

import math
from collections.abc import Callable
from http import HTTPStatus

import msgspec
from aiohttp import web

from api.compatible.endpoints import PATHS
from api.compatible.forms import COHERE, OPENAI, TEI
from api.negotiation import JSON, PROBLEM
from contract.errors import RangeNotSatisfiableError, ScoreError
from contract.policies import render_policies
from contract.scores import ItemError, Problem
from contract.shapes import OpenAIError, OpenAIFault, TeiError

__all__ = [
    "FAMILY",
    "ForeignError",
    "ProblemDetails",
    "family_of",
    "render_error",
    "retry_header",
    "type_uri",
]

#: Whose form an error of the request takes, where its path alone does not say it.
FAMILY = web.RequestKey("family", str)
_OPENAI_PREFIXES = ("/v1/files", "/v1/batches")
#: TEI's words for what went wrong.
_TEI_TYPES = {429: "Overloaded", 503: "Unhealthy"}

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

_ERROR_RETRY_AFTER_S = 1.0
_RETRIED_BY_CLIENTS = frozenset({408, 409, 429})


class ProblemDetails(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """RFC 9457 problem details, the body of every error on our own routes."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    param: str | None = None
    request_id: str
    errors: list[ItemError] = []


class ForeignError(ScoreError):
    """A recorded error of a job, raised again as the answer of a route that waited for it."""

    def __init__(
        self, problem: Problem, *, location: str, errors: list[ItemError] | None = None
    ) -> None:
        super().__init__(problem.message, param=problem.param)
        self.problem = problem
        self.location = location
        self.errors = errors or []


class _Fault(msgspec.Struct, frozen=True):
    """What there is to say of any error, whatever form it takes."""

    status: int
    code: str
    title: str
    detail: str
    param: str | None = None
    retryable: bool = False
    retry_after_s: float | None = None
    errors: list[ItemError] = []


def type_uri(code: str) -> str:
    """Return the stable URI of an error code; docs/http_api.md describes each."""
    return f"urn:scorekeep:error:{code}"


def retry_header(seconds: float | None) -> str:
    """Return ``Retry-After`` in whole seconds, at least one."""
    return str(max(1, math.ceil(_ERROR_RETRY_AFTER_S if seconds is None else seconds)))


def render_error(request: web.Request, error: Exception, *, request_id: str) -> web.Response:
    """Return the answer to an error: status, headers, and a body in the family's form."""
    fault = _describe(error)
    render = _RENDERERS.get(request.get(FAMILY) or family_of(request.path), _render_problem)
    body, content_type = render(request, fault, request_id)
    response = web.Response(
        status=fault.status, body=msgspec.json.encode(body), content_type=content_type
    )
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    if fault.status in {429, 503} or (fault.retryable and fault.retry_after_s is not None):
        response.headers["Retry-After"] = retry_header(fault.retry_after_s)
    if not fault.retryable and (fault.status in _RETRIED_BY_CLIENTS or fault.status >= 500):
        response.headers["x-should-retry"] = "false"
    if isinstance(error, ScoreError) and error.policy is not None:
        response.headers.update(render_policies([error.policy]))
    if fault.status == 401:
        response.headers["WWW-Authenticate"] = 'Bearer realm="scorekeep"'
    if isinstance(error, ForeignError):
        response.headers["Location"] = error.location
    if isinstance(error, RangeNotSatisfiableError) and error.size_bytes is not None:
        response.headers["Content-Range"] = f"bytes */{error.size_bytes}"
    return response


def family_of(path: str) -> str:
    """Return whose form the errors under a path take; empty for our own."""
    if path.startswith(_OPENAI_PREFIXES):
        return OPENAI
    return PATHS[path].family if path in PATHS else ""


def _describe(error: Exception) -> _Fault:
    if isinstance(error, ForeignError):
        problem = error.problem
        status = problem.status if 400 <= problem.status <= 599 else 500
        return _Fault(
            status=status,
            code=problem.code,
            title=_title(status),
            detail=problem.message,
            param=problem.param,
            errors=error.errors,
        )
    if isinstance(error, ScoreError):
        return _Fault(
            status=error.http_status,
            code=error.code,
            title=_first_line(error),
            detail=error.message or _first_line(error),
            param=error.param,
            retryable=error.retryable,
            retry_after_s=error.retry_after_s,
        )
    if isinstance(error, web.HTTPException):
        return _describe_http(error)
    return _Fault(
        status=500,
        code="internal",
        title="An error of ours",
        detail="something went wrong here; the request id leads to it in our logs",
        retryable=True,
    )


def _describe_http(error: web.HTTPException) -> _Fault:
    title = _title(error.status)
    details: dict[int, tuple[str, str]] = {
        404: ("not_found", "there is no such route"),
        405: ("method_not_allowed", "the route does not take this method; see the Allow header"),
        408: ("request_timeout", "the body came too slowly"),
        413: ("too_large", "the body exceeds the limit"),
    }
    code, detail = details.get(error.status, ("bad_request", error.reason or title))
    return _Fault(status=error.status, code=code, title=title, detail=detail)


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _first_line(error: ScoreError) -> str:
    return (type(error).__doc__ or "").partition("\n")[0]


def _render_problem(
    request: web.Request, fault: _Fault, request_id: str
) -> tuple[ProblemDetails, str]:
    body = ProblemDetails(
        type=type_uri(fault.code),
        title=fault.title,
        status=fault.status,
        detail=fault.detail,
        instance=request.path,
        code=fault.code,
        param=fault.param,
        request_id=request_id,
        errors=fault.errors,
    )
    return body, PROBLEM


def _render_openai(
    _request: web.Request, fault: _Fault, request_id: str
) -> tuple[OpenAIError, str]:
    return OpenAIError(error=_openai_fault(fault, request_id)), JSON


def _openai_fault(fault: _Fault, request_id: str) -> OpenAIFault:
    kind = "invalid_request_error" if fault.status < 500 else "server_error"
    return OpenAIFault(
        message=fault.detail,
        type=_OPENAI_TYPES.get(fault.status, kind),
        param=fault.param,
        code=fault.code,
        request_id=request_id,
        errors=fault.errors,
    )


def _render_cohere(
    _request: web.Request, fault: _Fault, request_id: str
) -> tuple[OpenAIError, str]:
    """Write Cohere's ``id`` and ``message`` beside OpenAI's object."""
    error = _openai_fault(fault, request_id)
    return OpenAIError(error=error, id=request_id, message=fault.detail), JSON


def _render_tei(_request: web.Request, fault: _Fault, request_id: str) -> tuple[TeiError, str]:
    kind = "Validation" if fault.status < 500 else "Backend"
    body = TeiError(
        error=fault.detail,
        error_type=_TEI_TYPES.get(fault.status, kind),
        code=fault.code,
        param=fault.param,
        request_id=request_id,
        errors=fault.errors,
    )
    return body, JSON


_Renderer = Callable[[web.Request, _Fault, str], tuple[msgspec.Struct, str]]
_RENDERERS: dict[str, _Renderer] = {
    OPENAI: _render_openai,
    COHERE: _render_cohere,
    TEI: _render_tei,
}
