"""What every route that handles a job shares: find it, record it, wait for its end."""

import asyncio
import re
from collections.abc import Mapping

from aiohttp import web

from api.preferences import Preferences
from api.state import READS, SETTINGS, SUBMITTER, WAITERS, tenant_of
from api.submission import make_submission
from api.waiting import wait_for
from contract.errors import JobNotFoundError, StoreUnavailableError
from contract.jobs import TERMINAL, Lane
from contract.scores import CacheUse, ScoreRequest
from storage import jobs
from storage.jobs import JobRow

__all__ = ["applied", "await_end", "find_job", "find_job_at_end", "parse_job_id", "submit"]

_JOB_ID = re.compile(r"job_[0-9a-f]{32}")


def parse_job_id(request: web.Request, name: str = "id") -> str:
    """Return the id in the path. What cannot be an id of ours is not found, and not looked up."""
    job_id = request.match_info[name]
    if not _JOB_ID.fullmatch(job_id):
        message = f"there is no job {job_id[:100]!r}"
        raise JobNotFoundError(message)
    return job_id


async def find_job(request: web.Request) -> JobRow:
    """Return the job that the path names."""
    return await _read(request, parse_job_id(request))


async def find_job_at_end(request: web.Request, wait_s: float) -> JobRow:
    """Return the job that the path names as ``await_end`` does; it must be there to begin with."""
    job_id = parse_job_id(request)
    with request.app[WAITERS].watch(job_id) as event:
        return await _await(request, await _read(request, job_id), event, wait_s)


async def submit(
    request: web.Request,
    body: bytes,
    wanted: ScoreRequest,
    *,
    lane: Lane,
    metadata: Mapping[str, str] | None = None,
    cache: CacheUse = CacheUse.OFF,
) -> tuple[JobRow, dict[str, str]]:
    """Record the job that ``body`` asks for; return it with the headers about a replay."""
    submission = await make_submission(
        request, body, wanted, lane=lane, metadata=metadata, cache=cache
    )
    submitted = await request.app[SUBMITTER].submit(submission)
    headers = {"Idempotent-Replayed": "true"} if submitted.replayed else {}
    return submitted.row, headers


async def await_end(request: web.Request, row: JobRow, wait_s: float) -> JobRow:
    """Return the job at its end, or as it is after ``wait_s`` (at most ``max_wait_s``).

    The job is recorded: a store that goes away while we wait is no error, the job is then
    answered as it was last seen.
    """
    with request.app[WAITERS].watch(row.id) as event:
        try:
            row = await _read(request, row.id)
        except StoreUnavailableError:
            return row
        return await _await(request, row, event, wait_s)


def applied(request: web.Request, preferences: Preferences, *, waited: bool) -> dict[str, str]:
    """Return the ``Preference-Applied`` header, where one applies."""
    max_wait_s = request.app[SETTINGS].max_wait_s
    value = preferences.render_applied(waited=waited, max_wait_s=max_wait_s)
    return {} if value is None else {"Preference-Applied": value}


async def _await(request: web.Request, row: JobRow, event: asyncio.Event, wait_s: float) -> JobRow:
    """Hold nothing but the event while waiting: no connection, no transaction."""
    if row.state in TERMINAL:
        return row
    await wait_for(event, min(wait_s, request.app[SETTINGS].max_wait_s))
    try:
        return await _read(request, row.id)
    except StoreUnavailableError:
        return row


async def _read(request: web.Request, job_id: str) -> JobRow:
    tenant = tenant_of(request)
    return await request.app[READS].read(
        ("job", tenant, job_id), lambda tx: jobs.get_job(tx, tenant, job_id)
    )
