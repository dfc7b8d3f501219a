"""Bulk rows: add, read, list, and every change of a bulk's state.

Who works on a bulk (reads its input, writes its output) holds it by a lease and is fenced by
``attempt``, as jobs are. Their counters are in ``bulk_counts``, their lines in ``bulk_chunks``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Row, select

from contract.bulks import ENDED_BULKS, BulkEventType, BulkState
from contract.errors import ConflictError, GoneError, IdempotencyConflictError, NotFoundError
from storage.bulk_events import add_bulk_event
from storage.bulk_tables import bulks
from storage.database import Transaction
from storage.ids import create_id
from storage.statements import execute
from storage.tables import PARKED_AT
from storage.tenancy import check_owner

__all__ = [
    "BulkRow",
    "NewBulk",
    "add_bulk",
    "cancel_bulk",
    "change_bulk",
    "check_same",
    "claim_bulk",
    "delete_bulk",
    "expire_bulks",
    "find_bulk",
    "get_bulk",
    "has_work",
    "list_bulks",
    "open_bulks",
    "park_jobs",
    "pause_bulk",
    "release_bulk",
    "reopen_bulk",
    "rewind_index",
]

_EVENT_OF_STATE = {
    BulkState.RUNNING: BulkEventType.IN_PROGRESS,
    BulkState.COMPLETED: BulkEventType.COMPLETED,
    BulkState.FAILED: BulkEventType.FAILED,
    BulkState.CANCELLED: BulkEventType.CANCELLED,
    BulkState.EXPIRED: BulkEventType.EXPIRED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBulk:
    """What a client asked for. ``source`` and ``options`` are JSON of the caller's."""

    tenant: str
    kind: str
    endpoint: str
    source: bytes
    options: bytes
    metadata: Mapping[str, str]
    key: str | None = None
    body_hash: str | None = None
    deadline_s: float | None = None
    webhook_url: str | None = None
    webhook_events: Sequence[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRow:
    """A bulk as stored."""

    id: str
    tenant: str
    kind: str
    state: BulkState
    endpoint: str
    source: str
    options: str
    metadata: dict[str, str]
    key: str | None
    body_hash: str | None
    errors: str | None
    total_lines: int
    refused_lines: int
    ingested_lines: int
    ingested_items: int
    indexed_lines: int
    output_file_id: str | None
    error_file_id: str | None
    attempt: int
    generation: int
    progress_step: int
    webhook_url: str | None
    webhook_events: str | None
    lease_until_at: float | None
    paused_at: float | None
    final_state: str | None
    created_at: float
    started_at: float | None
    finalizing_at: float | None
    cancelling_at: float | None
    finished_at: float | None
    deadline_at: float | None
    deleted_at: float | None


async def add_bulk(tx: Transaction, new: NewBulk) -> tuple[BulkRow, bool]:
    """Record a bulk; return it, and whether its key had been used before for the same body.

    Raises ``IdempotencyConflictError`` where the key's first body was another.
    """
    parameters = {
        "id": create_id("blk"),
        "tenant": new.tenant,
        "kind": new.kind,
        "endpoint": new.endpoint,
        "source": new.source.decode(),
        "options": new.options.decode(),
        "metadata": msgspec.json.encode(dict(new.metadata)).decode(),
        "key": new.key,
        "body_hash": new.body_hash,
        "deadline_s": new.deadline_s,
        "webhook_url": new.webhook_url,
        "webhook_events": None if new.webhook_events is None else " ".join(new.webhook_events),
    }
    added = (await execute(tx, _ADD, parameters)).scalar_one_or_none()
    if added is not None:
        return await get_bulk(tx, new.tenant, added), False
    return check_same(await find_bulk(tx, new.tenant, new.key or ""), new.body_hash), True


def check_same(found: BulkRow | None, body_hash: str | None) -> BulkRow:
    """Return the bulk of a key. Raises ``IdempotencyConflictError`` for one of another body."""
    if found is None or found.body_hash != body_hash:
        message = "this key was used before for another bulk"
        raise IdempotencyConflictError(message)
    return found


async def get_bulk(tx: Transaction, tenant: str, bulk_id: str) -> BulkRow:
    """Return one bulk. Raises ``NotFoundError``, and ``GoneError`` for one that was deleted."""
    query = select(bulks).where(bulks.c.id == bulk_id, bulks.c.tenant == tenant)
    row = (await tx.execute(query)).one_or_none()
    if row is None:
        message = f"there is no bulk {bulk_id}"
        raise NotFoundError(message)
    if row.deleted_at is not None:
        message = f"bulk {bulk_id} was deleted"
        raise GoneError(message)
    return _parse(row)


async def find_bulk(tx: Transaction, tenant: str, key: str) -> BulkRow | None:
    """Return the bulk that was submitted under ``key``, unless it was deleted."""
    query = select(bulks).where(
        bulks.c.tenant == tenant, bulks.c.key == key, bulks.c.deleted_at.is_(None)
    )
    row = (await tx.execute(query)).one_or_none()
    return None if row is None else _parse(row)


async def list_bulks(
    tx: Transaction, tenant: str, *, kind: str | None, after: str | None, limit: int
) -> list[BulkRow]:
    """Return bulks, newest first; ``after`` is the last id seen."""
    query = select(bulks).where(bulks.c.tenant == tenant, bulks.c.deleted_at.is_(None))
    if kind is not None:
        query = query.where(bulks.c.kind == kind)
    if after is not None:
        query = query.where(bulks.c.id < after)
    return [_parse(row) for row in await tx.execute(query.order_by(bulks.c.id.desc()).limit(limit))]


async def open_bulks(tx: Transaction, *, limit: int = 500) -> list[BulkRow]:
    """Return bulks that have not ended, oldest first."""
    ended = [state.value for state in ENDED_BULKS]
    query = select(bulks).where(bulks.c.state.not_in(ended), bulks.c.finished_at.is_(None))
    return [_parse(row) for row in await tx.execute(query.order_by(bulks.c.id).limit(limit))]


async def expire_bulks(tx: Transaction) -> int:
    """Stop bulks whose completion window has passed; return how many."""
    return (await execute(tx, _EXPIRE, {})).rowcount


async def has_work(tx: Transaction) -> bool:
    """Whether ``claim_bulk`` or a sweep would find something: asked before anything is locked."""
    return (await execute(tx, _HAS_WORK, {})).one_or_none() is not None


async def claim_bulk(tx: Transaction, *, lease_s: float) -> BulkRow | None:
    """Take a bulk that has work for its reader: input to read, output to write, cache to fill.

    One reader at a time: a second takes it only when the first one's lease has run out. Tenants
    of whom fewer bulks are being read come first.
    """
    row = (await execute(tx, _CLAIM, {"lease_s": lease_s})).one_or_none()
    return None if row is None else await get_bulk(tx, row.tenant, row.id)


async def release_bulk(tx: Transaction, bulk: BulkRow) -> None:
    """Give a claimed bulk back, whatever became of it meanwhile; another may take it at once."""
    statement = "UPDATE bulks SET lease_until_at = NULL WHERE id = :id AND attempt = :attempt"
    await execute(tx, statement, {"id": bulk.id, "attempt": bulk.attempt})


async def change_bulk(
    tx: Transaction,
    bulk: BulkRow,
    *,
    fenced: bool = True,
    lease_s: float | None = None,
    state: BulkState | None = None,
    **values: Any,  # noqa: ANN401  # columns of the row
) -> bool:
    """Write columns, renew the lease or end it (``lease_s`` None), and write the state's event.

    ``fenced`` asks that the reader still holds the bulk. Either way its state must still be what
    ``bulk`` says. False where not: nothing was written, and the reader stops.
    """
    columns = dict(values)
    moments = ["lease_until_at = {now} + :lease_s"] if fenced else []
    if state is not None:
        columns["state"] = state.value
        moments += [f"{name} = {{now}}" for name in _moments_of(state)]
    sets = ", ".join([*moments, *(f"{name} = :{name}" for name in columns)])
    guard = "AND attempt = :held_attempt" if fenced else ""
    statement = f"""
        UPDATE bulks SET {sets} WHERE id = :held_id AND state = :held_state
        AND deleted_at IS NULL {guard} RETURNING id"""  # noqa: S608  # names of ours
    parameters = columns | {"held_id": bulk.id, "held_state": bulk.state.value}
    if fenced:
        parameters |= {"held_attempt": bulk.attempt, "lease_s": lease_s}
    if (await execute(tx, statement, parameters)).one_or_none() is None:
        return False
    if state in _EVENT_OF_STATE:
        await add_bulk_event(tx, bulk.id, _EVENT_OF_STATE[state])
    return True


async def cancel_bulk(tx: Transaction, tenant: str, bulk_id: str) -> BulkRow:
    """Ask a bulk to stop. Raises ``ConflictError`` for one that has ended; twice is harmless."""
    while (row := await get_bulk(tx, tenant, bulk_id)).state is not BulkState.CANCELLING:
        if row.state in ENDED_BULKS:
            message = f"bulk {bulk_id} is {row.state.value}; it cannot be cancelled any more"
            raise ConflictError(message)
        # Not changed where its reader moved it on since it was read: then it is read again.
        await change_bulk(
            tx,
            row,
            fenced=False,
            state=BulkState.CANCELLING,
            final_state=BulkState.CANCELLED.value,
            paused_at=None,
        )
    return row


async def pause_bulk(tx: Transaction, tenant: str, bulk_id: str, *, paused: bool) -> BulkRow:
    """Keep the workers from a bulk's queued jobs, or give them back. Raises ``ConflictError``."""
    row = await get_bulk(tx, tenant, bulk_id)
    if row.state not in {BulkState.VALIDATING, BulkState.RUNNING}:
        verb = "paused" if paused else "resumed"
        message = f"bulk {bulk_id} is {row.state.value}; it cannot be {verb}"
        raise ConflictError(message)
    if paused != (row.paused_at is not None):
        value = "{now}" if paused else "NULL"
        await execute(tx, f"UPDATE bulks SET paused_at = {value} WHERE id = :id", {"id": bulk_id})  # noqa: S608
        await execute(tx, _PARK if paused else _UNPARK, {"bulk_id": bulk_id})
    return await get_bulk(tx, tenant, bulk_id)


async def park_jobs(tx: Transaction, bulk_id: str) -> None:
    """Keep the workers from what came back into the queue while its bulk is paused."""
    await execute(tx, _PARK, {"bulk_id": bulk_id})


async def rewind_index(tx: Transaction, bulk_id: str, first_line: int) -> None:
    """Have the cache look again at the lines from ``first_line`` on: some were given new jobs."""
    statement = "UPDATE bulks SET indexed_lines = :line WHERE id = :id AND indexed_lines > :line"
    await execute(tx, statement, {"id": bulk_id, "line": first_line})


async def reopen_bulk(tx: Transaction, bulk: BulkRow) -> bool:
    """Let an ended bulk run again: items of it are tried anew, and it will end once more.

    False where it has not ended.
    """
    statement = """
        UPDATE bulks SET state = 'running', finished_at = NULL, finalizing_at = NULL,
            cancelling_at = NULL, final_state = NULL, deadline_at = NULL, indexed_lines = 0,
            lease_until_at = NULL, generation = generation + 1, progress_step = 0
        WHERE id = :id AND state = :state RETURNING id"""
    parameters = {"id": bulk.id, "state": bulk.state.value}
    return (await execute(tx, statement, parameters)).one_or_none() is not None


async def delete_bulk(tx: Transaction, tenant: str, bulk_id: str) -> None:
    """Take an ended bulk out of sight; its jobs' retention ends now, its events are dropped.

    What its client wrote goes at once, and with the events their deliveries.

    Raises ``ConflictError`` for one that has not ended.
    """
    row = await get_bulk(tx, tenant, bulk_id)
    if row.state not in ENDED_BULKS:
        message = f"bulk {bulk_id} is {row.state.value}; cancel it first"
        raise ConflictError(message)
    await execute(tx, _DELETE_JOBS, {"bulk_id": bulk_id})
    await execute(tx, "DELETE FROM bulk_chunks WHERE bulk_id = :id", {"id": bulk_id})
    await execute(tx, "DELETE FROM events WHERE bulk_id = :id", {"id": bulk_id})
    await execute(tx, "DELETE FROM bulk_events WHERE bulk_id = :id", {"id": bulk_id})
    await execute(tx, _DELETE, {"id": bulk_id})


def _moments_of(state: BulkState) -> list[str]:
    names = {
        BulkState.RUNNING: ["started_at"],
        BulkState.FINALIZING: ["finalizing_at"],
        BulkState.CANCELLING: ["cancelling_at"],
    }
    return ["finished_at"] if state in ENDED_BULKS else names[state]


def _parse(row: Row[Any]) -> BulkRow:
    check_owner(row.tenant)
    values = dict(row._mapping)  # noqa: SLF001  # public in spite of its name
    return BulkRow(**(values | {"state": BulkState(row.state)}))


_ADD = """
INSERT INTO bulks (id, tenant, kind, state, endpoint, source, options, metadata, key, body_hash,
    total_lines, refused_lines, ingested_lines, ingested_items, indexed_lines, attempt,
    created_at, deadline_at, webhook_url, webhook_events)
VALUES (:id, :tenant, :kind, 'validating', :endpoint, :source, :options, :metadata, :key,
    :body_hash, 0, 0, 0, 0, 0, 0, {now}, {now} + :deadline_s, :webhook_url, :webhook_events)
ON CONFLICT (tenant, key) DO NOTHING RETURNING id
"""

#: Input to read or output to write: what clients wait for.
_WAITING = """(b.state IN ('validating', 'finalizing')
           OR (b.state = 'running' AND b.ingested_lines < b.total_lines))"""

#: Scores that the cache does not know yet, also while later lines still run.
_UNINDEXED = """(b.indexed_lines < b.ingested_lines
           AND (b.state IN ('completed', 'cancelled', 'expired')
                OR (b.state = 'running' AND EXISTS (
                    SELECT 1 FROM bulk_chunks c WHERE c.bulk_id = b.id
                    AND c.first_line = b.indexed_lines AND c.open_jobs = 0))))"""

_DUE = f"""(b.lease_until_at IS NULL OR b.lease_until_at < {{now}}) AND b.deleted_at IS NULL
      AND ({_WAITING} OR {_UNINDEXED})"""

_HAS_WORK = f"""
SELECT 1 FROM bulks b
WHERE {_DUE} OR b.state IN ('validating', 'running', 'cancelling') LIMIT 1
"""  # noqa: S608  # constants of ours

_EXPIRE = """
UPDATE bulks SET state = 'cancelling', final_state = 'expired', cancelling_at = {now}
WHERE state IN ('validating', 'running') AND deadline_at < {now}
"""

_CLAIM = f"""
WITH due AS MATERIALIZED (
    SELECT b.id AS due_id FROM bulks b
    WHERE {_DUE}
    ORDER BY CASE WHEN {_WAITING} THEN 0 ELSE 1 END,
        (SELECT count(*) FROM bulks o WHERE o.tenant = b.tenant AND o.lease_until_at > {{now}}),
        b.id
    LIMIT 1 {{skip b}})
UPDATE bulks SET attempt = attempt + 1, lease_until_at = {{now}} + :lease_s
FROM due WHERE id = due_id
RETURNING id, tenant
"""  # noqa: S608  # constants of ours

_PARK = f"""
UPDATE jobs SET available_at = {PARKED_AT}
WHERE bulk_id = :bulk_id AND state = 'queued' AND available_at < {PARKED_AT}
"""  # noqa: S608  # constants of ours

_UNPARK = f"""
UPDATE jobs SET available_at = {{now}}
WHERE bulk_id = :bulk_id AND state = 'queued' AND available_at >= {PARKED_AT}
"""  # noqa: S608  # constants of ours

_DELETE = """
UPDATE bulks SET
    deleted_at = {now}, key = NULL, body_hash = NULL, source = '{}', options = '{}',
    metadata = '{}', errors = NULL, webhook_url = NULL
WHERE id = :id
"""

_DELETE_JOBS = """
UPDATE jobs SET expires_at = {now} WHERE bulk_id = :bulk_id AND deleted_at IS NULL
"""
