"""Bulks call back: one end each, whatever it is, to their own webhook and to endpoints."""

import asyncio
from typing import Any

import pytest
from openai import OpenAI
from standardwebhooks import Webhook

from contract.bulks import BulkEventType
from contract.webhooks import BULK_EVENTS, Event
from storage.bulk_events import add_bulk_event, add_progress
from storage.bulks import BulkRow, delete_bulk, get_bulk
from storage.delivery_log import list_deliveries
from storage.statements import execute
from tests.bulk.bench import Bulks, batch_line, render, rows
from tests.worker.harness import TENANT, Receiver, receive

_REOPEN = "UPDATE bulks SET state = 'running', finished_at = NULL WHERE id = :id"
LONG = {"custom_id": "long", "items": ["far too long to fit"]}


async def register(bulks: Bulks, receiver: Receiver, **fields: Any) -> str:
    """Register an endpoint and return its secret."""
    body = {"url": receiver.url, **fields}
    return str((await bulks.service.post("/v1/webhook_endpoints", body)).json["secret"])


async def default_secret(bulks: Bulks) -> str:
    """Return the secret that signs what goes to the URLs of bulks."""
    return str((await bulks.service.get("/v1/webhooks/default/secret")).json["key"])


async def get_row(bulks: Bulks, bulk_id: str) -> BulkRow:
    """Return the stored row."""
    async with bulks.service.database.snapshot() as tx:
        return await get_bulk(tx, TENANT, bulk_id)


async def wait_for(receiver: Receiver, secret: str, kind: str, number: int = 1) -> list[Event]:
    """Return the events when so many of this type came, each verified."""

    def found() -> list[Event]:
        return [event for event in receiver.events(secret) if event.type == kind]

    async with asyncio.timeout(30), receiver.called:
        await receiver.called.wait_for(lambda: len(found()) >= number)
    return receiver.events(secret)


async def test_the_end_of_a_bulk_is_announced_once(bulks: Bulks) -> None:
    """To its own webhook what it asked for, to an endpoint everything, but not job by job.

    The counts are those that the bulk has; others' libraries verify it.
    """
    await bulks.start_worker()
    async with receive() as own, receive() as registered:
        secret = await register(bulks, registered)
        bulk = await bulks.run(
            rows(40), webhook=own.url, webhook_events=["batch.completed"], metadata={"a": "b"}
        )
        [event] = await wait_for(own, await default_secret(bulks), "batch.completed")
        events = await wait_for(registered, secret, "batch.completed")
        path = f"/v1/bulks/{bulk['id']}/deliveries"
        async with asyncio.timeout(30):
            log: list[dict[str, Any]] = []
            while not log or any(each["state"] == "pending" for each in log):
                log = (await bulks.service.get(path)).json["data"]

    assert event.data["id"] == bulk["id"]
    assert (event.data["object"], event.data["state"]) == ("bulk", "completed")
    assert event.data["counts"] == bulk["counts"]
    assert event.data["metadata"] == {"a": "b"}
    assert event.data["links"]["results"].endswith(f"/v1/bulks/{bulk['id']}/results")
    assert {each.type for each in events} <= {"batch.progress", "batch.completed"}
    assert [str(each.type) for each in events].count("batch.completed") == 1
    assert len({call[0]["webhook-id"] for call in own.calls}) == 1
    assert {each["bulk"] for each in log} == {bulk["id"]}
    assert {each["job"] for each in log} == {None}
    headers, raw = own.calls[0]
    default = await default_secret(bulks)
    Webhook(default).verify(raw.decode(), {k.lower(): v for k, v in headers.items()})
    with OpenAI(api_key="-", webhook_secret=default) as client:
        assert client.webhooks.unwrap(raw.decode(), dict(headers)).type == "batch.completed"


async def test_a_bulk_whose_input_is_refused_says_why(bulks: Bulks) -> None:
    """``batch.failed`` holds the errors by line; nothing else is announced."""
    await bulks.service.report_ready()
    await bulks.start_worker()
    async with receive() as own:
        bulk = await bulks.run(b'{"item": 1}\nnonsense\n', webhook=own.url)
        events = await wait_for(own, await default_secret(bulks), "batch.failed")

    assert [each.type for each in events] == ["batch.failed"]
    assert events[0].data["errors"] == bulk["errors"]
    assert events[0].data["counts"] == bulk["counts"]


async def test_cancelled_and_expired_bulks_are_announced(bulks: Bulks) -> None:
    """By their own type; an expired batch names its output file, as ``/v1/batches`` does."""
    await bulks.service.report_ready()
    async with receive() as own:
        cancelled = await bulks.start(rows(5), webhook=own.url)
        await bulks.wait(cancelled, "running")
        await bulks.service.post(f"/v1/bulks/{cancelled}/cancel", {})
        await bulks.wait(cancelled)
        body = {
            "input_file_id": await bulks.upload(render([batch_line("a", items="x", model="tiny")])),
            "endpoint": "/v1/score",
            "completion_window": "24h",
            "webhook": own.url,
        }
        batch = (await bulks.service.post("/v1/batches", body)).json["id"]
        await bulks.wait(batch, "running")
        async with bulks.service.database.transaction() as tx:
            await execute(tx, "UPDATE bulks SET deadline_at = 1 WHERE id = :id", {"id": batch})
        ended = await bulks.wait(batch)
        await bulks.start_worker()
        secret = await default_secret(bulks)
        await wait_for(own, secret, "batch.cancelled")
        events = await wait_for(own, secret, "batch.expired")
        shown = (await bulks.service.get(f"/v1/batches/{batch}")).json

    by_type = {str(each.type): each.data for each in events}
    assert len(events) == 2
    assert by_type["batch.cancelled"]["id"] == cancelled
    assert by_type["batch.cancelled"]["counts"]["lines_cancelled"] == 5
    assert (by_type["batch.expired"]["id"], ended["state"]) == (batch, "expired")
    assert by_type["batch.expired"]["object"] == "batch"
    assert by_type["batch.expired"]["output_file_id"] == shown["output_file_id"]


async def test_a_retried_bulk_ends_again(sqlite_bulks: Bulks) -> None:
    """A retry is another run: it has an end of its own, under another id."""
    await sqlite_bulks.start_worker()
    async with receive() as own:
        fields = {"webhook": own.url, "webhook_events": ["batch.completed"], "model": "short"}
        bulk = await sqlite_bulks.run([*rows(1), LONG], **fields)
        await sqlite_bulks.service.post(f"/v1/bulks/{bulk['id']}/retry", {})
        await sqlite_bulks.wait(bulk["id"])
        events = await wait_for(own, await default_secret(sqlite_bulks), "batch.completed", 2)

    assert len(events) == len(own.event_ids()) == 2
    assert (await get_row(sqlite_bulks, bulk["id"])).generation == 1


async def test_progress_comes_in_steps_however_many_look(bulks: Bulks) -> None:
    """A step is announced by one of those who see it, never again, and not after the end."""
    await bulks.service.report_ready()
    async with receive() as own:
        bulk_id = await bulks.start(rows(3), webhook=own.url)
        await bulks.wait(bulk_id, "running")

        async def step(number: int) -> bool:
            async with bulks.service.database.transaction() as tx:
                return await add_progress(tx, bulk_id, number)

        first = await asyncio.gather(*(step(4) for _ in range(5)))
        again = [await step(number) for number in (3, 4, 5)]
        await bulks.service.post(f"/v1/bulks/{bulk_id}/cancel", {})
        await bulks.wait(bulk_id)
        late = await step(6)
        async with bulks.service.database.snapshot() as tx:
            log = await list_deliveries(tx, TENANT, bulk_id=bulk_id)

    assert sum(first) == 1
    assert (again, late) == ([False, False, True], False)
    kinds = sorted(each.event_type for each in log)
    assert kinds == ["batch.cancelled", "batch.progress", "batch.progress"]


async def test_a_second_end_of_one_run_is_not_announced(bulks: Bulks) -> None:
    """Whoever writes it: the store itself holds that there is one, and nobody hears of another."""
    await bulks.service.report_ready()
    async with receive() as own, receive() as registered:
        await register(bulks, registered)
        bulk_id = await bulks.start(rows(1), webhook=own.url)
        await bulks.wait(bulk_id, "running")
        async with bulks.service.database.transaction() as tx:
            await add_bulk_event(tx, bulk_id, BulkEventType.COMPLETED)
        async with bulks.service.database.transaction() as tx:
            await add_bulk_event(tx, bulk_id, BulkEventType.EXPIRED)

    async with bulks.service.database.snapshot() as tx:
        log = await list_deliveries(tx, TENANT, bulk_id=bulk_id)
    assert sorted(each.url for each in log) == sorted([own.url, registered.url])
    assert {each.event_type for each in log} == {"batch.completed"}


async def test_a_bulk_that_an_earlier_version_reopened_ends(bulks: Bulks) -> None:
    """It runs again without a generation of its own: it ends, and nobody hears of it twice."""
    await bulks.start_worker()
    async with receive() as own:
        bulk = await bulks.run(rows(3), webhook=own.url, webhook_events=["batch.completed"])
        async with bulks.service.database.transaction() as tx:
            await execute(tx, _REOPEN, {"id": bulk["id"]})
        again = await bulks.wait(bulk["id"])

    async with bulks.service.database.snapshot() as tx:
        log = await list_deliveries(tx, TENANT, bulk_id=bulk["id"])
    assert again["state"] == "completed"
    assert [each.event_type for each in log] == ["batch.completed"]


async def test_a_deleted_bulk_says_nothing_more(sqlite_bulks: Bulks) -> None:
    """Its deliveries that are still due are dropped with it."""
    await sqlite_bulks.service.report_ready()
    bulk = await sqlite_bulks.run(b"nonsense\n", webhook="http://127.0.0.1:1/hook")
    database = sqlite_bulks.service.database
    async with database.snapshot() as tx:
        before = await list_deliveries(tx, TENANT, bulk_id=bulk["id"])

    async with database.transaction() as tx:
        await delete_bulk(tx, TENANT, bulk["id"])
        after = await list_deliveries(tx, TENANT, bulk_id=bulk["id"])

    assert (len(before), after) == (1, [])


@pytest.mark.parametrize("path", ["/v1/bulks", "/v1/batches", "/v1/rescore"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"webhook": "https://10.0.0.1/"}, "webhook"),
        ({"webhook": "ftp://example.org/"}, "webhook"),
        ({"webhook_events": ["batch.failed"]}, "webhook_events"),
        ({"webhook": "https://example.org/", "webhook_events": []}, "webhook_events"),
        (
            {"webhook": "https://example.org/", "webhook_events": ["job.succeeded"]},
            "webhook_events[0]",
        ),
    ],
)
async def test_a_webhook_that_cannot_be_is_refused(
    sqlite_bulks: Bulks, path: str, fields: dict[str, Any], param: str
) -> None:
    """On every route that starts a bulk, naming the field."""
    await sqlite_bulks.service.report_ready()
    job = await sqlite_bulks.service.submit()
    file_id = await sqlite_bulks.upload(render(rows(1)))
    batch = {"input_file_id": file_id, "endpoint": "/v1/score", "completion_window": "24h"}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/bulks": {"input_file_id": file_id, "model": "tiny"},
        "/v1/batches": batch,
        "/v1/rescore": {"source": {"jobs": [job]}},
    }

    answer = await sqlite_bulks.service.post(path, bodies[path] | fields)

    assert answer.status in {400, 422}, answer.body
    problem = answer.json.get("error", answer.json)
    assert problem["param"] == param


def test_what_bulks_announce_is_what_webhooks_know() -> None:
    """Each type but the one that says that lines run; webhooks have no other of bulks."""
    announced = {kind.value for kind in BulkEventType if kind is not BulkEventType.IN_PROGRESS}

    assert announced == {kind.value for kind in BULK_EVENTS}
