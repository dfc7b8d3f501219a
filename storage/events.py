"""Events and who is to hear of them, written in the transaction of what they announce.

Terminal events: one per job and generation. Test events are about no job.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, select

from contract.errors import NotFoundError
from contract.jobs import TERMINAL, JobState
from contract.webhooks import EVENT_OF_STATE, EventType
from storage.bulk_counts import count_ended
from storage.database import Transaction
from storage.endpoints import EndpointRow, list_endpoints
from storage.ids import create_id
from storage.receivers import name_receiver
from storage.statements import execute, pack
from storage.tables import events
from storage.tenancy import check_owner

__all__ = ["ENDED", "EventRow", "add_events", "add_test_event", "get_event", "list_events"]

#: The columns that a statement which may end jobs must return for ``add_events``.
ENDED = (
    "id, tenant, state, attempt, generation, webhook_url, webhook_events, "
    "bulk_id, bulk_chunk, bulk_lines, item_count, scored_count, failed_count, usage"
)


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event as stored. ``sequence`` ascends; numbers may be missing."""

    sequence: int
    id: str
    job_id: str | None
    generation: int
    tenant: str
    type: EventType
    created_at: float


async def add_events(tx: Transaction, ended: Sequence[Row[Any]]) -> None:
    """Write the event, and the deliveries that are wanted, of every terminal row of ``ended``.

    ``ended`` are rows with the columns ``ENDED``, as the UPDATE returned them. A job's own URL gets
    the types that the job names, an endpoint those that it names; one that is disabled gets a dead
    delivery, which can be sent again.
    """
    announced = [
        (row, create_id("evt"), EVENT_OF_STATE[JobState(row.state)])
        for row in ended
        if row.state in TERMINAL
    ]
    if not announced:
        return
    await count_ended(tx, [row for row, _, _ in announced if row.bulk_id is not None])
    rows = [
        {
            "id": event_id,
            "job_id": row.id,
            "generation": row.generation,
            "tenant": row.tenant,
            "type": kind,
        }
        for row, event_id, kind in announced
    ]
    await execute(tx, _INSERT_EVENTS, {"rows": pack(rows)})
    endpoints = await list_endpoints(tx, {row.tenant for row, _, _ in announced})
    wanted = [
        _render_own(row, event_id)
        for row, event_id, kind in announced
        if row.webhook_url and (row.webhook_events is None or kind in row.webhook_events.split(" "))
    ]
    wanted += [
        _render_registered(endpoint, event_id, row.id)
        for row, event_id, kind in announced
        for endpoint in endpoints
        if endpoint.tenant == row.tenant and endpoint.wants(kind)
    ]
    if wanted:
        await execute(tx, _INSERT_DELIVERIES, {"rows": pack(wanted)})


async def add_test_event(tx: Transaction, endpoint: EndpointRow) -> tuple[str, str]:
    """Write an event that only says that it is one, for this endpoint whatever it wants.

    Return the ids of the event and of its delivery.
    """
    event = {
        "id": create_id("evt"),
        "job_id": None,
        "generation": 0,
        "tenant": endpoint.tenant,
        "type": EventType.WEBHOOK_TEST,
    }
    await execute(tx, _INSERT_EVENTS, {"rows": pack([event])})
    delivery = _render_registered(endpoint, str(event["id"]), None)
    await execute(tx, _INSERT_DELIVERIES, {"rows": pack([delivery])})
    return str(event["id"]), str(delivery["id"])


async def get_event(tx: Transaction, event_id: str) -> EventRow:
    """Return one event. Raises ``NotFoundError``."""
    row = (await tx.execute(select(events).where(events.c.id == event_id))).one_or_none()
    if row is None:
        message = f"there is no event {event_id}"
        raise NotFoundError(message)
    return _parse(row)


async def list_events(tx: Transaction, job_id: str) -> list[EventRow]:
    """Return the events of one job, oldest first."""
    query = select(events).where(events.c.job_id == job_id).order_by(events.c.sequence)
    return [_parse(row) for row in await tx.execute(query)]


def _render_own(row: Row[Any], event_id: str) -> dict[str, Any]:
    return {
        "id": create_id("dlv"),
        "event_id": event_id,
        "job_id": row.id,
        "tenant": row.tenant,
        "endpoint_id": "",
        "url": row.webhook_url,
        "receiver": name_receiver(row.tenant, row.webhook_url),
        "state": "pending",
        "reason": None,
    }


def _render_registered(endpoint: EndpointRow, event_id: str, job_id: str | None) -> dict[str, Any]:
    is_enabled = endpoint.disabled_at is None
    return {
        "id": create_id("dlv"),
        "event_id": event_id,
        "job_id": job_id,
        "tenant": endpoint.tenant,
        "endpoint_id": endpoint.id,
        "url": endpoint.url,
        "receiver": name_receiver(endpoint.tenant, endpoint.url),
        "state": "pending" if is_enabled else "dead",
        "reason": None if is_enabled else "the endpoint was disabled when this happened",
    }


def _parse(row: Row[Any]) -> EventRow:
    check_owner(row.tenant)
    return EventRow(
        row.sequence,
        row.id,
        row.job_id,
        row.generation,
        row.tenant,
        EventType(row.type),
        row.created_at,
    )


_INSERT_EVENTS = """
INSERT INTO events (id, job_id, generation, tenant, type, created_at)
SELECT id, job_id, generation, tenant, type, {now}
FROM {rows(id text, job_id text, generation integer, tenant text, type text)} r ORDER BY id
"""

_INSERT_DELIVERIES = """
INSERT INTO deliveries (id, event_id, job_id, tenant, endpoint_id, url, receiver, state, reason,
    attempt, created_at, due_at, finished_at)
SELECT id, event_id, job_id, tenant, endpoint_id, url, receiver, state, reason,
    0, {now}, {now}, CASE WHEN state <> 'pending' THEN {now} END
FROM {rows(id text, event_id text, job_id text, tenant text, endpoint_id text, url text,
    receiver text, state text, reason text)} r
"""
