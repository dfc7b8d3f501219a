"""``/v1/batches``: bulks as OpenAI's stock client speaks of them."""

from typing import Any

import msgspec
from aiohttp import web

from api.bodies import check_metadata, check_plain_text, json_response, parse_body, read_body
from api.bulk.access import BULKS, counts_of, errors_of, find_bulk, parse_bulk_id
from api.bulk.acting import act_on_bulk
from api.bulk.settings import BulkOptions, BulkSource, parse_options, parse_source
from api.limits import OWN_LIMITS, check_open_bulks, find_bulk_fault
from api.pages import parse_limit
from api.replays import REPLAYED
from api.routes.files import render_list
from api.state import DATABASE, SETTINGS, tenant_of
from api.submission import request_key
from api.webhook_targets import check_webhook
from contract.bulks import BATCH_STATUS, BatchRequest, BulkState
from contract.webhooks import BULK_EVENTS
from storage import bulks, files
from storage.bulks import BulkRow, NewBulk
from storage.database import Transaction

__all__ = ["add_routes"]

_WINDOW_S = 86400.0


def add_routes(app: web.Application) -> None:
    """Add the routes of batches to the application."""
    app.router.add_post("/v1/batches", post_batch)
    app.router.add_get("/v1/batches", get_batches)
    app.router.add_get("/v1/batches/{id}", get_batch)
    app.router.add_post("/v1/batches/{id}/cancel", post_cancel)


async def post_batch(request: web.Request) -> web.StreamResponse:
    """Start a batch on an uploaded file. Nothing runs before every line was looked at."""
    body = await read_body(request, max_bytes=request.app[SETTINGS].max_body_bytes)
    wanted = parse_body(request, body, BatchRequest)
    check_plain_text(wanted.input_file_id, "input_file_id")
    check_metadata(wanted.metadata or {})
    settings = request.app[SETTINGS]
    check_webhook(wanted.webhook, wanted.webhook_events, settings, among=BULK_EVENTS)
    expiry = wanted.output_expires_after
    options = BulkOptions(
        expires_after_s=settings.result_ttl_s or None,
        on_invalid=wanted.on_invalid,
        max_items=request[OWN_LIMITS].items,
        output_expires_after_s=None if expiry is None else float(expiry.seconds),
    )
    key = request_key(request, body)
    new = NewBulk(
        tenant=tenant_of(request),
        kind="batch",
        endpoint=wanted.endpoint,
        source=msgspec.json.encode(BulkSource(file=wanted.input_file_id)),
        options=msgspec.json.encode(options),
        metadata=wanted.metadata or {},
        webhook_url=wanted.webhook,
        webhook_events=wanted.webhook_events,
        key=None if key is None else f"batches:{key.key}",
        body_hash=None if key is None else key.body_hash,
        deadline_s=_WINDOW_S,
    )
    fault = await find_bulk_fault(request, options.lane)
    async with request.app[DATABASE].transaction() as tx:
        row, replayed = await bulks.add_bulk(tx, new)
        if not replayed:
            await files.get_file(tx, tenant_of(request), wanted.input_file_id)
            await check_open_bulks(request, tx, fault)
        shown = await _render(tx, row)
    request.app[BULKS].wake()
    return json_response(shown, headers=REPLAYED if replayed else {})


async def get_batch(request: web.Request) -> web.StreamResponse:
    """Show a batch."""
    row = await find_bulk(request)
    async with request.app[DATABASE].snapshot() as tx:
        return json_response(await _render(tx, row))


async def get_batches(request: web.Request) -> web.StreamResponse:
    """List batches, newest first; ``after`` is the last id of the page before."""
    limit = parse_limit(request.query.get("limit"))
    after = request.query.get("after")
    if after is not None:
        after = parse_bulk_id(after)
    async with request.app[DATABASE].snapshot() as tx:
        rows = await bulks.list_bulks(
            tx, tenant_of(request), kind="batch", after=after, limit=limit + 1
        )
        page = [await _render(tx, row) for row in rows[:limit]]
    return json_response(render_list(page, has_more=len(rows) > limit))


async def post_cancel(request: web.Request) -> web.StreamResponse:
    """Ask a batch to stop; what was scored by then is in its output file."""
    row, headers = await act_on_bulk(request, bulks.cancel_bulk)
    async with request.app[DATABASE].snapshot() as tx:
        shown = await _render(tx, row)
    return json_response(shown, headers=headers)


async def _render(tx: Transaction, row: BulkRow) -> dict[str, Any]:
    counts = await counts_of(tx, row)
    options, source = parse_options(row), parse_source(row)
    found = errors_of(row)
    errors = [msgspec.to_builtins(error) | {"line": error.line} for error in found]
    ended = {
        state: None if row.state is not state or row.finished_at is None else int(row.finished_at)
        for state in (
            BulkState.COMPLETED,
            BulkState.FAILED,
            BulkState.CANCELLED,
            BulkState.EXPIRED,
        )
    }
    return {
        "id": row.id,
        "object": "batch",
        "endpoint": row.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": source.file,
        "completion_window": options.completion_window,
        "status": BATCH_STATUS[row.state],
        "output_file_id": row.output_file_id,
        "error_file_id": row.error_file_id,
        "created_at": int(row.created_at),
        "in_progress_at": _whole(row.started_at),
        "expires_at": _whole(row.deadline_at),
        "finalizing_at": _whole(row.finalizing_at),
        "completed_at": ended[BulkState.COMPLETED],
        "failed_at": ended[BulkState.FAILED],
        "expired_at": ended[BulkState.EXPIRED],
        "cancelling_at": _whole(row.cancelling_at),
        "cancelled_at": ended[BulkState.CANCELLED],
        "request_counts": {
            "total": counts.lines,
            "completed": counts.lines_completed,
            "failed": counts.lines_failed + counts.lines_cancelled,
        },
        "metadata": row.metadata or None,
    }


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
