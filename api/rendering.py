"""Rows made into what clients see: jobs, scores, and how long to wait before asking again."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from api.bodies import json_response
from api.errors import retry_header
from api.state import SETTINGS
from contract.jobs import RETRYABLE, TERMINAL, JobState
from contract.moments import render_moment
from contract.results import StoredResult
from contract.scores import AttemptEnd, Job, JobCounts, Problem, Usage
from storage.attempts import AttemptRow
from storage.jobs import JobRow
from storage.refs import TensorRef

__all__ = [
    "HIDDEN_STATES",
    "find_tensor",
    "job_response",
    "job_url",
    "parse_result",
    "pending_headers",
    "recorded_error",
    "recorded_usage",
    "render_job",
]

#: The tensor of a job's pooled hidden states.
HIDDEN_STATES = "hidden_states"
_LONGEST_RETRY_S = 30.0


def parse_result(row: JobRow) -> StoredResult:
    """Return the recorded result of a job, empty where there is none."""
    if row.result is None:
        return StoredResult()
    return msgspec.json.decode(row.result, type=StoredResult)


def find_tensor(row: JobRow, name: str) -> TensorRef | None:
    """Return where the job's tensor of that name lies in its blob; None where it has none."""
    return next((tensor for tensor in row.tensors if tensor.name == name), None)


def recorded_error(row: JobRow) -> Problem | None:
    """Return why the job as a whole has no scores."""
    return None if row.error is None else msgspec.json.decode(row.error, type=Problem)


def recorded_usage(row: JobRow) -> Usage | None:
    """Return the job's token counts."""
    return None if row.usage is None else msgspec.json.decode(row.usage, type=Usage)


def job_url(request: web.Request, job_id: str) -> str:
    """Return the job's URL: absolute where ``public_url`` is set."""
    return f"{request.app[SETTINGS].public_url.rstrip('/')}/v1/jobs/{job_id}"


def render_job(
    request: web.Request,
    row: JobRow,
    *,
    receipt: dict[str, Any] | None = None,
    history: Sequence[AttemptRow] = (),
) -> Job:
    """Return the job as clients see it."""
    url = job_url(request, row.id)
    links = {"self": url, "events": f"{url}/events"}
    if row.state not in TERMINAL:
        links["cancel"] = f"{url}/cancel"
    elif row.state in {JobState.SUCCEEDED, JobState.PARTIAL}:
        links["scores"] = f"{url}/scores"
        if find_tensor(row, HIDDEN_STATES):
            links["hidden_states"] = f"{url}/hidden_states"
    if row.state in RETRYABLE:
        links["retry"] = f"{url}/retry"
    return Job(
        id=row.id,
        state=row.state,
        model=row.model,
        priority=row.lane,
        counts=JobCounts(total=row.item_count, succeeded=row.scored_count, failed=row.failed_count),
        attempt=row.attempt,
        bulk=row.bulk_id,
        created_at=render_moment(row.created_at),
        started_at=_moment(row.started_at),
        finished_at=_moment(row.finished_at),
        expires_at=_moment(row.expires_at),
        cancel_requested_at=_moment(row.cancel_requested_at),
        metadata=row.metadata,
        usage=recorded_usage(row),
        error=recorded_error(row),
        history=[_render_attempt(ended) for ended in history],
        warnings=parse_result(row).warnings,
        receipt=receipt,
        links=links,
    )


def pending_headers(request: web.Request, row: JobRow) -> dict[str, str]:
    """Return ``Location``, and ``Retry-After`` until the job has ended."""
    headers = {"Location": job_url(request, row.id)}
    if row.state not in TERMINAL:
        headers["Retry-After"] = retry_header(_retry_after_s(row))
    return headers


def job_response(
    request: web.Request, row: JobRow, *, status: int, headers: dict[str, str] | None = None
) -> web.Response:
    """Answer with the job, where it is and when to ask again."""
    return json_response(
        render_job(request, row),
        status=status,
        headers={**pending_headers(request, row), **(headers or {})},
    )


def _retry_after_s(row: JobRow) -> float:
    """Ask again soon after the start, less often of a job that takes long."""
    return min(_LONGEST_RETRY_S, max(1.0, math.sqrt(row.item_count) / 10))


def _render_attempt(row: AttemptRow) -> AttemptEnd:
    return AttemptEnd(
        attempt=row.attempt,
        outcome=row.outcome,
        ended_at=render_moment(row.ended_at),
        started_at=_moment(row.started_at),
        worker=row.worker,
        error=None if row.error is None else msgspec.json.decode(row.error, type=Problem),
    )


def _moment(seconds: float | None) -> str | None:
    return None if seconds is None else render_moment(seconds)
