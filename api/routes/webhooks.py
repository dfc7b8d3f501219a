"""``GET /v1/webhooks/default/secret``: the secret that verifies what we send."""

from aiohttp import web

from api.bodies import json_response
from api.state import DATABASE, tenant_of
from storage import tenants

__all__ = ["add_routes"]


def add_routes(app: web.Application) -> None:
    """Add the routes of webhooks to the application."""
    app.router.add_get("/v1/webhooks/default/secret", get_secret)


async def get_secret(request: web.Request) -> web.StreamResponse:
    """Show the signing secrets, newest first (``key`` is that one); made on the first look."""
    async with request.app[DATABASE].transaction() as tx:
        secrets = await tenants.webhook_secrets(tx, tenant_of(request))
    return json_response({"object": "webhook_secret", "key": secrets[0], "secrets": secrets})
