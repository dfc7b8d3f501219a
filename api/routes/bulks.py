"""``/v1/bulks``: many lines under one handle; counts, results and controls while it runs."""

import functools

import msgspec
from aiohttp import web

from api.bodies import check_metadata, check_plain_text, json_response, parse_body, read_body
from api.bulk.access import BULKS, find_bulk, parse_bulk_id, show_bulk
from api.bulk.acting import act_on_bulk, find_replay, retry_once
from api.bulk.exports import serve_results
from api.bulk.settings import BulkOptions, BulkSource
from api.bulk.uris import open_uri
from api.limits import OWN_LIMITS, check_open_bulks, find_bulk_fault
from api.pages import parse_after, parse_limit
from api.replays import REPLAYED
from api.state import DATABASE, SETTINGS, tenant_of
from api.submission import request_key
from api.webhook_targets import check_webhook
from contract.bulks import BulkRequest, RescoreRequest
from contract.errors import InvalidRequestError
from contract.rows import check_columns
from contract.webhooks import BULK_EVENTS
from storage import bulks, files
from storage.bulks import BulkRow, NewBulk

__all__ = ["add_bulk", "add_routes", "answer_replay"]


def add_routes(app: web.Application) -> None:
    """Add the routes of bulks to the application."""
    app.router.add_post("/v1/bulks", post_bulk)
    app.router.add_get("/v1/bulks", get_bulks)
    app.router.add_get("/v1/bulks/{id}", get_bulk)
    app.router.add_get("/v1/bulks/{id}/results", get_results)
    app.router.add_post("/v1/bulks/{id}/cancel", post_cancel)
    app.router.add_post("/v1/bulks/{id}/pause", post_pause)
    app.router.add_post("/v1/bulks/{id}/resume", post_resume)
    app.router.add_post("/v1/bulks/{id}/retry", post_retry)
    app.router.add_delete("/v1/bulks/{id}", delete_bulk)


async def post_bulk(request: web.Request) -> web.StreamResponse:
    """Start a bulk on an uploaded file, or on a file in an allowed store."""
    body = await read_body(request, max_bytes=request.app[SETTINGS].max_body_bytes)
    if (replay := await answer_replay(request, body)) is not None:
        return replay
    wanted = parse_body(request, body, BulkRequest)
    if (wanted.input_file_id is None) == (wanted.input_uri is None):
        message = "give either input_file_id or input_uri"
        raise InvalidRequestError(message, param="input_file_id")
    check_columns(wanted.columns)
    if wanted.input_uri is not None:
        open_uri(wanted.input_uri, request.app[SETTINGS])
    else:
        check_plain_text(wanted.input_file_id or "", "input_file_id")
        async with request.app[DATABASE].snapshot() as tx:
            await files.get_file(tx, tenant_of(request), wanted.input_file_id or "")
    options = BulkOptions(
        model=wanted.model,
        parameters=wanted.parameters,
        columns=wanted.columns,
        hidden_states=True if wanted.hidden_states else None,
        on_invalid=wanted.on_invalid,
        cache=wanted.cache,
        lane=wanted.priority,
        max_items=request[OWN_LIMITS].items,
        expires_after_s=wanted.expires_after_s or request.app[SETTINGS].result_ttl_s or None,
    )
    source = BulkSource(file=wanted.input_file_id, uri=wanted.input_uri)
    return await add_bulk(request, body, source, options, wanted)


async def add_bulk(
    request: web.Request,
    body: bytes,
    source: BulkSource,
    options: BulkOptions,
    wanted: BulkRequest | RescoreRequest,
) -> web.StreamResponse:
    """Record a bulk and answer with it; the same idempotency key gives the same bulk, for ever."""
    check_metadata(wanted.metadata)
    settings = request.app[SETTINGS]
    check_webhook(wanted.webhook, wanted.webhook_events, settings, among=BULK_EVENTS)
    key = request_key(request, body)
    new = NewBulk(
        tenant=tenant_of(request),
        kind="bulk",
        endpoint="",
        source=msgspec.json.encode(source),
        options=msgspec.json.encode(options),
        metadata=wanted.metadata,
        webhook_url=wanted.webhook,
        webhook_events=wanted.webhook_events,
        key=None if key is None else key.key,
        body_hash=None if key is None else key.body_hash,
    )
    fault = await find_bulk_fault(request, options.lane)
    async with request.app[DATABASE].transaction() as tx:
        row, replayed = await bulks.add_bulk(tx, new)
        if not replayed:
            await check_open_bulks(request, tx, fault)
    request.app[BULKS].wake()
    return await _answer_bulk(request, row, replayed=replayed)


async def answer_replay(request: web.Request, body: bytes) -> web.StreamResponse | None:
    """Return the answer to a key that was used before, although its input may be gone by now."""
    key = request_key(request, body)
    if key is None:
        return None
    row = await find_replay(request, key.key, key.body_hash)
    return None if row is None else await _answer_bulk(request, row, replayed=True)


async def _answer_bulk(request: web.Request, row: BulkRow, *, replayed: bool) -> web.StreamResponse:
    headers = {"Location": f"/v1/bulks/{row.id}", **(REPLAYED if replayed else {})}
    return json_response(await show_bulk(request, row), status=202, headers=headers)


async def get_bulk(request: web.Request) -> web.StreamResponse:
    """Show a bulk with its live counts."""
    return json_response(await show_bulk(request, await find_bulk(request)))


async def get_bulks(request: web.Request) -> web.StreamResponse:
    """List bulks, newest first; ``key`` finds the one that was submitted under it."""
    limit = parse_limit(request.query.get("limit"))
    after, key = request.query.get("after"), request.query.get("key")
    async with request.app[DATABASE].snapshot() as tx:
        if key is not None:
            found = await bulks.find_bulk(tx, tenant_of(request), check_plain_text(key, "key"))
            rows = [] if found is None else [found]
        else:
            last = None if after is None else parse_bulk_id(after)
            rows = await bulks.list_bulks(
                tx, tenant_of(request), kind=None, after=last, limit=limit + 1
            )
    page = [await show_bulk(request, row) for row in rows[:limit]]
    return json_response({"object": "list", "data": page, "has_more": len(rows) > limit})


async def get_results(request: web.Request) -> web.StreamResponse:
    """Stream results in the order of the lines, as far as they are done.

    ``after`` is the last line the client has; ``Accept`` chooses JSONL, Parquet or Arrow.
    """
    return await serve_results(request, await find_bulk(request), parse_after(request))


async def post_cancel(request: web.Request) -> web.StreamResponse:
    """Stop a bulk; what was scored by then is kept."""
    row, headers = await act_on_bulk(request, bulks.cancel_bulk)
    return json_response(await show_bulk(request, row), status=202, headers=headers)


async def post_pause(request: web.Request) -> web.StreamResponse:
    """Keep workers from the bulk's queued lines; what runs is finished."""
    return await _pause(request, paused=True)


async def post_resume(request: web.Request) -> web.StreamResponse:
    """Let workers take the bulk's lines again."""
    return await _pause(request, paused=False)


async def post_retry(request: web.Request) -> web.StreamResponse:
    """Run every item without a score again; 409 where the bulk has not ended or has none."""
    row, headers = await retry_once(request)
    return json_response(await show_bulk(request, row), status=202, headers=headers)


async def delete_bulk(request: web.Request) -> web.StreamResponse:
    """Delete an ended bulk: its lines at once, its jobs' scores with the next sweep."""
    row = await find_bulk(request)
    async with request.app[DATABASE].transaction() as tx:
        await bulks.delete_bulk(tx, tenant_of(request), row.id)
    return web.Response(status=204)


async def _pause(request: web.Request, *, paused: bool) -> web.StreamResponse:
    row, headers = await act_on_bulk(request, functools.partial(bulks.pause_bulk, paused=paused))
    return json_response(await show_bulk(request, row), headers=headers)
