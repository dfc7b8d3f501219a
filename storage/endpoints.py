"""Registered webhook endpoints of a tenant: what they want, their secrets, and whether they work.

A disabled endpoint gets nothing; what happens meanwhile is kept as dead deliveries, to be sent
again when it is wanted.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row, select

from contract.errors import NotFoundError, QuotaExceededError
from contract.policies import RatePolicy
from contract.webhooks import create_secret
from storage.database import Transaction
from storage.ids import create_id
from storage.receivers import clear_failures, name_receiver
from storage.statements import execute, pack
from storage.tables import webhook_endpoints
from storage.tenancy import check_owner
from storage.tenants import OVERLAP_S

__all__ = [
    "EndpointChange",
    "EndpointRow",
    "create_endpoint",
    "delete_endpoint",
    "disable_endpoint",
    "enable_endpoint",
    "end_pending",
    "get_endpoint",
    "list_endpoints",
    "record_failures",
    "record_successes",
    "rotate_endpoint",
    "update_endpoint",
]

_UNLIMITED = 2**31 - 1
_RETRY_S = 60.0
_GONE = "the receiver answered 410: it wants no more events"
_HOPELESS = "every attempt of the last days failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRow:
    """An endpoint as stored. ``events`` None means all of them."""

    id: str
    tenant: str
    url: str
    description: str
    events: list[str] | None
    secret: str = field(repr=False)
    old_secret: str | None = field(repr=False)
    old_secret_until_at: float | None
    created_at: float
    updated_at: float
    failing_since_at: float | None
    disabled_at: float | None
    disabled_reason: str | None

    def wants(self, kind: str) -> bool:
        """Whether events of this type are for it."""
        return self.events is None or kind in self.events


@dataclass(frozen=True, slots=True)
class EndpointChange:
    """What an endpoint is, or becomes, for its owner."""

    url: str
    events: Sequence[str] | None
    description: str


async def create_endpoint(
    tx: Transaction, tenant: str, wanted: EndpointChange, *, most: int = 0
) -> EndpointRow:
    """Add an endpoint with a new secret. Raises ``QuotaExceededError`` where there are ``most``."""
    endpoint_id = create_id("whe")
    values = _values(wanted) | {"id": endpoint_id, "tenant": tenant, "secret": create_secret()}
    added = await execute(tx, _ADD, values | {"most": most or _UNLIMITED})
    if added.rowcount == 0:
        message = f"there are {most} endpoints already, as many as there may be; delete one first"
        policy = RatePolicy("webhook-endpoints", most, 0, _RETRY_S)
        raise QuotaExceededError(message, retry_after_s=_RETRY_S, policy=policy)
    return await get_endpoint(tx, tenant, endpoint_id)


async def get_endpoint(tx: Transaction, tenant: str, endpoint_id: str) -> EndpointRow:
    """Return one endpoint. Raises ``NotFoundError``, also for another tenant's."""
    query = select(webhook_endpoints).filter_by(id=endpoint_id, tenant=tenant)
    row = (await tx.execute(query)).one_or_none()
    if row is None:
        message = f"there is no webhook endpoint {endpoint_id}"
        raise NotFoundError(message)
    return _parse(row)


async def list_endpoints(tx: Transaction, tenants: Collection[str]) -> list[EndpointRow]:
    """Return all endpoints of the tenants, oldest first."""
    query = select(webhook_endpoints).where(webhook_endpoints.c.tenant.in_(tenants))
    return [_parse(row) for row in await tx.execute(query.order_by(webhook_endpoints.c.id))]


async def update_endpoint(
    tx: Transaction, tenant: str, endpoint_id: str, wanted: EndpointChange
) -> EndpointRow:
    """Change an endpoint; what is pending for it goes to the new URL. Raises ``NotFoundError``."""
    await execute(tx, _UPDATE, _values(wanted) | {"id": endpoint_id, "tenant": tenant})
    row = await get_endpoint(tx, tenant, endpoint_id)
    parameters = {"id": endpoint_id, "url": row.url, "receiver": name_receiver(tenant, row.url)}
    await execute(tx, _MOVE, parameters)
    return row


async def rotate_endpoint(tx: Transaction, tenant: str, endpoint_id: str) -> EndpointRow:
    """Replace the secret; the old one signs beside the new one for ``OVERLAP_S``."""
    parameters = {"id": endpoint_id, "tenant": tenant, "secret": create_secret()}
    await execute(tx, _ROTATE, parameters | {"overlap_s": OVERLAP_S})
    return await get_endpoint(tx, tenant, endpoint_id)


async def disable_endpoint(
    tx: Transaction, tenant: str, endpoint_id: str, reason: str
) -> EndpointRow:
    """Send nothing more; what is pending ends. A second time keeps the first reason."""
    await execute(tx, _DISABLE, {"id": endpoint_id, "tenant": tenant, "reason": reason})
    row = await get_endpoint(tx, tenant, endpoint_id)
    await end_pending(tx, [row.id])
    return row


async def enable_endpoint(tx: Transaction, tenant: str, endpoint_id: str) -> EndpointRow:
    """Send again, from now on and at once; its failures so far are forgotten."""
    await execute(tx, _ENABLE, {"id": endpoint_id, "tenant": tenant})
    row = await get_endpoint(tx, tenant, endpoint_id)
    await clear_failures(tx, [name_receiver(tenant, row.url)])
    return row


async def delete_endpoint(tx: Transaction, tenant: str, endpoint_id: str) -> None:
    """Remove an endpoint and its secrets; what is pending ends. Raises ``NotFoundError``."""
    parameters = {"id": endpoint_id, "tenant": tenant}
    if (await execute(tx, _DELETE, parameters)).rowcount == 0:
        await get_endpoint(tx, tenant, endpoint_id)
    await end_pending(tx, [endpoint_id])


async def record_successes(tx: Transaction, ids: Iterable[str]) -> None:
    """Note that these took an event."""
    if rows := [{"id": endpoint_id} for endpoint_id in sorted(ids)]:
        await execute(tx, _WELL, {"rows": pack(rows)})


async def record_failures(
    tx: Transaction, ids: Iterable[str], *, gone: Collection[str], hopeless_s: float
) -> list[str]:
    """Note failures; return those that are disabled: ``gone`` ones, and those that only fail."""
    rows = [{"id": each, "gone": int(each in gone)} for each in sorted(ids)]
    if not rows:
        return []
    parameters = {
        "rows": pack(rows),
        "hopeless_s": hopeless_s,
        "gone_reason": _GONE,
        "hopeless_reason": _HOPELESS,
    }
    found = await execute(tx, _ILL, parameters)
    return [row.id for row in found if row.disabled_at is not None]


async def end_pending(tx: Transaction, ids: Iterable[str]) -> None:
    """End what is pending for these endpoints; what is in flight is recorded when it comes back."""
    if rows := [{"id": endpoint_id} for endpoint_id in ids]:
        await execute(tx, _END_PENDING, {"rows": pack(rows)})


def _values(wanted: EndpointChange) -> dict[str, Any]:
    events = None if wanted.events is None else " ".join(wanted.events)
    return {"url": wanted.url, "events": events, "description": wanted.description}


def _parse(row: Row[Any]) -> EndpointRow:
    check_owner(row.tenant)
    values = dict(row._mapping)  # noqa: SLF001  # public in spite of its name
    values["events"] = None if row.events is None else row.events.split(" ")
    return EndpointRow(**values)


_ADD = """
INSERT INTO webhook_endpoints (id, tenant, url, description, events, secret, created_at, updated_at)
SELECT :id, :tenant, :url, :description, :events, :secret, {now}, {now}
WHERE (SELECT count(*) FROM webhook_endpoints WHERE tenant = :tenant) < :most
"""

_UPDATE = """
UPDATE webhook_endpoints
SET url = :url, description = :description, events = :events, updated_at = {now}
WHERE id = :id AND tenant = :tenant
"""

_MOVE = """
UPDATE deliveries SET url = :url, receiver = :receiver
WHERE endpoint_id = :id AND endpoint_id <> '' AND state = 'pending' AND url <> :url
"""

_ROTATE = """
UPDATE webhook_endpoints SET old_secret = secret, old_secret_until_at = {now} + :overlap_s,
    secret = :secret, updated_at = {now}
WHERE id = :id AND tenant = :tenant
"""

_DISABLE = """
UPDATE webhook_endpoints
SET disabled_at = {now}, disabled_reason = :reason, updated_at = {now}
WHERE id = :id AND tenant = :tenant AND disabled_at IS NULL
"""

_ENABLE = """
UPDATE webhook_endpoints SET disabled_at = NULL, disabled_reason = NULL, failing_since_at = NULL,
    updated_at = {now}
WHERE id = :id AND tenant = :tenant
"""

_DELETE = "DELETE FROM webhook_endpoints WHERE id = :id AND tenant = :tenant"

_WELL = """
UPDATE webhook_endpoints SET failing_since_at = NULL
WHERE failing_since_at IS NOT NULL AND id IN (SELECT id FROM {rows(id text)} c)
"""

_ILL = """
WITH held AS MATERIALIZED (
    SELECT p.id AS held_id, c.gone FROM webhook_endpoints p
    JOIN {rows(id text, gone integer)} c ON c.id = p.id ORDER BY p.id {lock p})
UPDATE webhook_endpoints SET
    failing_since_at = coalesce(failing_since_at, {now}),
    disabled_at = CASE WHEN disabled_at IS NOT NULL THEN disabled_at
        WHEN gone = 1 OR failing_since_at <= {now} - :hopeless_s THEN {now} END,
    disabled_reason = CASE WHEN disabled_at IS NOT NULL THEN disabled_reason
        WHEN gone = 1 THEN :gone_reason
        WHEN failing_since_at <= {now} - :hopeless_s THEN :hopeless_reason END
FROM held WHERE webhook_endpoints.id = held_id
RETURNING id, disabled_at
"""

_END_PENDING = """
UPDATE deliveries SET state = 'dead', finished_at = {now},
    reason = 'the endpoint is disabled or deleted'
WHERE state = 'pending' AND endpoint_id <> '' AND (worker IS NULL OR due_at <= {now})
  AND endpoint_id IN (SELECT id FROM {rows(id text)} c)
"""
