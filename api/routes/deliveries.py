"""The log of webhook deliveries, and sending again: one, or all of a time."""

import re

from aiohttp import web

from api.bodies import json_response, parse_body, read_body
from api.bulk.access import find_bulk
from api.job_access import find_job
from api.pages import answer_page, parse_cursor, parse_limit
from api.replays import act_once, read_key
from api.routes.webhooks import parse_endpoint_id
from api.state import DATABASE, SETTINGS, tenant_of
from api.submission import request_key
from api.webhook_rendering import render_delivery
from contract.endpoints import RedeliveryRequest
from contract.errors import InvalidRequestError, NotFoundError
from contract.moments import parse_moment
from storage import delivery_log, endpoints
from storage.delivery_log import DeliveryState, Redelivery

__all__ = ["add_routes"]

_DELIVERY_ID = re.compile(r"dlv_[0-9a-f]{32}")
_STATES: tuple[DeliveryState, ...] = ("pending", "delivered", "dead")


def add_routes(app: web.Application) -> None:
    """Add the routes of deliveries to the application."""
    app.router.add_get("/v1/jobs/{id}/deliveries", get_of_job)
    app.router.add_get("/v1/bulks/{id}/deliveries", get_of_bulk)
    app.router.add_get("/v1/webhook_endpoints/{id}/deliveries", get_of_endpoint)
    # ``redeliver`` is no id: its Allow must not name GET
    app.router.add_get("/v1/deliveries/{id:(?!redeliver$)[^/]+}", get_delivery)
    app.router.add_post("/v1/deliveries/redeliver", post_redeliver_range)
    app.router.add_post("/v1/deliveries/{id}/redeliver", post_redeliver)


async def get_of_job(request: web.Request) -> web.StreamResponse:
    """List a job's deliveries, newest first, each with its attempts."""
    row = await find_job(request)
    return await _list(request, job_id=row.id)


async def get_of_bulk(request: web.Request) -> web.StreamResponse:
    """List a bulk's deliveries, newest first, each with its attempts."""
    row = await find_bulk(request)
    return await _list(request, bulk_id=row.id)


async def get_of_endpoint(request: web.Request) -> web.StreamResponse:
    """List an endpoint's deliveries, newest first, each with its attempts."""
    endpoint_id = parse_endpoint_id(request.match_info["id"])
    async with request.app[DATABASE].snapshot() as tx:
        row = await endpoints.get_endpoint(tx, tenant_of(request), endpoint_id)
    return await _list(request, endpoint_id=row.id)


async def get_delivery(request: web.Request) -> web.StreamResponse:
    """Show one delivery with its attempts."""
    delivery_id = _parse_id(request)
    async with request.app[DATABASE].snapshot() as tx:
        row = await delivery_log.get_delivery(tx, tenant_of(request), delivery_id)
    return json_response(render_delivery(row))


async def post_redeliver(request: web.Request) -> web.StreamResponse:
    """Send one again, now, whatever became of it; the event keeps its id."""
    delivery_id, tenant = _parse_id(request), tenant_of(request)
    key = await read_key(request)
    async with request.app[DATABASE].transaction() as tx:

        async def redeliver() -> str:
            return (await delivery_log.redeliver(tx, tenant, delivery_id)).id

        _, headers = await act_once(tx, tenant, key, redeliver)
        row = await delivery_log.get_delivery(tx, tenant, delivery_id)
    return json_response(render_delivery(row), status=202, headers=headers)


async def post_redeliver_range(request: web.Request) -> web.StreamResponse:
    """Send again, now, what ended in a time: by default what was not delivered."""
    body = await read_body(request, max_bytes=request.app[SETTINGS].max_body_bytes)
    wanted = parse_body(request, body, RedeliveryRequest)
    tenant = tenant_of(request)
    selected = Redelivery(
        since_at=_parse_moment(wanted.since, "since"),
        until_at=None if wanted.until is None else _parse_moment(wanted.until, "until"),
        endpoint_id=None if wanted.endpoint is None else parse_endpoint_id(wanted.endpoint),
        state=wanted.state,
    )
    async with request.app[DATABASE].transaction() as tx:
        if selected.endpoint_id is not None:
            await endpoints.get_endpoint(tx, tenant, selected.endpoint_id)

        async def redeliver() -> str:
            return str(await delivery_log.redeliver_range(tx, tenant, selected))

        made, headers = await act_once(tx, tenant, request_key(request, body), redeliver)
    told = {"object": "redelivery", "count": int(made)}
    return json_response(told, status=202, headers=headers)


async def _list(
    request: web.Request,
    *,
    job_id: str | None = None,
    bulk_id: str | None = None,
    endpoint_id: str | None = None,
) -> web.StreamResponse:
    query = request.query
    limit, after = parse_limit(query.get("limit")), parse_cursor(query.get("cursor"))
    state = _parse_state(query.get("state"))
    async with request.app[DATABASE].snapshot() as tx:
        rows = await delivery_log.list_deliveries(
            tx,
            tenant_of(request),
            job_id,
            bulk_id=bulk_id,
            endpoint_id=endpoint_id,
            state=state,
            after=after,
            limit=limit + 1,
        )
    return answer_page(request, rows, limit=limit, render=render_delivery)


def _parse_id(request: web.Request) -> str:
    delivery_id = request.match_info["id"]
    if not _DELIVERY_ID.fullmatch(delivery_id):
        message = f"there is no delivery {delivery_id[:100]!r}"
        raise NotFoundError(message)
    return delivery_id


def _parse_state(text: str | None) -> DeliveryState | None:
    if text is None:
        return None
    for state in _STATES:
        if text == state:
            return state
    message = f"there is no state {text[:100]!r}; there are: {', '.join(_STATES)}"
    raise InvalidRequestError(message, param="state")


def _parse_moment(text: str, param: str) -> float:
    try:
        return parse_moment(text)
    except ValueError as error:
        message = f"{param} is not a moment such as 2026-11-30T09:00:00Z"
        raise InvalidRequestError(message, param=param) from error
