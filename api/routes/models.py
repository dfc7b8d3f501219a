"""``/v1/models`` and ``/v1/limits``: what is served and what each model can do, and every limit."""

from typing import Any

import msgspec
from aiohttp import web

from api.bodies import json_response
from api.limits import OWN_LIMITS
from api.pages import MAX_PAGE
from api.results import MAX_JSON_BYTES
from api.routes.rescore import FILTERED_JOBS
from api.state import CATALOG, SETTINGS
from api.submission import LIMITS
from contract.config import Settings
from contract.errors import UnknownModelError
from contract.models import ModelStatus
from contract.rows import LONGEST_ID
from storage.idempotency import KEPT_S

__all__ = ["add_routes", "collect_limits"]

#: Settings that bound what a client may ask for, beside all that begin with ``max_``.
_TIMES = (
    "default_wait_s",
    "prepare_timeout_s",
    "batch_deadline_s",
    "result_ttl_s",
    "webhook_timeout_s",
)


def add_routes(app: web.Application) -> None:
    """Add the routes about the service to the application."""
    app.router.add_get("/v1/models", get_models)
    app.router.add_get("/v1/models/{id:.+}", get_model)
    app.router.add_get("/v1/limits", get_limits)


async def get_models(request: web.Request) -> web.StreamResponse:
    """List the models with what each can do, and why not."""
    statuses = await request.app[CATALOG].statuses()
    data = [_render(status) for status in statuses.values()]
    return json_response({"object": "list", "data": data})


async def get_model(request: web.Request) -> web.StreamResponse:
    """Show one model with what it can do, and why not."""
    name = request.match_info["id"]
    statuses = await request.app[CATALOG].statuses()
    if name not in statuses:
        served = ", ".join(statuses) or "none yet"
        message = f"no model {name[:100]!r} is served; served are: {served}"
        raise UnknownModelError(message)
    return json_response(_render(statuses[name]))


async def get_limits(request: web.Request) -> web.StreamResponse:
    """Name every limit with its value."""
    limits = msgspec.structs.asdict(request[OWN_LIMITS])
    own = {f"tenant_{name}": most for name, most in limits.items() if most}  # 0 is none
    return json_response(collect_limits(request.app[SETTINGS]) | own)


def collect_limits(settings: Settings) -> dict[str, float]:
    """Return every limit by the name that errors use for it."""
    names = [field.name for field in msgspec.structs.fields(Settings)]
    values = {name: getattr(settings, name) for name in names}
    return {
        **{name: value for name, value in values.items() if name.startswith("max_")},
        **{name: values[name] for name in _TIMES if values[name]},  # 0 is no limit
        "list_rows": MAX_PAGE,
        "json_tensor_bytes": MAX_JSON_BYTES,
        "custom_id_characters": LONGEST_ID,
        "rescore_filter_jobs": FILTERED_JOBS,
        "idempotency_keys_kept_s": KEPT_S,
        **LIMITS,
    }


def _render(status: ModelStatus) -> dict[str, Any]:
    return {
        "id": status.name,
        "object": "model",
        "owned_by": "scorekeep",
        "state": status.state,
        "reason": status.reason,
        "description": status.description,
    }
