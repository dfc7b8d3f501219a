"""``/v1/webhook_endpoints`` and ``/v1/webhooks/default``: who is told, and what it is signed with.

A secret is in the answer that makes it, and in no other; only the tenant's default secret, which
signs what goes to the URLs of jobs, can be looked at again.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from aiohttp import web

from api.bodies import check_plain_text, json_response, parse_body, read_body
from api.idempotency import IdempotencyKey
from api.limits import OWN_LIMITS
from api.replays import act_once, read_key
from api.state import DATABASE, SETTINGS, tenant_of
from api.submission import request_key
from api.webhook_rendering import render_endpoint
from api.webhook_targets import check_target
from contract.config import Settings
from contract.endpoints import Disabling, EndpointRequest, EndpointUpdate, SentTest
from contract.errors import ConflictError, NotFoundError
from contract.webhooks import check_events
from storage import endpoints, events, tenants
from storage.database import Transaction
from storage.endpoints import EndpointChange, EndpointRow

__all__ = ["add_routes", "parse_endpoint_id"]

_ENDPOINT_ID = re.compile(r"whe_[0-9a-f]{32}")
#: Does something to one endpoint in a transaction.
_Action = Callable[[Transaction, str, str], Awaitable[EndpointRow]]


def add_routes(app: web.Application) -> None:
    """Add the routes of webhooks to the application."""
    app.router.add_get("/v1/webhooks/default/secret", get_secret)
    app.router.add_post("/v1/webhooks/default/rotate", post_secret_rotate)
    app.router.add_post("/v1/webhook_endpoints", post_endpoint)
    app.router.add_get("/v1/webhook_endpoints", get_endpoints)
    app.router.add_get("/v1/webhook_endpoints/{id}", get_endpoint)
    app.router.add_patch("/v1/webhook_endpoints/{id}", patch_endpoint)
    app.router.add_delete("/v1/webhook_endpoints/{id}", delete_endpoint)
    app.router.add_post("/v1/webhook_endpoints/{id}/rotate", post_rotate)
    app.router.add_post("/v1/webhook_endpoints/{id}/disable", post_disable)
    app.router.add_post("/v1/webhook_endpoints/{id}/enable", post_enable)
    app.router.add_post("/v1/webhook_endpoints/{id}/test", post_test)


def parse_endpoint_id(text: str) -> str:
    """Return an id that can be one of ours. Raises ``NotFoundError`` for any other text."""
    if not _ENDPOINT_ID.fullmatch(text):
        message = f"there is no webhook endpoint {text[:100]!r}"
        raise NotFoundError(message)
    return text


async def get_secret(request: web.Request) -> web.StreamResponse:
    """Show the signing secrets, newest first (``key`` is that one); made on the first look."""
    async with request.app[DATABASE].transaction() as tx:
        secrets = await tenants.webhook_secrets(tx, tenant_of(request))
    return _secrets_response(secrets)


async def post_secret_rotate(request: web.Request) -> web.StreamResponse:
    """Replace the default secret; the old one signs beside it for a day."""
    key, tenant = await read_key(request), tenant_of(request)
    async with request.app[DATABASE].transaction() as tx:

        async def rotate() -> str:
            await tenants.rotate_secret(tx, tenant)
            return "rotated"

        _, headers = await act_once(tx, tenant, key, rotate)
        secrets = await tenants.webhook_secrets(tx, tenant)
    return _secrets_response(secrets, headers)


async def post_endpoint(request: web.Request) -> web.StreamResponse:
    """Register an endpoint; the answer holds its secret."""
    body = await read_body(request, max_bytes=request.app[SETTINGS].max_body_bytes)
    wanted = parse_body(request, body, EndpointRequest)
    change = EndpointChange(wanted.url, wanted.events, wanted.description)
    _check(change, request.app[SETTINGS])
    tenant = tenant_of(request)
    async with request.app[DATABASE].transaction() as tx:

        async def create() -> str:
            most = request[OWN_LIMITS].webhook_endpoints or 0
            return (await endpoints.create_endpoint(tx, tenant, change, most=most)).id

        made, replayed = await act_once(tx, tenant, request_key(request, body), create)
        row = await endpoints.get_endpoint(tx, tenant, made)
    headers = {"Location": f"/v1/webhook_endpoints/{row.id}", **replayed}
    return json_response(render_endpoint(row, secret=row.secret), status=201, headers=headers)


async def get_endpoints(request: web.Request) -> web.StreamResponse:
    """List the tenant's endpoints, oldest first; there are few enough for one page."""
    async with request.app[DATABASE].snapshot() as tx:
        rows = await endpoints.list_endpoints(tx, [tenant_of(request)])
    data = [render_endpoint(row) for row in rows]
    return json_response({"object": "list", "data": data, "has_more": False})


async def get_endpoint(request: web.Request) -> web.StreamResponse:
    """Show one endpoint."""
    endpoint_id = parse_endpoint_id(request.match_info["id"])
    async with request.app[DATABASE].snapshot() as tx:
        row = await endpoints.get_endpoint(tx, tenant_of(request), endpoint_id)
    return json_response(render_endpoint(row))


async def patch_endpoint(request: web.Request) -> web.StreamResponse:
    """Change URL, events or description; what is pending goes to the new URL."""
    body = await read_body(request, max_bytes=request.app[SETTINGS].max_body_bytes)
    wanted = parse_body(request, body, EndpointUpdate)

    async def change(tx: Transaction, tenant: str, endpoint_id: str) -> EndpointRow:
        row = await endpoints.get_endpoint(tx, tenant, endpoint_id)
        changed = EndpointChange(
            row.url if isinstance(wanted.url, msgspec.UnsetType) else wanted.url,
            row.events if isinstance(wanted.events, msgspec.UnsetType) else wanted.events,
            row.description
            if isinstance(wanted.description, msgspec.UnsetType)
            else wanted.description,
        )
        _check(changed, request.app[SETTINGS])
        return await endpoints.update_endpoint(tx, tenant, endpoint_id, changed)

    return json_response(render_endpoint(await _act(request, change)))


async def delete_endpoint(request: web.Request) -> web.StreamResponse:
    """Remove an endpoint with its secrets; what is pending for it ends."""
    endpoint_id = parse_endpoint_id(request.match_info["id"])
    async with request.app[DATABASE].transaction() as tx:
        await endpoints.delete_endpoint(tx, tenant_of(request), endpoint_id)
    return web.Response(status=204)


async def post_rotate(request: web.Request) -> web.StreamResponse:
    """Replace an endpoint's secret; the old one signs beside the new one for a day."""
    row, headers = await _act_once(request, await read_key(request), endpoints.rotate_endpoint)
    return json_response(render_endpoint(row, secret=row.secret), headers=headers)


async def post_disable(request: web.Request) -> web.StreamResponse:
    """Send nothing more, and keep the reason; what is pending ends."""
    body = await read_body(request, max_bytes=request.app[SETTINGS].max_body_bytes)
    reason = parse_body(request, body, Disabling).reason if body else Disabling().reason
    check_plain_text(reason, "reason")

    async def disable(tx: Transaction, tenant: str, endpoint_id: str) -> EndpointRow:
        return await endpoints.disable_endpoint(tx, tenant, endpoint_id, reason)

    row, headers = await _act_once(request, request_key(request, body), disable)
    return json_response(render_endpoint(row), headers=headers)


async def post_enable(request: web.Request) -> web.StreamResponse:
    """Send again, from now on."""
    row, headers = await _act_once(request, await read_key(request), endpoints.enable_endpoint)
    return json_response(render_endpoint(row), headers=headers)


async def post_test(request: web.Request) -> web.StreamResponse:
    """Send an event that only says that it is a test; 202 with where its attempts will be."""
    endpoint_id, tenant = parse_endpoint_id(request.match_info["id"]), tenant_of(request)
    key = await read_key(request)
    async with request.app[DATABASE].transaction() as tx:
        row = await endpoints.get_endpoint(tx, tenant, endpoint_id)

        async def send() -> str:
            if row.disabled_at is not None:
                message = f"the endpoint is disabled: {row.disabled_reason}; enable it first"
                raise ConflictError(message)
            return " ".join(await events.add_test_event(tx, row))

        made, replayed = await act_once(tx, tenant, key, send)
    event, _, delivery = made.partition(" ")
    headers = {"Location": f"/v1/deliveries/{delivery}", **replayed}
    return json_response(SentTest(event=event, delivery=delivery), status=202, headers=headers)


async def _act(request: web.Request, action: _Action) -> EndpointRow:
    endpoint_id = parse_endpoint_id(request.match_info["id"])
    async with request.app[DATABASE].transaction() as tx:
        return await action(tx, tenant_of(request), endpoint_id)


async def _act_once(
    request: web.Request, key: IdempotencyKey | None, action: _Action
) -> tuple[EndpointRow, dict[str, str]]:
    """Do something to the endpoint that the path names, once per idempotency key."""
    endpoint_id, tenant = parse_endpoint_id(request.match_info["id"]), tenant_of(request)
    async with request.app[DATABASE].transaction() as tx:

        async def act() -> str:
            return (await action(tx, tenant, endpoint_id)).id

        _, headers = await act_once(tx, tenant, key, act)
        return await endpoints.get_endpoint(tx, tenant, endpoint_id), headers


def _check(wanted: EndpointChange, settings: Settings) -> None:
    """Raise the error that names the field which cannot be registered."""
    check_target(wanted.url, settings, param="url")
    check_plain_text(wanted.description, "description")
    if wanted.events is not None:
        check_events(wanted.events, param="events")


def _secrets_response(
    secrets: Sequence[str], headers: Mapping[str, str] | None = None
) -> web.Response:
    body = {"object": "webhook_secret", "key": secrets[0], "secrets": secrets}
    return json_response(body, headers=headers)
