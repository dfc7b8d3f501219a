"""Registered endpoints: who hears of what, with which secrets, and when they are disabled."""

from typing import Any

import pytest

from contract.errors import ConflictError, NotFoundError, QuotaExceededError
from contract.webhooks import EventType
from storage import endpoints
from storage.database import Database
from storage.deliveries import (
    AttemptReport,
    DeliveryAttempt,
    DueDelivery,
    claim_deliveries,
    record_attempts,
)
from storage.delivery_log import (
    Redelivery,
    get_delivery,
    list_deliveries,
    redeliver,
    redeliver_range,
)
from storage.endpoints import EndpointChange, EndpointRow
from storage.events import add_test_event
from storage.tenants import rotate_secret, webhook_secrets
from tests.storage.factories import claim, complete, count, new_job, run_sql, submit

URL = "https://example.com/hook"
DAY_S = 86400.0


async def register(database: Database, url: str = URL, **changes: Any) -> EndpointRow:
    """Add an endpoint of tenant ``t``."""
    change = EndpointChange(url, changes.get("events"), changes.get("description", ""))
    async with database.transaction() as tx:
        return await endpoints.create_endpoint(tx, "t", change)


async def look(database: Database, row: EndpointRow) -> EndpointRow:
    """Read it again."""
    async with database.snapshot() as tx:
        return await endpoints.get_endpoint(tx, "t", row.id)


async def finish(database: Database, number: int = 1, **fields: Any) -> None:
    """Let so many jobs succeed."""
    await submit(database, *(new_job(**fields) for _ in range(number)))
    await complete(database, await claim(database))


async def take(database: Database, **changes: Any) -> list[DueDelivery]:
    """Claim deliveries."""
    values: dict[str, Any] = {"worker": "w", "limit": 50, "lease_s": 30.0, "places": 50}
    async with database.transaction() as tx:
        return (await claim_deliveries(tx, **(values | changes))).due


async def report(database: Database, *due: DueDelivery, **changes: Any) -> set[str]:
    """Record one attempt for each: failures that are tried again at once, unless told otherwise."""
    values: dict[str, Any] = {"delivered": False, "next_attempt_s": 0.0, "pause_s": 0.0} | changes
    attempt = DeliveryAttempt(latency_s=0.1, status=500)
    reports = [AttemptReport(delivery=each, attempt=attempt, **values) for each in due]
    async with database.transaction() as tx:
        return await record_attempts(tx, reports, hopeless_s=5 * DAY_S)


async def age(database: Database, table: str, seconds: float) -> None:
    """Let the failures have begun so much earlier."""
    statement = f"UPDATE {table} SET failing_since_at = failing_since_at - {seconds}"  # noqa: S608
    await run_sql(database, statement)


async def test_each_endpoint_hears_what_it_asked_for(database: Database) -> None:
    """All of a tenant's endpoints, one delivery each; the job's own URL beside them."""
    everything = await register(database)
    await register(database, "https://other.org/", events=["job.failed"])
    async with database.transaction() as tx:
        await endpoints.create_endpoint(tx, "stranger", EndpointChange(URL, None, ""))
    await finish(database, webhook_url=URL)

    due = {each.endpoint_id: each for each in await take(database)}

    assert set(due) == {"", everything.id}
    assert due[everything.id].secrets == [everything.secret]
    assert due[""].secrets != due[everything.id].secrets
    assert len({each.event_id for each in due.values()}) == 1
    assert everything.secret not in repr(everything) + repr(due)


async def test_endpoints_are_the_tenant_s_own(database: Database) -> None:
    """Another tenant's are not found, whatever is asked of them."""
    row = await register(database)
    async with database.transaction() as tx:
        for act in (endpoints.rotate_endpoint, endpoints.enable_endpoint, endpoints.get_endpoint):
            with pytest.raises(NotFoundError):
                await act(tx, "stranger", row.id)
        with pytest.raises(NotFoundError):
            await endpoints.delete_endpoint(tx, "stranger", row.id)
        with pytest.raises(NotFoundError):
            await endpoints.disable_endpoint(tx, "stranger", row.id, "mine now")
        assert await endpoints.list_endpoints(tx, ["stranger"]) == []

    assert await look(database, row) == row


async def test_there_are_so_many_and_no_more(sqlite_database: Database) -> None:
    """The limit is named; without one there may be more."""
    change = EndpointChange("https://example.org/", None, "")
    for _ in range(2):
        await register(sqlite_database)

    async with sqlite_database.transaction() as tx:
        with pytest.raises(QuotaExceededError, match="2 endpoints"):
            await endpoints.create_endpoint(tx, "t", change, most=2)
    await register(sqlite_database)


async def test_two_secrets_for_a_day_after_a_rotation(database: Database) -> None:
    """Newest first; then the old one signs no more. The same for a tenant's default secret."""
    old = await register(database)
    async with database.transaction() as tx:
        (first,) = await webhook_secrets(tx, "t")
        new = await endpoints.rotate_endpoint(tx, "t", old.id)
        rotated = await rotate_secret(tx, "t")
    await finish(database, webhook_url=URL)
    during = {each.endpoint_id: each.secrets for each in await take(database)}
    await run_sql(database, "UPDATE webhook_endpoints SET old_secret_until_at = 1")
    await run_sql(database, "UPDATE tenants SET old_webhook_secret_until_at = 1")
    await finish(database, webhook_url=URL)
    after = {each.endpoint_id: each.secrets for each in await take(database)}

    assert during == {"": rotated, old.id: [new.secret, old.secret]}
    assert rotated[1] == first
    assert after == {"": rotated[:1], old.id: [new.secret]}


async def test_a_new_url_takes_over_what_is_pending(database: Database) -> None:
    """Under its own name, so that the old receiver's troubles stay behind."""
    row = await register(database)
    await finish(database)
    change = EndpointChange("https://new.org:444/x", ["job.failed"], "moved")
    async with database.transaction() as tx:
        changed = await endpoints.update_endpoint(tx, "t", row.id, change)

    (due,) = await take(database)

    assert (changed.url, changed.events, changed.description) == (
        "https://new.org:444/x",
        ["job.failed"],
        "moved",
    )
    assert (due.url, due.receiver) == (changed.url, "t https://new.org:444")


async def test_a_disabled_endpoint_gets_nothing_and_loses_nothing(database: Database) -> None:
    """What was pending and what happens meanwhile is dead with its reason, and can be sent again.

    A second disabling keeps the first reason.
    """
    row = await register(database)
    await finish(database)
    async with database.transaction() as tx:
        await endpoints.disable_endpoint(tx, "t", row.id, "holidays")
        disabled = await endpoints.disable_endpoint(tx, "t", row.id, "again")
    await finish(database)
    async with database.snapshot() as tx:
        found = await list_deliveries(tx, "t", endpoint_id=row.id)
    async with database.transaction() as tx:
        with pytest.raises(ConflictError, match="enable it first"):
            await redeliver(tx, "t", found[0].id)
        assert await redeliver_range(tx, "t", Redelivery(since_at=0)) == 0

    assert disabled.disabled_reason == "holidays"
    assert await take(database) == []
    assert [(each.state, bool(each.finished_at)) for each in found] == [("dead", True)] * 2
    assert "was disabled when" in str(found[0].reason)

    async with database.transaction() as tx:
        enabled = await endpoints.enable_endpoint(tx, "t", row.id)
        assert await redeliver_range(tx, "t", Redelivery(since_at=0, endpoint_id=row.id)) == 2
    assert enabled.disabled_at is None
    assert {each.id for each in await take(database)} == {each.id for each in found}


async def test_an_endpoint_that_goes_while_in_flight(database: Database) -> None:
    """What is in flight is recorded as it ended; what is retried then ends at its claim."""
    row = await register(database)
    await finish(database, 2)
    first, second = await take(database)
    async with database.transaction() as tx:
        await endpoints.delete_endpoint(tx, "t", row.id)
    assert await report(database, first, delivered=True) == {first.id}
    assert await report(database, second) == {second.id}

    assert await take(database) == []
    async with database.snapshot() as tx:
        states = {each.id: each.state for each in await list_deliveries(tx, "t")}
    assert states == {first.id: "delivered", second.id: "dead"}


async def test_410_disables_at_once(database: Database) -> None:
    """With the reason; what is pending for it ends, and other endpoints do not care."""
    row, other = await register(database), await register(database, "https://other.org/")
    await finish(database, 2)
    due = [each for each in await take(database) if each.endpoint_id == row.id]
    await report(database, due[0], is_gone=True, next_attempt_s=None, reason="410", pause_s=None)
    await report(database, due[1])

    disabled = await look(database, row)
    assert "410" in str(disabled.disabled_reason)
    assert (await look(database, other)).disabled_at is None
    assert await take(database) == []


async def test_five_days_of_only_failures_disable(database: Database) -> None:
    """Counted from the first failure since the last success; a success starts anew."""
    row = await register(database)
    await finish(database)
    (due,) = await take(database)
    await report(database, due)
    failing = await look(database, row)
    await age(database, "webhook_endpoints", 4 * DAY_S)
    (due,) = await take(database)
    await report(database, due)
    assert (await look(database, row)).disabled_at is None
    await age(database, "webhook_endpoints", DAY_S)
    (due,) = await take(database)
    await report(database, due)

    disabled = await look(database, row)
    assert failing.failing_since_at is not None
    assert disabled.disabled_reason == "every attempt of the last days failed"
    assert await take(database) == []


async def test_a_success_ends_the_count(database: Database) -> None:
    """Then nothing is held against it."""
    row = await register(database)
    await finish(database, 2)
    first, second = await take(database)
    await report(database, first)
    await report(database, second, delivered=True)

    assert (await look(database, row)).failing_since_at is None


async def test_a_failing_receiver_rests_and_is_probed(database: Database) -> None:
    """Nothing is claimed in its pause, one at a time after it, everything after a success."""
    await finish(database, 6, webhook_url=URL)
    first, *others = await take(database, places=3)
    await report(database, first, *others, pause_s=50.0)
    assert await take(database, places=3) == []
    await run_sql(database, "UPDATE receivers SET paused_until_at = 1")
    (probe,) = await take(database, places=3)
    assert probe.receiver_failures == 1
    assert await take(database, places=3) == []
    await report(database, probe, delivered=True)

    assert len(await take(database, places=3)) == 3
    async with database.snapshot() as tx:
        assert await count(tx, "receivers") == 0


async def test_a_receiver_that_only_fails_for_days_is_given_up(database: Database) -> None:
    """What jobs have for it ends, so that a backlog does not wait for ever; in flight stays."""
    await finish(database, 3, webhook_url=URL)
    (first,) = await take(database, places=1)
    await report(database, first)
    await age(database, "receivers", 5 * DAY_S)
    (second,) = await take(database, places=1)
    await report(database, second)

    async with database.snapshot() as tx:
        found = await list_deliveries(tx, "t")
    assert {(each.state, each.reason) for each in found} == {
        ("dead", "the receiver has only failed for days")
    }


async def test_a_record_that_is_repeated_changes_nothing(database: Database) -> None:
    """After a commit whose answer was lost: one attempt in the log, one failure on the ladder."""
    await finish(database, webhook_url=URL)
    (due,) = await take(database)
    assert await report(database, due, next_attempt_s=0.0) == {due.id}
    assert await report(database, due, next_attempt_s=0.0) == set()

    (again,) = await take(database)
    assert again.failures == 1


async def test_a_test_event_is_for_its_endpoint_alone(database: Database) -> None:
    """Whatever it asked for, and without a job."""
    row = await register(database, events=["job.failed"])
    await register(database, "https://other.org/")
    async with database.transaction() as tx:
        event, delivery = await add_test_event(tx, row)

    (due,) = await take(database)

    assert (due.id, due.event_id, due.endpoint_id) == (delivery, event, row.id)
    assert (due.event_type, due.job) == (EventType.WEBHOOK_TEST, None)


async def test_sending_again_keeps_the_event_and_the_log(database: Database) -> None:
    """The ladder starts anew; what is in flight is left alone."""
    await finish(database, webhook_url=URL)
    (due,) = await take(database)
    async with database.transaction() as tx:
        assert (await redeliver(tx, "t", due.id)).state == "pending"
    assert await take(database) == []
    await report(database, due, next_attempt_s=None, reason="it failed", pause_s=99.0)
    async with database.transaction() as tx:
        with pytest.raises(NotFoundError):
            await redeliver(tx, "stranger", due.id)
        again = await redeliver(tx, "t", due.id)

    (taken,) = await take(database)
    assert (again.state, again.reason, len(again.attempts)) == ("pending", None, 1)
    assert (taken.event_id, taken.failures, taken.attempt) == (due.event_id, 0, 2)


async def test_a_range_is_what_it_says(database: Database) -> None:
    """Time, endpoint and state each narrow it; what is pending is never touched."""
    row = await register(database)
    await finish(database, 3, webhook_url=URL)
    due = await take(database)
    own = [each for each in due if not each.endpoint_id]
    registered = [each for each in due if each.endpoint_id]
    await report(database, *own, delivered=True)
    await report(database, *registered[:2], next_attempt_s=None, reason="it failed")
    moments = await run_sql(database, "SELECT created_at FROM deliveries ORDER BY created_at")
    now = moments[0][0]

    async def again(**fields: Any) -> int:
        async with database.transaction() as tx:
            return await redeliver_range(tx, "t", Redelivery(**fields))

    assert await again(since_at=now + 100) == 0
    assert await again(since_at=0, until_at=now) == 0
    assert await again(since_at=0, endpoint_id="whe_none") == 0
    assert await again(since_at=0, endpoint_id=row.id, state="delivered") == 0
    assert await again(since_at=0) == 2
    assert await again(since_at=0, state="any", until_at=now + 100) == 3
    assert await again(since_at=0, state="any") == 0


async def test_the_log_has_pages_and_filters(database: Database) -> None:
    """Newest first, after the last id seen; nobody else's."""
    await finish(database, 3, webhook_url=URL)
    async with database.snapshot() as tx:
        everything = await list_deliveries(tx, "t")
        rest = await list_deliveries(tx, "t", after=everything[0].id, limit=1)
        assert await list_deliveries(tx, "t", state="dead") == []
        assert await list_deliveries(tx, "stranger") == []
        assert await get_delivery(tx, "t", everything[2].id) == everything[2]
        with pytest.raises(NotFoundError):
            await get_delivery(tx, "stranger", everything[2].id)

    assert [each.id for each in everything] == sorted((e.id for e in everything), reverse=True)
    assert rest == everything[1:2]
