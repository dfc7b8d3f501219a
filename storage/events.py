"""Terminal events: one per job and generation, written in the transaction that ends the job."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, select

from contract.errors import NotFoundError
from contract.jobs import TERMINAL, JobState
from contract.webhooks import EVENT_OF_STATE, EventType
from storage.bulk_counts import count_ended
from storage.database import Transaction
from storage.ids import create_id
from storage.statements import execute, pack
from storage.tables import events

__all__ = ["ENDED", "EventRow", "add_events", "get_event", "list_events"]

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
    job_id: str
    generation: int
    tenant: str
    type: EventType
    created_at: float


async def add_events(tx: Transaction, ended: Sequence[Row[Any]]) -> None:
    """Write the event, and the delivery where one is wanted, of every terminal row of ``ended``.

    ``ended`` are rows with the columns ``ENDED``, as the UPDATE returned them.
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
    wanted = [
        {
            "id": create_id("dlv"),
            "event_id": event_id,
            "job_id": row.id,
            "tenant": row.tenant,
            "url": row.webhook_url,
        }
        for row, event_id, kind in announced
        if row.webhook_url and (row.webhook_events is None or kind in row.webhook_events.split(" "))
    ]
    if wanted:
        await execute(tx, _INSERT_DELIVERIES, {"rows": pack(wanted)})


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


def _parse(row: Row[Any]) -> EventRow:
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
INSERT INTO deliveries (id, event_id, job_id, tenant, url, state, attempt, created_at, due_at)
SELECT id, event_id, job_id, tenant, url, 'pending', 0, {now}, {now}
FROM {rows(id text, event_id text, job_id text, tenant text, url text)} r
"""
