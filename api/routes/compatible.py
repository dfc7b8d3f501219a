"""Scoring as other services answer it: SGLang's, vLLM's, Cohere's, Jina's and TEI's routes.

Each waits for the scores; what is late becomes a 202 with the job, which any of them is.
"""

import msgspec
from aiohttp import web

from api.bodies import json_response, read_body, run_for
from api.compatible.endpoints import PATHS, find_endpoint
from api.compatible.forms import Answered, Endpoint, Parsed
from api.errors import FAMILY, ForeignError
from api.job_access import applied, await_end, submit
from api.negotiation import check_json_body
from api.preferences import Preferences, parse_preferences
from api.rendering import (
    HIDDEN_STATES,
    find_tensor,
    job_response,
    job_url,
    parse_result,
    pending_headers,
    recorded_error,
    recorded_usage,
)
from api.results import read_hidden_rows, read_scores
from api.state import SETTINGS
from contract.errors import InputTooLongError, InvalidRequestError
from contract.jobs import TERMINAL, JobState, Lane
from contract.results import StoredResult
from contract.scores import CacheUse, Problem, ScoreRequest, Usage
from storage.jobs import JobRow

__all__ = ["add_routes"]

_STATUS_OF_STATE = {JobState.CANCELLED: 409, JobState.EXPIRED: 504, JobState.FAILED: 500}


def add_routes(app: web.Application) -> None:
    """Add the compatible routes to the application."""
    for path in PATHS:
        app.router.add_post(path, post_compatible)


async def post_compatible(request: web.Request) -> web.StreamResponse:
    """Score now: 200 with the family's answer, or 202 with the job where it takes longer."""
    preferences = parse_preferences(request.headers.getall("Prefer", []))
    request[FAMILY] = PATHS[request.path].family
    body = await read_body(request, max_bytes=request.app[SETTINGS].max_body_bytes)
    check_json_body(request.headers.get("Content-Type"), request.charset)
    endpoint = await run_for(body, lambda: find_endpoint(request.path, body))
    request[FAMILY] = endpoint.family
    parsed = await run_for(body, lambda: endpoint.parse(body))
    wanted = _name_model(request, parsed.request)
    wait_s = _wait_of(request, preferences)
    row, headers = await submit(
        request,
        body,
        wanted,
        lane=parsed.lane or (Lane.INTERACTIVE if wait_s else Lane.NORMAL),
        metadata=parsed.metadata,
        cache=_cache_of(request),
    )
    if wait_s:
        row = await await_end(request, row, wait_s)
    if not wait_s or row.state not in TERMINAL:
        headers |= applied(request, preferences, waited=False)
        return job_response(request, row, status=202, headers=headers)
    headers |= applied(request, preferences, waited=True)
    answer = endpoint.render(await _read(request, row, endpoint, parsed))
    return json_response(answer, headers={**pending_headers(request, row), **headers})


def _name_model(request: web.Request, wanted: ScoreRequest) -> ScoreRequest:
    """Return the request with the model of ``?model=``, for clients whose bodies name none."""
    for name in request.query:
        if name not in {"model", "cache"}:
            message = f"there is no parameter {name[:100]!r}; there are model and cache"
            raise InvalidRequestError(message, param=name[:100])
    named = request.query.get("model")
    if wanted.model is not None or named is None:
        return wanted
    return msgspec.structs.replace(wanted, model=named)


def _cache_of(request: web.Request) -> CacheUse:
    """Return what ``?cache=`` says, for clients whose bodies have no place for it."""
    given = request.query.get("cache", CacheUse.OFF.value)
    if given not in {each.value for each in CacheUse}:
        message = f"cache is one of {', '.join(CacheUse)}, not {given[:100]!r}"
        raise InvalidRequestError(message, param="cache")
    return CacheUse(given)


def _wait_of(request: web.Request, preferences: Preferences) -> float:
    if preferences.respond_async:
        return 0.0
    if preferences.wait_s is not None:
        return float(preferences.wait_s)
    return request.app[SETTINGS].default_wait_s


async def _read(request: web.Request, row: JobRow, endpoint: Endpoint, parsed: Parsed) -> Answered:
    """Return what was scored. Raises ``ForeignError`` for a job that ended without scores."""
    result = parse_result(row)
    if row.state not in {JobState.SUCCEEDED, JobState.PARTIAL}:
        problem = recorded_error(row) or Problem(
            code=row.state.value,
            message=f"the job ended as {row.state.value}",
            status=_STATUS_OF_STATE[row.state],
        )
        raise ForeignError(problem, errors=result.errors, location=job_url(request, row.id))
    if endpoint.whole:
        _refuse_failures(request, row, result)
    scores = await read_scores(request, row)
    hidden = None
    if find_tensor(row, HIDDEN_STATES):
        hidden = await read_hidden_rows(request, row)
    return Answered(
        id=row.id,
        model=row.model,
        labels=result.labels,
        scores=scores.scores,
        errors=result.errors,
        created=int(row.created_at),
        form=parsed.form,
        usage=recorded_usage(row) or Usage(),
        texts=[item for item in parsed.request.item_list if isinstance(item, str)],
        hidden=hidden,
        token_logprobs=scores.token_logprobs,
        warnings=result.warnings,
    )


def _refuse_failures(request: web.Request, row: JobRow, result: StoredResult) -> None:
    """Raise the first failed item's error: the answer has no place for it."""
    if not result.errors:
        return
    first = result.errors[0]
    status = 422 if first.code == InputTooLongError.code else 500
    problem = Problem(
        code=first.code,
        message=f"item {first.index}: {first.message}; job {row.id} keeps the others' scores",
        status=status,
    )
    raise ForeignError(problem, errors=result.errors, location=job_url(request, row.id))
