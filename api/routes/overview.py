"""``GET /v1/overview`` and its stream: the state of the whole installation."""

from collections.abc import AsyncIterator

from aiohttp import web

from api.negotiation import JSON
from api.overview import Overviews
from api.state import CATALOG, DATABASE, SETTINGS
from api.waiting import wait_while_allowed
from contract.errors import StoreUnavailableError, UnauthorizedError

__all__ = ["OVERVIEWS", "add_routes"]

OVERVIEWS = web.AppKey("overviews", Overviews)
_PERIOD_S = 1.0


def add_routes(app: web.Application) -> None:
    """Add the routes of the overview to the application."""
    app.cleanup_ctx.append(_overviews)
    app.on_shutdown.append(_let_watchers_go)
    app.router.add_get("/v1/overview", get_overview)
    app.router.add_get("/v1/overview/events", get_events, allow_head=False)


async def get_overview(request: web.Request) -> web.StreamResponse:
    """Show queue, models, workers, throughput and webhooks; at most some seconds old."""
    return web.Response(body=await request.app[OVERVIEWS].read(), content_type=JSON)


async def get_events(request: web.Request) -> web.StreamResponse:
    """Stream the overview every second, whatever changed; ``away`` while the store is."""
    overviews = request.app[OVERVIEWS]
    response = web.StreamResponse(headers={"X-Accel-Buffering": "no"})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    try:
        while True:
            await response.write(await _next_message(overviews))
            if await wait_while_allowed(request, overviews.stopping, _PERIOD_S):
                break
        await response.write_eof()
    except UnauthorizedError:
        await response.write_eof()  # the key was revoked meanwhile
    except ConnectionResetError:
        pass  # the watcher left
    return response


async def _next_message(overviews: Overviews) -> bytes:
    try:
        return b"event: overview\ndata: " + await overviews.read() + b"\n\n"
    except StoreUnavailableError:
        return b"event: away\ndata: {}\n\n"


async def _overviews(app: web.Application) -> AsyncIterator[None]:
    alive_within_s = app[SETTINGS].alive_within_s
    app[OVERVIEWS] = Overviews(app[DATABASE], app[CATALOG], alive_within_s=alive_within_s)
    yield


async def _let_watchers_go(app: web.Application) -> None:
    app[OVERVIEWS].stopping.set()
