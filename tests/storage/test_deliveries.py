"""Webhook deliveries: which are made, who has them, what became of them."""

import asyncio
from typing import Any

import pytest

from contract.webhooks import EventType
from storage.database import Database, Transaction
from storage.deliveries import (
    AttemptReport,
    Claimed,
    DeliveryAttempt,
    DueDelivery,
    claim_deliveries,
    record_attempts,
)
from storage.delivery_log import list_deliveries
from storage.outcomes import cancel_job
from tests.storage.factories import claim, complete, count, new_job, run_sql, submit

URL = "https://example.com/hook"


async def _claim(database: Database, *, limit: int = 10, places: int = 40) -> Claimed:
    async with database.transaction() as tx:
        return await claim_deliveries(tx, worker="w", limit=limit, lease_s=20, places=places)


async def _take(database: Database) -> list[DueDelivery]:
    return (await _claim(database)).due


async def record_attempt(
    tx: Transaction, due: DueDelivery, attempt: DeliveryAttempt, **changes: Any
) -> bool:
    """Record one attempt; tell whether the delivery was still ours."""
    report = AttemptReport(delivery=due, attempt=attempt, **({"delivered": False} | changes))
    return bool(await record_attempts(tx, [report], hopeless_s=432_000))


@pytest.mark.parametrize(
    ("events", "expected"),
    [(None, 1), (["job.succeeded"], 1), (["job.failed", "job.partial"], 0), ([], 0)],
)
async def test_only_wanted_events_are_delivered(
    database: Database, events: list[str] | None, expected: int
) -> None:
    """All of them where none are named; the event itself is written in any case."""
    await submit(database, new_job(webhook_url=URL, webhook_events=events), new_job())
    await complete(database, await claim(database))

    async with database.snapshot() as tx:
        assert await count(tx, "deliveries") == expected
        assert await count(tx, "events") == 2


async def test_a_due_delivery_has_all_that_its_body_needs(database: Database) -> None:
    """The event, and the job as it ended; nobody else gets it while the lease holds."""
    (row,) = await submit(database, new_job(webhook_url=URL))
    await complete(database, await claim(database))

    (due,) = await _take(database)

    assert (due.url, due.tenant, due.attempt) == (URL, "t", 1)
    assert due.event_type is EventType.JOB_SUCCEEDED
    assert due.job is not None
    assert (due.job.id, due.job.result) == (row.id, b'{"labels":["a"]}')
    assert due.event_at == due.job.finished_at or due.event_at > 0
    assert due.sequence > 0
    assert await _take(database) == []


async def test_a_failed_attempt_is_tried_again_later(database: Database) -> None:
    """Each attempt is recorded; delivered is the end."""
    (row,) = await submit(database, new_job(webhook_url=URL))
    async with database.transaction() as tx:
        await cancel_job(tx, "t", row.id)
    (due,) = await _take(database)
    failure = DeliveryAttempt(latency_s=0.5, status=500, answer="x" * 5000 + "\0")
    async with database.transaction() as tx:
        assert await record_attempt(tx, due, failure, delivered=False, next_attempt_s=60)
    assert await _take(database) == []
    await run_sql(database, "UPDATE deliveries SET due_at = due_at - 60")
    (again,) = await _take(database)
    success = DeliveryAttempt(latency_s=0.1, status=204, answer="ok\0")
    async with database.transaction() as tx:
        assert not await record_attempt(tx, due, success, delivered=True)
        assert await record_attempt(tx, again, success, delivered=True)
        assert not await record_attempt(tx, again, success, delivered=True)
        (stored,) = await list_deliveries(tx, "t", row.id)
        assert await list_deliveries(tx, "other", row.id) == []

    assert (again.event_id, again.attempt) == (due.event_id, 2)
    assert (stored.state, stored.url) == ("delivered", URL)
    assert [(entry.attempt, entry.status) for entry in stored.attempts] == [(1, 500), (2, 204)]
    assert len(stored.attempts[0].answer or "") == 2048
    assert stored.attempts[1].answer == "ok\ufffd"
    assert stored.finished_at is not None


async def test_a_delivery_without_a_next_attempt_is_dead(database: Database) -> None:
    """It is not taken again, and says what was wrong."""
    (row,) = await submit(database, new_job(webhook_url=URL))
    await complete(database, await claim(database))
    (due,) = await _take(database)
    async with database.transaction() as tx:
        await record_attempt(
            tx, due, DeliveryAttempt(latency_s=0, error="refused"), delivered=False
        )
        (stored,) = await list_deliveries(tx, "t", row.id)

    assert (stored.state, stored.attempts[0].error) == ("dead", "refused")
    assert await _take(database) == []


async def test_the_delivery_of_a_dead_worker_is_taken_over(database: Database) -> None:
    """After the lease; what the first reports then is fenced."""
    await submit(database, new_job(webhook_url=URL))
    await complete(database, await claim(database))
    (first,) = await _take(database)
    await run_sql(database, "UPDATE deliveries SET due_at = due_at - 100")
    (second,) = await _take(database)
    async with database.transaction() as tx:
        attempt = DeliveryAttempt(latency_s=0, status=200)
        assert not await record_attempt(tx, first, attempt, delivered=True)
        assert await record_attempt(tx, second, attempt, delivered=True)


async def test_workers_share_the_deliveries(database: Database) -> None:
    """Several claims at once get different ones; who was kept out is told to look again."""
    await submit(database, *(new_job(webhook_url=URL) for _ in range(40)))
    await complete(database, await claim(database))

    found = await asyncio.gather(*(_claim(database, limit=10, places=40) for _ in range(4)))
    rest = await _claim(database, limit=40, places=40)

    ids = [due.id for part in (*found, rest) for due in part.due]
    assert len(ids) == len(set(ids)) == 40
    assert all(part.due or part.contended for part in found)
    assert not rest.contended


async def test_busy_receivers_are_left_for_later(database: Database) -> None:
    """One slow receiver does not fill the page, nor get more than its places, until one is free."""
    urls = [f"https://{host}/hook" for host in ["slow.org"] * 9 + ["slow.organic", "fast.org"]]
    await submit(database, *(new_job(webhook_url=url) for url in urls))
    await complete(database, await claim(database))

    first = (await _claim(database, limit=5, places=3)).due
    second = (await _claim(database, limit=5, places=3)).due
    slow = next(due for due in first if due.url == urls[0])
    async with database.transaction() as tx:
        await record_attempt(tx, slow, DeliveryAttempt(latency_s=0, status=200), delivered=True)
    third = (await _claim(database, limit=5, places=3)).due

    assert sorted(due.url for due in first) == sorted([urls[-1], urls[-2], *[urls[0]] * 3])
    assert second == []
    assert [due.url for due in third] == [urls[0]]


async def test_places_hold_for_all_workers_together(database: Database) -> None:
    """However many claim at the same moment, a receiver has no more in flight than its places."""
    await submit(database, *(new_job(webhook_url=URL) for _ in range(30)))
    await complete(database, await claim(database))
    taken: set[str] = set()

    for _ in range(6):
        found = await asyncio.gather(*(_claim(database, limit=1, places=5) for _ in range(8)))
        taken |= {due.id for part in found for due in part.due}
        assert len(taken) <= 5

    assert len(taken) == 5


async def test_who_died_holds_a_place_no_longer_than_its_lease(database: Database) -> None:
    """What is claimed and never recorded is taken by another, in the same place."""
    await submit(database, *(new_job(webhook_url=URL) for _ in range(3)))
    await complete(database, await claim(database))
    [lost] = (await _claim(database, places=1)).due
    assert (await _claim(database, places=1)).due == []
    await run_sql(database, "UPDATE deliveries SET due_at = 1 WHERE worker IS NOT NULL")

    [again] = (await _claim(database, places=1)).due

    assert (again.id, again.event_id, again.attempt) == (lost.id, lost.event_id, 2)


async def test_failing_receivers_do_not_crowd_out_others(database: Database) -> None:
    """With room for one more, a receiver whose probe is in flight is passed over."""
    slow, quick = "https://slow.org/", "https://quick.org/"
    await submit(database, *(new_job(webhook_url=slow) for _ in range(3)))
    await complete(database, await claim(database))
    await submit(database, new_job(webhook_url=quick))
    await complete(database, await claim(database))
    [first] = (await _claim(database, limit=1, places=1)).due
    assert first.url == slow

    [second] = (await _claim(database, limit=1, places=1)).due

    assert second.url == quick
