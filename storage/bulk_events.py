"""Events of bulks: what their clients follow. Written in the transaction that they are about.

All but ``batch.in_progress`` go to webhooks too, as events of jobs do; this table keeps the
counters as they were.
"""

from dataclasses import dataclass

import msgspec
from sqlalchemy import select

from contract.bulks import BulkEventType
from contract.webhooks import EventType
from storage.bulk_counts import read_counts
from storage.bulk_tables import bulk_events, bulks
from storage.database import Transaction
from storage.events import Announcement, announce
from storage.ids import create_id
from storage.statements import execute

__all__ = ["BulkEventRow", "add_bulk_event", "add_progress", "list_bulk_events"]


@dataclass(frozen=True, slots=True)
class BulkEventRow:
    """An event of a bulk. ``data`` is JSON: the counters as they were."""

    sequence: int
    id: str
    bulk_id: str
    type: BulkEventType
    data: str
    created_at: float


async def add_bulk_event(tx: Transaction, bulk_id: str, kind: BulkEventType) -> None:
    """Write an event with the counters as this transaction sees them, and whom it goes to."""
    bulk = (await tx.execute(select(bulks).where(bulks.c.id == bulk_id))).one()
    parameters = {
        "id": create_id("evt"),
        "bulk_id": bulk_id,
        "type": kind.value,
        "data": msgspec.json.encode(await read_counts(tx, bulk_id)).decode(),
    }
    await execute(tx, _ADD_EVENT, parameters)
    if kind is BulkEventType.IN_PROGRESS:
        return
    announcement = Announcement(
        id=str(parameters["id"]),
        tenant=bulk.tenant,
        type=EventType(kind.value),
        generation=bulk.generation,
        bulk_id=bulk_id,
        own_url=bulk.webhook_url,
        own_events=bulk.webhook_events,
    )
    await announce(tx, [announcement])


async def add_progress(tx: Transaction, bulk_id: str, step: int) -> bool:
    """Write that a running bulk has come to this step, unless somebody has; whether it was us.

    Steps only ascend, so that their number bounds the events, whatever the number of processes.
    """
    parameters = {"id": bulk_id, "step": step}
    if (await execute(tx, _STEP, parameters)).one_or_none() is None:
        return False
    await add_bulk_event(tx, bulk_id, BulkEventType.PROGRESS)
    return True


async def list_bulk_events(
    tx: Transaction, bulk_id: str, *, after: int = 0, limit: int = 1000
) -> list[BulkEventRow]:
    """Return a bulk's events after a sequence number, oldest first."""
    query = (
        select(bulk_events)
        .where(bulk_events.c.bulk_id == bulk_id, bulk_events.c.sequence > after)
        .order_by(bulk_events.c.sequence)
        .limit(limit)
    )
    return [
        BulkEventRow(
            row.sequence, row.id, row.bulk_id, BulkEventType(row.type), row.data, row.created_at
        )
        for row in await tx.execute(query)
    ]


_ADD_EVENT = """
INSERT INTO bulk_events (id, bulk_id, type, data, created_at)
VALUES (:id, :bulk_id, :type, :data, {now})
"""

_STEP = """
UPDATE bulks SET progress_step = :step
WHERE id = :id AND state = 'running' AND progress_step < :step RETURNING id
"""
