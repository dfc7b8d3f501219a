"""``POST /v1/score``: SGLang's Score API. Waits for the scores; what is late becomes a 202."""

from aiohttp import web

from api.bodies import json_response, parse_large_body, read_body
from api.errors import ForeignError
from api.job_access import applied, await_end, submit
from api.preferences import Preferences, parse_preferences
from api.rendering import (
    HIDDEN_STATES,
    find_tensor,
    job_response,
    parse_result,
    pending_headers,
    recorded_error,
    recorded_usage,
)
from api.results import read_hidden_rows, read_scores
from api.state import SETTINGS
from contract.jobs import TERMINAL, JobState, Lane
from contract.scores import Problem, ScoreRequest, ScoreResponse, Usage
from storage.jobs import JobRow

__all__ = ["add_routes"]

_STATUS_OF_STATE = {JobState.CANCELLED: 409, JobState.EXPIRED: 504, JobState.FAILED: 500}


def add_routes(app: web.Application) -> None:
    """Add the SGLang-compatible route to the application."""
    app.router.add_post("/v1/score", post_score)


async def post_score(request: web.Request) -> web.StreamResponse:
    """Score now: 200 with SGLang's answer, or 202 with the job where it takes longer."""
    preferences = parse_preferences(request.headers.getall("Prefer", []))
    body = await read_body(request, max_bytes=request.app[SETTINGS].max_body_bytes)
    wanted = await parse_large_body(request, body, ScoreRequest)
    wait_s = _wait_of(request, preferences)
    row, headers = await submit(
        request, body, wanted, lane=Lane.INTERACTIVE if wait_s else Lane.NORMAL
    )
    if wait_s:
        row = await await_end(request, row, wait_s)
    if not wait_s or row.state not in TERMINAL:
        headers |= applied(preferences, waited=False)
        return job_response(request, row, status=202, headers=headers)
    headers |= applied(preferences, waited=True)
    answer = await _render(request, row)
    return json_response(answer, headers={**pending_headers(request, row), **headers})


def _wait_of(request: web.Request, preferences: Preferences) -> float:
    if preferences.respond_async:
        return 0.0
    if preferences.wait_s is not None:
        return float(preferences.wait_s)
    return request.app[SETTINGS].default_wait_s


async def _render(request: web.Request, row: JobRow) -> ScoreResponse:
    """Return SGLang's answer. Raises ``ForeignError`` for a job that ended without scores."""
    result = parse_result(row)
    if row.state not in {JobState.SUCCEEDED, JobState.PARTIAL}:
        problem = recorded_error(row) or Problem(
            code=row.state.value,
            message=f"the job ended as {row.state.value}",
            status=_STATUS_OF_STATE[row.state],
        )
        raise ForeignError(problem, errors=result.errors)
    scores = await read_scores(request, row)
    hidden = None
    if find_tensor(row, HIDDEN_STATES):
        hidden = await read_hidden_rows(request, row)
    return ScoreResponse(
        scores=scores.scores,
        model=row.model,
        usage=recorded_usage(row) or Usage(),
        pooled_hidden_states=hidden,
        token_logprobs=scores.token_logprobs,
        errors=result.errors,
        warnings=result.warnings,
    )
