"""What is done once per ``Idempotency-Key``: the only place that says how a repetition is answered.

Jobs are added by the submitter, in groups; bulks keep their key in their own row.
"""

from collections.abc import Awaitable, Callable

from aiohttp import web

from api.state import DATABASE, tenant_of
from api.submission import request_key
from storage import idempotency
from storage.database import Transaction

__all__ = ["REPLAYED", "act_once", "find_made"]

#: The headers of an answer that was given before.
REPLAYED = {"Idempotent-Replayed": "true"}


async def act_once(
    request: web.Request, tx: Transaction, body: bytes, act: Callable[[], Awaitable[str]]
) -> tuple[str, dict[str, str]]:
    """Do ``act`` unless the request's key stands for something; return what, and the headers.

    A second request at the same time waits for the first, and is then its repetition. Raises
    ``IdempotencyConflictError`` where the key came with another body.
    """
    key = request_key(request, body)
    if key is None:
        return await act(), {}
    tenant = tenant_of(request)
    found = await idempotency.find_or_claim(tx, tenant, key.route, key.key, key.body_hash)
    if found is not None:
        return found, REPLAYED
    made = await act()
    await idempotency.bind(tx, tenant, key.route, key.key, made)
    return made, {}


async def find_made(request: web.Request, body: bytes) -> str | None:
    """Return what the request's key stands for already, or None. Raises as ``act_once`` does."""
    key = request_key(request, body)
    if key is None:
        return None
    tenant = tenant_of(request)
    async with request.app[DATABASE].snapshot() as tx:
        return await idempotency.find(tx, tenant, key.route, key.key, key.body_hash)
