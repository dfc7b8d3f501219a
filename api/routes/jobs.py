"""``/v1/jobs``: submit, look, wait, list, cancel, delete."""

import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from api.bodies import check_plain_text, parse_large_body, read_body
from api.bulk.access import parse_bulk_id
from api.idempotency import IdempotencyKey, is_known
from api.job_access import (
    applied,
    await_end,
    find_job,
    find_job_at_end,
    parse_job_id,
    submit,
)
from api.limits import GATE
from api.negotiation import JSON
from api.pages import answer_page, parse_cursor, parse_limit
from api.preferences import parse_preferences
from api.ranges import is_match
from api.rendering import job_response, pending_headers, render_job
from api.replays import act_once, read_key
from api.state import BLOBS, DATABASE, QUEUE, READS, SETTINGS, WAITERS, tenant_of
from contract.errors import GoneError, InvalidRequestError, NoCapacityError, OverloadedError
from contract.jobs import TERMINAL, JobState, Lane
from contract.scores import JobRequest
from storage import attempts, forgetting, jobs, outcomes, receipts
from storage.database import Transaction
from storage.jobs import JobRow
from storage.refs import BlobRef

__all__ = ["add_routes"]

_CODE = re.compile(r"[a-z_]{1,64}")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def add_routes(app: web.Application) -> None:
    """Add the routes of jobs to the application."""
    app.router.add_post("/v1/jobs", post_job)
    app.router.add_get("/v1/jobs", get_jobs)
    app.router.add_get("/v1/jobs/{id}", get_job)
    app.router.add_get("/v1/jobs/{id}/request", get_request)
    app.router.add_post("/v1/jobs/{id}/cancel", post_cancel)
    app.router.add_post("/v1/jobs/{id}/retry", post_retry)
    app.router.add_delete("/v1/jobs/{id}", delete_job)


async def post_job(request: web.Request) -> web.StreamResponse:
    """Record a job; wait for its end only where ``Prefer: wait`` says so."""
    preferences = parse_preferences(request.headers.getall("Prefer", []))
    body = await read_body(request, max_bytes=request.app[SETTINGS].max_body_bytes)
    wanted = await parse_large_body(request, body, JobRequest)
    row, headers = await submit(request, body, wanted, lane=Lane.NORMAL)
    if preferences.wait_s and not preferences.respond_async:
        row = await await_end(request, row, float(preferences.wait_s))
    ended = row.state in TERMINAL and not preferences.respond_async and bool(preferences.wait_s)
    return job_response(
        request,
        row,
        status=200 if ended else 202,
        headers={**headers, **applied(request, preferences, waited=ended)},
    )


async def get_job(request: web.Request) -> web.StreamResponse:
    """Show a job; ``?wait=N`` answers at its end or after N seconds."""
    wait_s = _parse_wait(request.query.get("wait"))
    row = await (find_job_at_end(request, wait_s) if wait_s else find_job(request))
    raw, history = await _read_beside(request, row)
    receipt = None if raw is None else msgspec.json.decode(raw)
    body = msgspec.json.encode(render_job(request, row, receipt=receipt, history=history))
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**pending_headers(request, row), "ETag": etag, "Cache-Control": "private, no-cache"}
    headers.pop("Location")
    if is_match(request.headers.get("If-None-Match"), etag):
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, content_type=JSON, headers=headers)


async def _read_beside(
    request: web.Request, row: JobRow
) -> tuple[bytes | None, list[attempts.AttemptRow]]:
    """Return the receipt, and the attempts that ended before the job did."""
    was_tried_before = row.attempt > 1 or row.crash_count > 0 or row.error_count > 0
    if row.receipt_hash is None and not was_tried_before:
        return None, []

    async def look(tx: Transaction) -> tuple[bytes | None, list[attempts.AttemptRow]]:
        raw = None
        if row.receipt_hash is not None:
            raw = await receipts.get_receipt(tx, row.receipt_hash)
        return raw, await attempts.list_attempts(tx, row.id) if was_tried_before else []

    return await request.app[READS].read(("beside", row.tenant, row.id, row.version), look)


async def get_request(request: web.Request) -> web.StreamResponse:
    """Show what was asked: query, items and parameters, as they were recorded."""
    job_id = parse_job_id(request)
    async with request.app[DATABASE].snapshot() as tx:
        body = await jobs.read_request(tx, tenant_of(request), job_id)
    return web.Response(body=body, content_type=JSON)


async def get_jobs(request: web.Request) -> web.StreamResponse:
    """List jobs, newest first, one page at a time."""
    query = request.query
    metadata = _parse_metadata(list(query.items()))
    state, model = _parse_state(query.get("state")), query.get("model")
    error_code = _parse_error_code(query.get("error_code"))
    bulk_id = None if "bulk" not in query else parse_bulk_id(query["bulk"])
    limit = parse_limit(query.get("limit"))
    after = parse_cursor(query.get("cursor"))
    if model is not None:
        check_plain_text(model, "model")
    async with request.app[DATABASE].snapshot() as tx:
        rows = await jobs.list_jobs(
            tx,
            tenant_of(request),
            state=state,
            model=model,
            bulk_id=bulk_id,
            error_code=error_code,
            metadata=metadata,
            after=after,
            limit=limit + 1,
        )
    return answer_page(request, rows, limit=limit, render=lambda row: render_job(request, row))


async def post_cancel(request: web.Request) -> web.StreamResponse:
    """Cancel: at once where queued (200), asked of the worker where running (202)."""
    row, headers = await _change(request, await _read_key(request), outcomes.cancel_job)
    if row.state in TERMINAL:
        request.app[WAITERS].wake([row.id])
        await request.app[QUEUE].publish_finished([row.id])
    return job_response(request, row, status=200 if row.state in TERMINAL else 202, headers=headers)


async def post_retry(request: web.Request) -> web.StreamResponse:
    """Queue a job again for the items that have no score: 202, the same id.

    It waits as a new one does, so that the same limits hold; a key used before is answered.
    """
    key, row = await _read_key(request), await find_job(request)
    gate = request.app[GATE]
    try:
        async with gate.admitting(row.tenant, row.lane, row.estimated_tokens) as count:
            row, headers = await _change(request, key, outcomes.retry_job)
            if not headers:
                count()
    except (OverloadedError, NoCapacityError):
        if key is None or not await is_known(request.app[DATABASE], tenant_of(request), key):
            raise
        row, headers = await _change(request, key, outcomes.retry_job)
    await request.app[QUEUE].hint([row.hint])
    return job_response(request, row, status=202, headers=headers)


async def _change(
    request: web.Request,
    key: IdempotencyKey | None,
    change: Callable[[Transaction, str, str], Awaitable[JobRow]],
) -> tuple[JobRow, dict[str, str]]:
    """Move the job that the path names, once per idempotency key."""
    job_id, tenant = parse_job_id(request), tenant_of(request)
    async with request.app[DATABASE].transaction() as tx:

        async def act() -> str:
            return (await change(tx, tenant, job_id)).id

        _, headers = await act_once(tx, tenant, key, act)
        return await jobs.get_job(tx, tenant, job_id), headers


async def _read_key(request: web.Request) -> IdempotencyKey | None:
    parse_job_id(request)  # what is no job is not found, whatever its body
    return await read_key(request)


async def delete_job(request: web.Request) -> web.StreamResponse:
    """Delete a job that ended: its rows and its bytes are gone when this answers."""
    job_id = parse_job_id(request)
    database = request.app[DATABASE]
    try:
        async with database.transaction() as tx:
            ref = await forgetting.delete_job(tx, tenant_of(request), job_id)
    except GoneError:
        # An earlier delete may have been cut off between the rows and the bytes.
        await forgetting.forget(database, request.app[BLOBS], BlobRef(job_id, ""))
        raise
    if ref is not None:
        await forgetting.forget(database, request.app[BLOBS], ref)
    return web.Response(status=204)


def _parse_wait(text: str | None) -> float:
    if text is None:
        return 0.0
    if not _SECONDS.fullmatch(text):
        message = "wait is a number of seconds"
        raise InvalidRequestError(message, param="wait")
    return float(text)


def _parse_state(text: str | None) -> JobState | None:
    if text is None:
        return None
    try:
        return JobState(text)
    except ValueError as error:
        message = f"there is no state {text[:100]!r}; there are: {', '.join(JobState)}"
        raise InvalidRequestError(message, param="state") from error


def _parse_error_code(text: str | None) -> str | None:
    if text is not None and not _CODE.fullmatch(text):
        message = "an error code is a word of small letters and underscores"
        raise InvalidRequestError(message, param="error_code")
    return text


def _parse_metadata(query: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the ``metadata.KEY`` filters. A parameter that is not known is refused by name."""
    metadata: dict[str, str] = {}
    for name, value in query:
        if name.startswith("metadata.") and len(name) > len("metadata."):
            check_plain_text(name, "metadata")
            metadata[name.removeprefix("metadata.")] = check_plain_text(value, name)
        elif name not in {"state", "model", "bulk", "error_code", "limit", "cursor"}:
            message = f"there is no filter {name[:100]!r}"
            raise InvalidRequestError(message, param=name[:100])
    return metadata
