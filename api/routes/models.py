"""``GET /v1/models`` and ``GET /v1/limits``: what is served, and every limit."""

import msgspec
from aiohttp import web

from api.bodies import json_response
from api.limits import OWN_LIMITS
from api.pages import MAX_PAGE
from api.state import CATALOG, SETTINGS
from api.submission import LIMITS

__all__ = ["add_routes", "collect_limits"]


def add_routes(app: web.Application) -> None:
    """Add the routes about the service to the application."""
    app.router.add_get("/v1/models", get_models)
    app.router.add_get("/v1/limits", get_limits)


async def get_models(request: web.Request) -> web.StreamResponse:
    """List the models with what each can do, and why not."""
    statuses = await request.app[CATALOG].statuses()
    data = [
        {
            "id": status.name,
            "object": "model",
            "owned_by": "scorekeep",
            "state": status.state,
            "reason": status.reason,
            "description": status.description,
        }
        for status in statuses.values()
    ]
    return json_response({"object": "list", "data": data})


async def get_limits(request: web.Request) -> web.StreamResponse:
    """Name every limit with its value."""
    limits = msgspec.structs.asdict(request[OWN_LIMITS])
    own = {f"tenant_{name}": most for name, most in limits.items() if most}  # 0 is none
    return json_response(collect_limits(request.app) | own)


def collect_limits(app: web.Application) -> dict[str, float]:
    """Return every limit by the name that errors use for it."""
    settings = app[SETTINGS]
    return {
        "max_body_bytes": settings.max_body_bytes,
        "max_items": settings.max_items,
        "max_job_tokens": settings.max_job_tokens,
        "max_scores": settings.max_scores,
        "max_wait_s": settings.max_wait_s,
        "default_wait_s": settings.default_wait_s,
        "list_rows": MAX_PAGE,
        **LIMITS,
    }
