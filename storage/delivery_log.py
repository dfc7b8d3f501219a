"""The log of webhook deliveries, and sending again what is in it: one, or all of a time."""

from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Row, select

from contract.errors import ConflictError, NotFoundError
from storage.database import Transaction
from storage.deliveries import DeliveryAttempt
from storage.receivers import clear_failures
from storage.statements import execute
from storage.tables import deliveries, delivery_attempts, events
from storage.tenancy import check_owner

__all__ = [
    "AttemptRow",
    "DeliveryRow",
    "DeliveryState",
    "Redelivery",
    "get_delivery",
    "list_deliveries",
    "redeliver",
    "redeliver_range",
]

DeliveryState = Literal["pending", "delivered", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow(DeliveryAttempt):
    """An attempt as recorded."""

    attempt: int
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRow:
    """A delivery as stored, with its attempts, oldest first. ``reason`` says why it is dead."""

    id: str
    tenant: str
    event_id: str
    event_type: str
    job_id: str | None
    bulk_id: str | None
    endpoint_id: str
    url: str
    state: DeliveryState
    reason: str | None
    created_at: float
    due_at: float
    finished_at: float | None
    attempts: list[AttemptRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Redelivery:
    """Which deliveries to send again: those of events since a moment, before another."""

    since_at: float
    until_at: float | None = None
    endpoint_id: str | None = None
    state: Literal["dead", "delivered", "any"] = "dead"


async def get_delivery(tx: Transaction, tenant: str, delivery_id: str) -> DeliveryRow:
    """Return one delivery. Raises ``NotFoundError``, also for another tenant's."""
    query = _select().where(deliveries.c.id == delivery_id, deliveries.c.tenant == tenant)
    rows = await _parse(tx, (await tx.execute(query)).all())
    if not rows:
        message = f"there is no delivery {delivery_id}"
        raise NotFoundError(message)
    return rows[0]


async def list_deliveries(  # noqa: PLR0913  # a filter each
    tx: Transaction,
    tenant: str,
    job_id: str | None = None,
    *,
    bulk_id: str | None = None,
    endpoint_id: str | None = None,
    state: DeliveryState | None = None,
    after: str | None = None,
    limit: int = 100,
) -> list[DeliveryRow]:
    """Return deliveries of a job, a bulk or an endpoint, newest first; ``after`` is an id seen."""
    query = _select().where(deliveries.c.tenant == tenant)
    filters = {"job_id": job_id, "endpoint_id": endpoint_id, "state": state}
    for name, value in filters.items():
        if value is not None:
            query = query.where(deliveries.c[name] == value)
    if bulk_id is not None:
        query = query.where(events.c.bulk_id == bulk_id)
    if endpoint_id is not None:
        query = query.where(deliveries.c.endpoint_id != "")  # what the index is made for
    if after is not None:
        query = query.where(deliveries.c.id < after)
    rows = await tx.execute(query.order_by(deliveries.c.id.desc()).limit(limit))
    return await _parse(tx, rows.all())


async def redeliver(tx: Transaction, tenant: str, delivery_id: str) -> DeliveryRow:
    """Send one again, now, whatever became of it; the id of its event stays.

    What is in flight is left alone. Raises ``ConflictError`` where its endpoint cannot take it.
    """
    found = await get_delivery(tx, tenant, delivery_id)
    parameters = {"tenant": tenant, "id": delivery_id}
    row = (await execute(tx, _ONE, parameters)).one_or_none()
    if row is not None:
        await clear_failures(tx, [row.receiver])
    elif (
        found.endpoint_id and not (await execute(tx, _IS_ENABLED, {"id": found.endpoint_id})).all()
    ):
        message = f"the endpoint of {delivery_id} is disabled or deleted; enable it first"
        raise ConflictError(message)
    return await get_delivery(tx, tenant, delivery_id)


async def redeliver_range(tx: Transaction, tenant: str, wanted: Redelivery) -> int:
    """Send again, now, what ``wanted`` selects; return how many. Disabled endpoints get nothing."""
    parameters = {
        "tenant": tenant,
        "since_at": wanted.since_at,
        "until_at": wanted.until_at,
        "endpoint_id": wanted.endpoint_id,
        "state": wanted.state,
    }
    names = list((await execute(tx, _RANGE, parameters)).scalars())
    await clear_failures(tx, set(names))
    return len(names)


def _select() -> Any:  # noqa: ANN401  # a Select of a dozen columns
    names = ("id", "tenant", "event_id", "job_id", "endpoint_id", "url", "state", "reason")
    moments = ("created_at", "due_at", "finished_at")
    columns = [deliveries.c[name] for name in (*names, *moments)]
    subject = (events.c.type.label("event_type"), events.c.bulk_id)
    return select(*columns, *subject).join(events, events.c.id == deliveries.c.event_id)


async def _parse(tx: Transaction, rows: "list[Row[Any]] | Any") -> list[DeliveryRow]:  # noqa: ANN401
    query = (
        select(delivery_attempts)
        .where(delivery_attempts.c.delivery_id.in_({row.id for row in rows}))
        .order_by(delivery_attempts.c.attempt)
    )
    attempts: dict[str, list[AttemptRow]] = {row.id: [] for row in rows}
    for row in await tx.execute(query) if attempts else ():
        attempts[row.delivery_id].append(
            AttemptRow(
                attempt=row.attempt,
                created_at=row.created_at,
                status=row.status,
                latency_s=row.latency_s,
                error=row.error,
                answer=row.answer,
            )
        )
    for row in rows:
        check_owner(row.tenant)
    return [DeliveryRow(**row._mapping, attempts=attempts[row.id]) for row in rows]  # noqa: SLF001


_AGAIN = """
UPDATE deliveries SET state = 'pending', failures = 0, due_at = {now}, worker = NULL,
    finished_at = NULL, reason = NULL
WHERE tenant = :tenant AND (state <> 'pending' OR worker IS NULL OR due_at <= {now})
  AND (endpoint_id = '' OR EXISTS (
    SELECT 1 FROM webhook_endpoints p WHERE p.id = endpoint_id AND p.disabled_at IS NULL))"""

_ONE = f"{_AGAIN} AND id = :id RETURNING receiver"

_RANGE = f"""{_AGAIN}
  AND created_at >= :since_at
  AND (CAST(:until_at AS double precision) IS NULL OR created_at < :until_at)
  AND (CAST(:endpoint_id AS text) IS NULL OR endpoint_id = :endpoint_id)
  AND state IN ('dead', 'delivered') AND (:state = 'any' OR state = :state)
RETURNING receiver"""

_IS_ENABLED = "SELECT id FROM webhook_endpoints WHERE id = :id AND disabled_at IS NULL"
