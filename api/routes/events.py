"""``GET /v1/jobs/{id}/events``: a job's events as they are written, resumable by their sequence."""

import asyncio
import re

import msgspec
from aiohttp import web

from api.job_access import find_job
from api.rendering import render_job
from api.state import READS, WAITERS
from api.waiting import wait_while_allowed
from contract.errors import GoneError, StoreUnavailableError, UnauthorizedError
from contract.jobs import TERMINAL
from contract.moments import render_moment
from contract.webhooks import Event
from storage import events, jobs
from storage.database import Transaction
from storage.events import EventRow
from storage.jobs import JobRow

__all__ = ["KEEP_ALIVE_S", "add_routes", "parse_last_id"]

#: How often a comment is sent, so that no proxy takes the stream for dead.
KEEP_ALIVE_S = web.AppKey("keep_alive_s", float)
_AWAY_S = 1.0
_SEQUENCE = re.compile(r"[0-9]{1,18}")


def add_routes(app: web.Application) -> None:
    """Add the route of event streams to the application."""
    app.router.add_get("/v1/jobs/{id}/events", get_events, allow_head=False)


async def get_events(request: web.Request) -> web.StreamResponse:
    """Stream the events after ``Last-Event-ID``; end with the job. 204 tells readers to stop."""
    seen = parse_last_id(request.headers.get("Last-Event-ID", ""))
    row = await find_job(request)
    waiters = request.app[WAITERS]
    with waiters.watch(row.id) as ended:
        row, fresh = await _read(request, row, seen)
        if row.state in TERMINAL and not fresh and seen:
            return web.Response(status=204)
        response = web.StreamResponse(headers={"X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        try:
            await response.write(_render_state(request, row))
            while True:
                for event in fresh:
                    seen = event.sequence
                    await response.write(_render_event(request, row, event))
                if row.state in TERMINAL or waiters.is_stopping:
                    break
                if not await wait_while_allowed(request, ended, request.app[KEEP_ALIVE_S]):
                    await response.write(b": still here\n\n")
                row, fresh = await _read_again(request, response, row, seen)
                if row.state not in TERMINAL:
                    ended.clear()  # it was about an end before a retry
            await response.write_eof()
        except (GoneError, UnauthorizedError):
            await response.write_eof()  # deleted after its end, or the key was revoked meanwhile
        except ConnectionResetError:
            pass  # the reader left; its job goes on
    return response


async def _read_again(
    request: web.Request, response: web.StreamResponse, row: JobRow, seen: int
) -> tuple[JobRow, list[EventRow]]:
    """Read until the store answers; comments keep the stream alive meanwhile."""
    while not request.app[WAITERS].is_stopping:
        try:
            return await _read(request, row, seen)
        except StoreUnavailableError:
            await response.write(b": the store is away\n\n")
            await asyncio.sleep(_AWAY_S)
    return row, []


async def _read(request: web.Request, row: JobRow, seen: int) -> tuple[JobRow, list[EventRow]]:
    async def look(tx: Transaction) -> tuple[JobRow, list[EventRow]]:
        found = await jobs.get_job(tx, row.tenant, row.id)
        return found, await events.list_events(tx, row.id)

    now, written = await request.app[READS].read(("events", row.tenant, row.id), look)
    return now, [event for event in written if event.sequence > seen]


def _render_state(request: web.Request, row: JobRow) -> bytes:
    """The job as it is now. It has no id: a reader that resumes is told again."""
    data = msgspec.json.encode(render_job(request, row))
    return b"event: job.state\ndata: " + data + b"\n\n"


def _render_event(request: web.Request, row: JobRow, event: EventRow) -> bytes:
    body = Event(
        type=event.type,
        timestamp=render_moment(event.created_at),
        sequence=event.sequence,
        data=msgspec.to_builtins(render_job(request, row)),
    )
    head = f"id: {event.sequence}\nevent: {event.type}\ndata: ".encode()
    return head + msgspec.json.encode(body) + b"\n\n"


def parse_last_id(text: str) -> int:
    """Return the sequence that a reader has seen: none where ``text`` is no number of ours."""
    return int(text) if _SEQUENCE.fullmatch(text) else 0
