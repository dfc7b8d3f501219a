"""Events of bulks: what their clients follow. Written in the transaction that they are about."""

from dataclasses import dataclass

import msgspec
from sqlalchemy import select

from contract.bulks import BulkEventType
from storage.bulk_counts import Tally, sum_chunks
from storage.database import Transaction
from storage.ids import create_id
from storage.statements import execute
from storage.tables import bulk_events

__all__ = ["BulkEventRow", "add_bulk_event", "list_bulk_events"]


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
    """Write an event with the counters as this transaction sees them."""
    tally, items, _ = await sum_chunks(tx, bulk_id)
    data = {name: getattr(tally, name) for name in Tally.__dataclass_fields__} | {"items": items}
    parameters = {
        "id": create_id("evt"),
        "bulk_id": bulk_id,
        "type": kind.value,
        "data": msgspec.json.encode(data).decode(),
    }
    await execute(tx, _ADD_EVENT, parameters)


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
