"""Events and who is to hear of them, written in the transaction of what they announce.

Terminal events: one per job or bulk and generation. Test events are about neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row, select

from contract.jobs import TERMINAL, JobState
from contract.webhooks import EVENT_OF_STATE, EventType
from storage.bulk_counts import count_ended
from storage.database import Transaction
from storage.endpoints import EndpointRow, list_endpoints
from storage.ids import create_id
from storage.receivers import name_receiver
from storage.statements import execute, pack
from storage.tables import BULK_END, events
from storage.tenancy import check_owner

__all__ = [
    "ENDED",
    "Announcement",
    "EventRow",
    "add_events",
    "add_test_event",
    "announce",
    "list_events",
]

#: The columns that a statement which may end jobs must return for ``add_events``.
ENDED = (
    "id, tenant, state, attempt, generation, webhook_url, webhook_events, "
    "bulk_id, bulk_chunk, bulk_lines, item_count, scored_count, failed_count, usage"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What happened to a job or a bulk. ``own_url`` is its own webhook, ``own_events`` its filter.

    Endpoints hear of it unless ``is_part``: of a job of a bulk, the bulk speaks.
    """

    tenant: str
    type: EventType
    generation: int
    job_id: str | None = None
    bulk_id: str | None = None
    own_url: str | None = None
    own_events: str | None = None
    is_part: bool = False
    id: str = field(default_factory=lambda: create_id("evt"))

    @property
    def is_wanted(self) -> bool:
        """Whether its own webhook asked for it."""
        if not self.own_url:
            return False
        return self.own_events is None or self.type in self.own_events.split(" ")


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

    ``ended`` are rows with the columns ``ENDED``, as the UPDATE returned them.
    """
    terminal = [row for row in ended if row.state in TERMINAL]
    await count_ended(tx, [row for row in terminal if row.bulk_id is not None])
    announcements = [
        Announcement(
            tenant=row.tenant,
            type=EVENT_OF_STATE[JobState(row.state)],
            generation=row.generation,
            job_id=row.id,
            own_url=row.webhook_url,
            own_events=row.webhook_events,
            is_part=row.bulk_id is not None,
        )
        for row in terminal
    ]
    await announce(tx, announcements)


async def announce(tx: Transaction, announcements: Sequence[Announcement]) -> None:
    """Write these events, and a delivery to each that wants one.

    A second end of one run of a bulk is left out: an earlier version runs one again without saying
    that it is another run.

    An own URL gets the types that its job or bulk names, an endpoint those that it names; one that
    is disabled gets a dead delivery, which can be sent again.
    """
    if not announcements:
        return
    rows = [
        {
            "id": each.id,
            "job_id": each.job_id,
            "bulk_id": each.bulk_id,
            "generation": each.generation,
            "tenant": each.tenant,
            "type": each.type,
        }
        for each in announcements
    ]
    written = {row.id for row in await execute(tx, _INSERT_EVENTS, {"rows": pack(rows)})}
    announcements = [each for each in announcements if each.id in written]
    public = [each for each in announcements if not each.is_part]
    endpoints = await list_endpoints(tx, {each.tenant for each in public}) if public else []
    wanted = [_render_own(each) for each in announcements if each.is_wanted]
    wanted += [
        _render_registered(endpoint, each)
        for each in public
        for endpoint in endpoints
        if endpoint.tenant == each.tenant and endpoint.wants(each.type)
    ]
    if wanted:
        await execute(tx, _INSERT_DELIVERIES, {"rows": pack(wanted)})


async def add_test_event(tx: Transaction, endpoint: EndpointRow) -> tuple[str, str]:
    """Write an event that only says that it is one, for this endpoint whatever it wants.

    Return the ids of the event and of its delivery.
    """
    test = Announcement(
        tenant=endpoint.tenant, type=EventType.WEBHOOK_TEST, generation=0, is_part=True
    )
    await announce(tx, [test])
    delivery = _render_registered(endpoint, test)
    await execute(tx, _INSERT_DELIVERIES, {"rows": pack([delivery])})
    return test.id, str(delivery["id"])


async def list_events(tx: Transaction, job_id: str) -> list[EventRow]:
    """Return the events of one job, oldest first."""
    query = select(events).where(events.c.job_id == job_id).order_by(events.c.sequence)
    return [_parse(row) for row in await tx.execute(query)]


def _render_own(about: Announcement) -> dict[str, Any]:
    url = str(about.own_url)
    return {
        "id": create_id("dlv"),
        "event_id": about.id,
        "job_id": about.job_id,
        "tenant": about.tenant,
        "endpoint_id": "",
        "url": url,
        "receiver": name_receiver(about.tenant, url),
        "state": "pending",
        "reason": None,
    }


def _render_registered(endpoint: EndpointRow, about: Announcement) -> dict[str, Any]:
    is_enabled = endpoint.disabled_at is None
    return {
        "id": create_id("dlv"),
        "event_id": about.id,
        "job_id": about.job_id,
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


_INSERT_EVENTS = f"""
INSERT INTO events (id, job_id, bulk_id, generation, tenant, type, created_at)
SELECT id, job_id, bulk_id, generation, tenant, type, {{now}}
FROM {{rows(id text, job_id text, bulk_id text, generation integer, tenant text, type text)}} r
WHERE true ORDER BY id
ON CONFLICT (bulk_id, generation) WHERE {BULK_END} DO NOTHING RETURNING id
"""  # noqa: S608  # constants of ours

_INSERT_DELIVERIES = """
INSERT INTO deliveries (id, event_id, job_id, tenant, endpoint_id, url, receiver, state, reason,
    attempt, created_at, due_at, finished_at)
SELECT id, event_id, job_id, tenant, endpoint_id, url, receiver, state, reason,
    0, {now}, {now}, CASE WHEN state <> 'pending' THEN {now} END
FROM {rows(id text, event_id text, job_id text, tenant text, endpoint_id text, url text,
    receiver text, state text, reason text)} r
"""
