"""What is deleted for good, long after nobody can ask for it: tombstones, events, cached scores."""

from typing import Any

import pytest

from contract.bulks import BulkEventType
from contract.webhooks import EventType
from storage.bulk_events import add_bulk_event
from storage.bulks import NewBulk, add_bulk, delete_bulk
from storage.claims import retry_later
from storage.database import Database, Transaction
from storage.endpoints import EndpointChange, create_endpoint
from storage.events import add_test_event
from storage.forgetting import delete_job
from storage.score_cache import CacheEntry, put_cached
from storage.sweeps import collect_expired, purge_bulks, purge_events, purge_tombstones
from tests.storage.factories import claim, complete, count, new_job, run_sql, submit

_DAY_S = 86400.0
_AGE = "UPDATE {table} SET {column} = {column} - 100000"
_HOOK = "https://example.com/hook"


async def add_ended_bulk(tx: Transaction) -> str:
    """Add a bulk with everything that a client can write of it, and announce its end."""
    new = NewBulk(
        tenant="t",
        kind="bulk",
        endpoint="/v1/score",
        source=b'{"file_id":"their-file"}',
        options=b'{"parameters":{"query":"their-query"}}',
        metadata={"their": "metadata"},
        key="their-key",
        body_hash="their-hash",
        webhook_url=_HOOK,
    )
    bulk, _ = await add_bulk(tx, new)
    await tx.exec_driver_sql("UPDATE bulks SET state = 'failed', errors = '[\"their-error\"]'")
    await add_bulk_event(tx, bulk.id, BulkEventType.FAILED)
    return bulk.id


async def age(database: Database, table: str, column: str = "created_at") -> None:
    """Let every row of a table be more than a day older."""
    await run_sql(database, _AGE.format(table=table, column=column))


async def purge(database: Database, limit: int = 10) -> int:
    """Delete the events of more than a day ago."""
    async with database.transaction() as tx:
        return await purge_events(tx, older_than_s=_DAY_S, limit=limit)


async def test_old_events_about_no_job_go_with_their_deliveries(database: Database) -> None:
    """Of bulks and of tests, with every attempt; what jobs have stays with the job."""
    async with database.transaction() as tx:
        await add_ended_bulk(tx)
        endpoint = await create_endpoint(tx, "t", EndpointChange(_HOOK, None, ""))
        await add_test_event(tx, endpoint)
    await submit(database, new_job(webhook_url=_HOOK))
    await complete(database, await claim(database))
    await run_sql(
        database,
        "INSERT INTO delivery_attempts (delivery_id, attempt, created_at, latency_s)"
        " SELECT id, 1, 1, 1 FROM deliveries",
    )
    await run_sql(database, "UPDATE deliveries SET state = 'delivered'")
    young = await purge(database)
    await age(database, "events")

    purged = [await purge(database, limit=1) for _ in range(3)]

    left = await run_sql(database, "SELECT type FROM events")
    async with database.snapshot() as tx:
        counts = [await count(tx, table) for table in ("deliveries", "delivery_attempts")]
    assert (young, purged) == (0, [1, 1, 0])
    assert [row.type for row in left] == [EventType.JOB_SUCCEEDED]
    assert counts == [2, 2]  # the job's: to its own URL, and to the endpoint


async def test_an_old_event_waits_for_a_delivery_that_is_due(database: Database) -> None:
    """What is still to be sent is not dropped; the oldest that can go does."""
    async with database.transaction() as tx:
        await add_ended_bulk(tx)
    await age(database, "events")
    async with database.transaction() as tx:
        endpoint = await create_endpoint(tx, "t", EndpointChange(_HOOK, None, ""))
        event_id, delivery_id = await add_test_event(tx, endpoint)
    await run_sql(database, "UPDATE deliveries SET state = 'dead' WHERE id = :id", id=delivery_id)
    await age(database, "events")

    early = await purge(database, limit=1)
    await run_sql(database, "UPDATE deliveries SET state = 'dead'")
    late = await purge(database)

    left = await run_sql(database, "SELECT id FROM events")
    assert (early, late, left) == (1, 1, [])
    assert event_id


async def test_a_deleted_bulk_keeps_nothing_of_its_client(database: Database) -> None:
    """The tombstone says that there was one, and no word of what was asked."""
    async with database.transaction() as tx:
        bulk_id = await add_ended_bulk(tx)
        await delete_bulk(tx, "t", bulk_id)

    (row,) = await run_sql(database, "SELECT * FROM bulks")
    async with database.snapshot() as tx:
        counts = [await count(tx, each) for each in ("events", "bulk_events", "deliveries")]
    assert "their" not in repr(tuple(row))
    assert _HOOK not in repr(tuple(row))
    assert (row.id, row.state, counts) == (bulk_id, "failed", [0, 0, 0])


async def test_old_tombstones_of_bulks_are_purged(database: Database) -> None:
    """Long after the deletion the row goes; a bulk that is not deleted stays, however old."""
    async with database.transaction() as tx:
        kept = await add_ended_bulk(tx)
    await run_sql(database, "UPDATE bulks SET key = NULL")
    async with database.transaction() as tx:
        await delete_bulk(tx, "t", await add_ended_bulk(tx))
        young = await purge_bulks(tx, older_than_s=_DAY_S, limit=10)
    for column in ("created_at", "deleted_at"):
        await age(database, "bulks", column)

    async with database.transaction() as tx:
        old = await purge_bulks(tx, older_than_s=_DAY_S, limit=10)

    left = await run_sql(database, "SELECT id FROM bulks")
    assert (young, old, [row.id for row in left]) == (0, 1, [kept])


async def test_a_job_without_scores_takes_no_entry(database: Database) -> None:
    """One that was cancelled while it ran displaces nothing, and is displaced by whoever has."""
    good, cancelled, late = await submit(database, count=3)
    await complete(database, await claim(database))
    await run_sql(database, "UPDATE jobs SET state = 'cancelled' WHERE id = :id", id=cancelled.id)

    async def put(job_id: str, *, hidden: bool) -> str:
        async with database.transaction() as tx:
            await put_cached(tx, [CacheEntry("key", job_id, 0, 1, has_hidden=hidden)])
        (row,) = await run_sql(database, "SELECT job_id FROM score_cache")
        return str(row.job_id)

    first = await put(good.id, hidden=False)
    kept = await put(cancelled.id, hidden=True)
    await run_sql(database, "UPDATE score_cache SET job_id = :id, has_hidden = 1", id=cancelled.id)
    replaced = await put(late.id, hidden=False)

    assert (first, kept, replaced) == (good.id, good.id, late.id)


async def test_cached_scores_go_with_their_job(database: Database) -> None:
    """A purged job leaves no entry in the score cache; those of others stay."""
    gone, kept = await submit(database, count=2)
    await complete(database, await claim(database))
    entries = [CacheEntry(f"key-{job.id}", job.id, 0, 1, has_hidden=False) for job in (gone, kept)]
    async with database.transaction() as tx:
        await put_cached(tx, entries)
        await delete_job(tx, "t", gone.id)
    await age(database, "jobs", "deleted_at")

    async with database.transaction() as tx:
        purged = await purge_tombstones(tx, older_than_s=_DAY_S, limit=10)

    left: list[Any] = await run_sql(database, "SELECT job_id FROM score_cache")
    assert (purged, [row.job_id for row in left]) == (1, [kept.id])


@pytest.mark.parametrize("how", ["deleted", "expired"])
async def test_a_deleted_job_keeps_no_history(database: Database, how: str) -> None:
    """Neither what its attempts failed with, nor the request that it came from."""
    (job,) = await submit(database, new_job(expires_after_s=0.0, origin='{"request":"their-id"}'))
    (held,) = await claim(database)
    async with database.transaction() as tx:
        await retry_later(tx, [held.claim], b'{"detail":"their-error"}', 0.0)
    await complete(database, await claim(database))
    before = await run_sql(
        database,
        "SELECT j.id FROM jobs j JOIN attempts a ON a.job_id = j.id"
        " WHERE j.origin LIKE '%their-id%' AND a.error LIKE '%their-error%'",
    )

    async with database.transaction() as tx:
        if how == "deleted":
            await delete_job(tx, "t", job.id)
        else:
            await collect_expired(tx, limit=10)

    (row,) = await run_sql(database, "SELECT deleted_at, origin FROM jobs")
    async with database.snapshot() as tx:
        attempts = await count(tx, "attempts")
    assert len(before) == 1
    assert row.deleted_at is not None
    assert (row.origin, attempts) == (None, 0)
