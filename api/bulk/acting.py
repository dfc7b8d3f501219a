"""What is done to a bulk by whoever submitted it: once per idempotency key, in one transaction."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from api.bulk.access import BULKS, find_bulk, parse_bulk_id
from api.bulk.retrying import retry_bulk
from api.bulk.settings import parse_options
from api.limits import check_open_bulks, find_bulk_fault
from api.replays import REPLAYED, act_once, find_made, read_key
from api.state import DATABASE, QUEUE, tenant_of
from contract.bulks import ENDED_BULKS
from contract.errors import ConflictError
from storage import bulks
from storage.bulks import BulkRow
from storage.database import Transaction

__all__ = ["act_on_bulk", "find_replay", "retry_once"]

_HINTS = 16


class _ReplayedError(Exception):
    """The key came to stand for another request while this one was on its way."""


async def act_on_bulk(
    request: web.Request, change: Callable[[Transaction, str, str], Awaitable[BulkRow]]
) -> tuple[BulkRow, dict[str, str]]:
    """Change the bulk that the path names; return it as it is then, and the answer's headers."""
    bulk_id, tenant = parse_bulk_id(request.match_info["id"]), tenant_of(request)
    key = await read_key(request)
    async with request.app[DATABASE].transaction() as tx:

        async def act() -> str:
            return (await change(tx, tenant, bulk_id)).id

        _, headers = await act_once(tx, tenant, key, act)
        row = await bulks.get_bulk(tx, tenant, bulk_id)
    request.app[BULKS].wake()
    return row, headers


async def retry_once(request: web.Request) -> tuple[BulkRow, dict[str, str]]:
    """Run every item of an ended bulk that has no score again.

    The key is bound, and the tenant's open bulks are counted, in the transaction that opens the
    bulk again. Raises ``ConflictError`` where it has not ended or has no such item.
    """
    key, row = await read_key(request), await find_bulk(request)
    if await find_made(request, key) is not None:
        return row, REPLAYED
    if row.state not in ENDED_BULKS:
        message = f"bulk {row.id} is {row.state.value}; retry it once it has ended"
        raise ConflictError(message)
    fault = await find_bulk_fault(request, parse_options(row).lane)
    admitted = False

    async def admit(tx: Transaction) -> None:
        nonlocal admitted
        if admitted:  # the bulk ended once more while chunks were still looked at
            return

        async def act() -> str:
            await check_open_bulks(request, tx, fault)
            return row.id

        _, headers = await act_once(tx, row.tenant, key, act)
        if headers:
            raise _ReplayedError
        admitted = True

    try:
        count, hints = await retry_bulk(request.app[BULKS].given, row, admit)
    except _ReplayedError:
        return await find_bulk(request), REPLAYED
    if not count:
        if await find_made(request, key) is not None:  # another with this key was faster
            return await find_bulk(request), REPLAYED
        message = f"bulk {row.id} has no item to be retried"
        raise ConflictError(message)
    await request.app[QUEUE].hint(hints[:_HINTS])
    request.app[BULKS].wake()
    return await find_bulk(request), {}


async def find_replay(
    request: web.Request, key: str | None, body_hash: str | None
) -> BulkRow | None:
    """Return the bulk that was submitted under ``key``: whatever became of its input since.

    Raises ``IdempotencyConflictError`` where it was submitted with another body.
    """
    if key is None:
        return None
    async with request.app[DATABASE].snapshot() as tx:
        found = await bulks.find_bulk(tx, tenant_of(request), key)
    return None if found is None else bulks.check_same(found, body_hash)
