"""``/healthz`` and ``/readyz``: is the process alive, and can it take work."""

import asyncio
from collections.abc import Awaitable

from aiohttp import web

from api.auth import IDENTITY
from api.bodies import json_response
from api.state import BLOBS, CATALOG, DATABASE, QUEUE
from contract.errors import ScoreError
from contract.keys import Scope
from contract.models import CANARY_DRIFT, ModelState

__all__ = ["add_routes"]

_CHECK_TIMEOUT_S = 3.0


def add_routes(app: web.Application) -> None:
    """Add the routes of health to the application."""
    app.router.add_get("/healthz", get_health)
    app.router.add_get("/readyz", get_readiness)


async def get_health(_request: web.Request) -> web.StreamResponse:
    """Answer as long as the event loop turns; asks nobody."""
    return json_response({"status": "ok"})


async def get_readiness(request: web.Request) -> web.StreamResponse:
    """Answer 200 while a job would be taken and scored, else 503; the reasons name every fault.

    A queue that is away is a reason and no obstacle: the sweep finds the jobs.
    """
    app = request.app
    store, blobs, queue, statuses = await asyncio.gather(
        _fault_of(app[DATABASE].check()),
        _fault_of(app[BLOBS].check()),
        _fault_of(app[QUEUE].check()),
        app[CATALOG].statuses(),
    )
    reasons = [
        {"part": part, "code": code, "detail": fault}
        for part, code, fault in (
            ("store", "store_unavailable", store),
            ("blobs", "store_unavailable", blobs),
            ("queue", "queue_unavailable", queue),
        )
        if fault is not None
    ]
    for status in statuses.values():
        if status.state is ModelState.FAILED:
            drifted = (status.reason or "").startswith(CANARY_DRIFT)
            code = CANARY_DRIFT if drifted else "model_load_failed"
            detail = status.reason or "it could not be loaded"
        elif status.state is ModelState.LOADING:
            code, detail = "model_loading", status.reason or "it is being loaded"
        else:
            continue
        reasons.append({"part": f"model {status.name}", "code": code, "detail": detail})
    if not statuses:
        detail = "no model is served: start a worker, or name models in the registry"
        reasons.append({"part": "models", "code": "no_model", "detail": detail})
    if not _may_see_details(request):
        reasons = [{**reason, "detail": ""} for reason in reasons]
    served = any(status.state is ModelState.READY for status in statuses.values())
    ready = served and store is None and blobs is None
    body = {
        "ready": ready,
        "reasons": reasons,
        "models": {name: status.state for name, status in statuses.items()},
    }
    headers = {} if ready else {"Retry-After": "2"}
    return json_response(body, status=200 if ready else 503, headers=headers)


def _may_see_details(request: web.Request) -> bool:
    """Details name paths and hosts: only for who may read anything at all."""
    return Scope.READ in request[IDENTITY].scopes


async def _fault_of(check: Awaitable[None]) -> str | None:
    """Return why a check failed, or None."""
    try:
        async with asyncio.timeout(_CHECK_TIMEOUT_S):
            await check
    except ScoreError as error:
        return error.message
    except TimeoutError:
        return f"it did not answer within {_CHECK_TIMEOUT_S:g} s"
    return None
