"""``GET /v1/bulks/{id}/events``: a bulk's events as a list, or streamed while it moves."""

import asyncio
import time

import msgspec
from aiohttp import web

from api.bodies import json_response
from api.bulk.access import counts_of, parse_bulk_id, render_bulk
from api.negotiation import JSON, choose_type
from api.pages import parse_after
from api.routes.events import KEEP_ALIVE_S, parse_last_id
from api.state import READS, tenant_of
from api.waiting import wait_while_allowed
from contract.bulks import ENDED_BULKS, Bulk
from contract.errors import GoneError, StoreUnavailableError, UnauthorizedError
from contract.moments import render_moment
from storage.bulk_events import BulkEventRow, list_bulk_events
from storage.bulks import get_bulk
from storage.database import Transaction

__all__ = ["add_routes"]

EVENTS = "text/event-stream"
_STOPPING = web.AppKey("bulk_events_stopping", asyncio.Event)
_PERIOD_S = 1.0


def add_routes(app: web.Application) -> None:
    """Add the route of bulks' events to the application."""
    app[_STOPPING] = asyncio.Event()
    app.on_shutdown.append(_let_watchers_go)
    app.router.add_get("/v1/bulks/{id}/events", get_events, allow_head=False)


async def get_events(request: web.Request) -> web.StreamResponse:
    """List the bulk's events after a sequence number, or stream them until it has ended.

    ``Accept: text/event-stream`` asks for the stream: each event, and ``bulk.state`` with the bulk,
    at first, whenever it has moved, and last at its end. 204 tells readers to stop.
    """
    kind = choose_type(request.headers.get("Accept"), (JSON, EVENTS))
    after = parse_after(request)
    if kind == JSON:
        data = [_render(event) for event in (await _read(request, after))[1]]
        return json_response({"object": "list", "data": data})
    return await _stream(request, parse_last_id(request.headers.get("Last-Event-ID", "")) or after)


async def _stream(request: web.Request, seen: int) -> web.StreamResponse:
    bulk, fresh = await _read(request, seen)
    if bulk.state in ENDED_BULKS and not fresh and seen:
        return web.Response(status=204)
    response = web.StreamResponse(headers={"X-Accel-Buffering": "no"})
    response.content_type = EVENTS
    await response.prepare(request)
    alive_s = request.app[KEEP_ALIVE_S]
    shown, wrote_at = b"", time.monotonic()
    try:
        while True:
            told, shown = _render_news(bulk, fresh, shown)
            if told:
                await response.write(told)
                wrote_at = time.monotonic()
            elif time.monotonic() - wrote_at >= alive_s:
                await response.write(b": still here\n\n")
                wrote_at = time.monotonic()
            seen = fresh[-1].sequence if fresh else seen
            if bulk.state in ENDED_BULKS:
                break
            if await wait_while_allowed(request, request.app[_STOPPING], min(_PERIOD_S, alive_s)):
                break
            try:
                bulk, fresh = await _read(request, seen)
            except StoreUnavailableError:
                fresh = []
                await response.write(b": the store is away\n\n")
        await response.write_eof()
    except (GoneError, UnauthorizedError):
        await response.write_eof()  # deleted after its end, or the key was revoked meanwhile
    except ConnectionResetError:
        pass  # the reader left; the bulk goes on
    return response


async def _read(request: web.Request, seen: int) -> tuple[Bulk, list[BulkEventRow]]:
    """Return the bulk and the events after ``seen``; of a bulk that has ended, all of them."""
    tenant, bulk_id = tenant_of(request), parse_bulk_id(request.match_info["id"])

    async def look(tx: Transaction) -> tuple[Bulk, list[BulkEventRow]]:
        row = await get_bulk(tx, tenant, bulk_id)
        events = await list_bulk_events(tx, bulk_id, after=seen)
        return render_bulk(row, await counts_of(tx, row)), events

    return await request.app[READS].read(("bulk events", tenant, bulk_id, seen), look)


def _render_news(bulk: Bulk, fresh: list[BulkEventRow], shown: bytes) -> tuple[bytes, bytes]:
    """Return what is to be sent, and the bulk as it was sent."""
    now = msgspec.json.encode(bulk)
    parts = []
    for event in fresh:
        head = f"id: {event.sequence}\nevent: {event.type.value}\ndata: ".encode()
        parts.append(head + msgspec.json.encode(_render(event)) + b"\n\n")
    if now != shown:  # it has no id: a reader that resumes is told again
        parts.append(b"event: bulk.state\ndata: " + now + b"\n\n")
    return b"".join(parts), now


def _render(event: BulkEventRow) -> dict[str, object]:
    return {
        "sequence": event.sequence,
        "id": event.id,
        "type": event.type,
        "timestamp": render_moment(event.created_at),
        "data": msgspec.Raw(event.data.encode()),
    }


async def _let_watchers_go(app: web.Application) -> None:
    app[_STOPPING].set()
