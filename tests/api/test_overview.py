"""The overview: what it says, how often it is computed, its stream."""

import asyncio
import json
from typing import Any

import pytest

from api.routes.overview import OVERVIEWS
from contract.models import ModelState, ModelStatus
from storage import workers
from storage.counters import add_counts
from storage.database import Database
from storage.throughput import add_throughput
from storage.workers import Memory
from tests.api.conftest import make_settings
from tests.api.service import Service
from tests.api.test_events import parse_stream
from tests.services import free_port
from tests.storage.factories import run_sql


def lanes_of(overview: dict[str, Any], model: str) -> dict[str, Any]:
    """Return a model's lanes by name."""
    (found,) = [each for each in overview["models"] if each["id"] == model]
    return {lane["lane"]: lane for lane in found["lanes"]}


async def test_the_queue_is_shown_by_model_and_lane(service: Service) -> None:
    """Waiting jobs with tokens and age, running ones; every lane in order, also the empty ones."""
    await service.report_ready()
    for _ in range(3):
        await service.submit(priority="bulk")
    await service.claim(limit=1)

    overview = (await service.get("/v1/overview")).json
    lanes = lanes_of(overview, "tiny")

    assert list(lanes) == ["interactive", "normal", "bulk"]
    assert (lanes["bulk"]["waiting"], lanes["bulk"]["running"]) == (2, 1)
    assert lanes["bulk"]["tokens"] > 0
    assert 0 <= lanes["bulk"]["oldest_age_s"] < 60
    assert (lanes["normal"]["waiting"], lanes["normal"]["oldest_age_s"]) == (0, 0)
    assert [model["state"] for model in overview["models"]] == ["loading", "ready"]


async def test_jobs_of_a_model_that_nobody_serves_are_shown(service: Service) -> None:
    """A model without state, so that what waits for ever is seen."""
    await service.submit()
    await run_sql(service.database, "UPDATE jobs SET model = 'gone'")

    overview = (await service.get("/v1/overview")).json
    (gone,) = [model for model in overview["models"] if model["id"] == "gone"]

    assert (gone["state"], gone["lanes"][1]["waiting"]) == (None, 1)


async def test_workers_throughput_and_webhooks(service: Service) -> None:
    """Memory as the heartbeat said; slots with what was counted; what is given up."""
    await service.report_ready()
    await service.report(ModelStatus(name="other", state=ModelState.FAILED, reason="r"))
    (first, second) = (await service.get("/v1/workers")).json["data"]
    memory = Memory(memory_bytes=5, device_memory_bytes=30, device_memory_total_bytes=100)
    async with service.database.transaction() as tx:
        await workers.heartbeat(tx, first["id"], memory=memory)
        await add_counts(tx, {"jobs_completed": 4})
        await add_throughput(tx, {"jobs_completed": 4, "items_scored": 8})
    await run_sql(
        service.database,
        "UPDATE workers SET heartbeat_at = heartbeat_at - 1000 WHERE id = :id",
        id=second["id"],
    )

    overview = (await service.get("/v1/overview")).json
    shown = {worker["id"]: worker for worker in overview["workers"]}

    assert shown[first["id"]]["memory_bytes"] == 5
    assert shown[first["id"]]["device_memory_total_bytes"] == 100
    assert shown[first["id"]]["started_at"].endswith("Z")
    assert (shown[second["id"]]["alive"], shown[second["id"]]["memory_bytes"]) == (False, None)
    assert sum(overview["throughput"]["items"]) == 8
    assert len(overview["throughput"]["jobs"]) * overview["throughput"]["slot_s"] == 900
    assert overview["deliveries"] == {"pending": 0, "overdue_s": 0, "dead": 0}


async def test_all_who_watch_share_one_reading(
    sqlite_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty at once cost one; what took long is kept for ten times as long."""
    overviews = sqlite_service.app[OVERVIEWS]
    readings = 0
    compute = overviews._compute

    async def count_and_compute() -> Any:
        nonlocal readings
        readings += 1
        await asyncio.sleep(0.2)  # what a reading of a long queue takes
        return await compute()

    monkeypatch.setattr(overviews, "_compute", count_and_compute)
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    bodies = await asyncio.gather(*(overviews.read() for _ in range(50)))

    assert readings == 1
    assert len(set(bodies)) == 1
    assert overviews._stale_at - started_at >= 2


async def test_the_stream_repeats_and_ends_with_the_server(sqlite_service: Service) -> None:
    """An overview each second; a watcher that leaves harms nobody, a stop lets the others go."""
    await sqlite_service.report_ready()
    url = f"{sqlite_service.url}/v1/overview/events"
    async with sqlite_service.http.get(url) as left:
        await left.content.readany()
    async with sqlite_service.http.get(url) as response:
        seen = b""
        while seen.count(b"\n\n") < 2:
            seen += await response.content.readany()
        await sqlite_service.runner.shutdown()
        rest = await response.read()

    messages = parse_stream((seen + rest).decode())
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert {message["event"] for message in messages} == {"overview"}
    assert json.loads(messages[-1]["data"])["object"] == "overview"


async def test_a_store_that_is_away_is_said(
    sqlite_database: Database, blob_url: str, redis_url: str
) -> None:
    """The route answers 503, the stream says ``away`` and goes on."""
    url = f"postgresql+asyncpg://postgres@127.0.0.1:{free_port()}/none"
    service = Service(make_settings(url, blob_url, redis_url), sqlite_database)
    await service.start()
    answer = await service.get("/v1/overview")
    async with service.http.get(f"{service.url}/v1/overview/events") as response:
        first = await response.content.readuntil(b"\n\n")
    await service.stop()

    assert (answer.status, answer.json["code"]) == (503, "store_unavailable")
    assert first == b"event: away\ndata: {}\n\n"
