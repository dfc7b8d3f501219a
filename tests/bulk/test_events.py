"""A bulk's events: listed, and streamed with the bulk as it moves."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from api.routes import bulk_events
from contract.errors import StoreUnavailableError
from storage.bulk_events import list_bulk_events
from storage.database import Database
from tests.api.service import Service
from tests.api.test_events import parse_stream
from tests.bulk.bench import MODELS, Bulks, rows
from tests.worker.harness import create_settings

STREAM = {"Accept": "text/event-stream"}


@pytest.fixture
async def chatty(
    sqlite_url: str, sqlite_database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Bulks]:
    """The application looks at a streamed bulk, or sends a comment, every few milliseconds."""
    settings = create_settings(sqlite_url, blob_url, redis_url)
    service = Service(settings, sqlite_database, MODELS, keep_alive_s=0.02)
    await service.start()
    bulks = Bulks(service)
    yield bulks
    await bulks.stop_workers()
    await service.stop()


async def test_a_stream_follows_a_bulk_to_its_end(chatty: Bulks) -> None:
    """The bulk as it moves, events by number, last the bulk at its end; it may be resumed."""
    bulk_id = await chatty.start(rows(30))
    path = f"/v1/bulks/{bulk_id}/events"
    reading = asyncio.create_task(chatty.service.get(path, headers=STREAM))
    await chatty.wait(bulk_id, "running")
    await chatty.start_worker()

    answer = await reading
    listed = (await chatty.service.get(path)).json["data"]
    bulk = await chatty.get(bulk_id)
    messages = parse_stream(answer.body.decode())
    last = str(listed[-1]["sequence"])
    rest = await chatty.service.get(path, headers=STREAM | {"Last-Event-ID": last})
    after = await chatty.service.get(path, headers=STREAM, params={"after": listed[0]["sequence"]})

    assert answer.headers["Content-Type"].startswith("text/event-stream")
    states = [json.loads(each["data"]) for each in messages if each.get("event") == "bulk.state"]
    assert len(states) > 1
    assert "id" not in messages[-1]
    assert states[-1] == json.loads(messages[-1]["data"]) == bulk
    events: list[Any] = [each for each in messages if "id" in each]
    assert [json.loads(each["data"]) for each in events] == listed
    assert [each["event"] for each in events] == [each["type"] for each in listed]
    assert rest.status == 204
    assert [each["id"] for each in parse_stream(after.body.decode()) if "id" in each] == [
        str(each["sequence"]) for each in listed[1:]
    ]


async def test_a_stream_of_a_bulk_that_rests(
    chatty: Bulks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comments keep it alive, also while the store is away; a stopping server lets readers go."""
    bulk_id = await chatty.start(rows(3))
    await chatty.wait(bulk_id, "running")
    away = iter([False, True])

    async def read(*args: Any, **options: Any) -> Any:
        if next(away, False):
            message = "away"
            raise StoreUnavailableError(message)
        return await list_bulk_events(*args, **options)

    monkeypatch.setattr(bulk_events, "list_bulk_events", read)
    url = f"{chatty.service.url}/v1/bulks/{bulk_id}/events"
    async with chatty.service.http.get(url, headers=STREAM) as response:
        seen = b""
        while b": still here" not in seen or b": the store is away" not in seen:
            seen += await response.content.readany()
        await chatty.service.runner.shutdown()
        seen += await response.content.read()

    assert b"event: bulk.state" in seen
    assert seen.endswith(b"\n\n")


async def test_a_deleted_bulk_ends_its_stream(
    chatty: Bulks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bulk that is gone when it is looked at again ends the stream where it is."""
    bulk_id = (await chatty.run(b""))["id"]
    monkeypatch.setattr(bulk_events, "ENDED_BULKS", frozenset())
    url = f"{chatty.service.url}/v1/bulks/{bulk_id}"

    async with chatty.service.http.get(f"{url}/events", headers=STREAM) as response:
        seen = await response.content.readany()
        deleted = await chatty.service.request("DELETE", f"/v1/bulks/{bulk_id}")
        await response.content.read()

    assert b"event: bulk.state" in seen
    assert deleted.status == 204


async def test_what_cannot_be_streamed(chatty: Bulks) -> None:
    """Another representation, a bad number, a bulk that there is not."""
    bulk_id = await chatty.start(rows(1))
    get = chatty.service.get

    odd = await get(f"/v1/bulks/{bulk_id}/events", headers={"Accept": "text/html"})
    bad = await get(f"/v1/bulks/{bulk_id}/events", params={"after": "x"})
    unknown = await get(f"/v1/bulks/blk_{'0' * 32}/events", headers=STREAM)

    assert [odd.status, bad.status, unknown.status] == [406, 422, 404]
