"""What is done once per ``Idempotency-Key``: the only place that says how a repetition is answered.

Jobs are added by the submitter, in groups; bulks keep their key in their own row.
"""

from collections.abc import Awaitable, Callable

from aiohttp import web

from api.bodies import read_body, run_for
from api.idempotency import IdempotencyKey
from api.state import DATABASE, SETTINGS, tenant_of
from api.submission import request_key
from storage import idempotency
from storage.database import Transaction

__all__ = ["REPLAYED", "act_once", "find_made", "read_key"]

#: The headers of an answer that was given before.
REPLAYED = {"Idempotent-Replayed": "true"}


async def read_key(request: web.Request) -> IdempotencyKey | None:
    """Read the body of a request that needs none; return its key."""
    body = await read_body(request, max_bytes=request.app[SETTINGS].max_body_bytes)
    return await run_for(body, lambda: request_key(request, body))


async def act_once(
    tx: Transaction, tenant: str, key: IdempotencyKey | None, act: Callable[[], Awaitable[str]]
) -> tuple[str, dict[str, str]]:
    """Do ``act`` unless the key stands for something; return what, and the answer's headers.

    A second request at the same time waits for the first, and is then its repetition. Raises
    ``IdempotencyConflictError`` where the key came with another body.
    """
    if key is None:
        return await act(), {}
    found = await idempotency.find_or_claim(tx, tenant, key.route, key.key, key.body_hash)
    if found is not None:
        return found, REPLAYED
    made = await act()
    await idempotency.bind(tx, tenant, key.route, key.key, made)
    return made, {}


async def find_made(request: web.Request, key: IdempotencyKey | None) -> str | None:
    """Return what the key stands for already, or None. Raises as ``act_once`` does."""
    if key is None:
        return None
    async with request.app[DATABASE].snapshot() as tx:
        return await idempotency.find(tx, tenant_of(request), key.route, key.key, key.body_hash)
