"""Event streams: the state, the events, comments, resuming."""

import asyncio
import json

import pytest

from api.state import WAITERS
from contract.config import Settings
from storage.database import Database
from tests.api.conftest import make_settings
from tests.api.service import Service


def parse_stream(text: str) -> list[dict[str, str]]:
    """Return the fields of each message; comments come as ``comment``."""
    messages = []
    for block in text.strip().split("\n\n"):
        fields = [line.partition(": ") for line in block.split("\n")]
        messages.append({name or "comment": value for name, _, value in fields})
    return messages


async def test_a_stream_ends_with_the_job(service: Service) -> None:
    """First the state, then the terminal event with its sequence; then the stream ends."""
    job_id = await service.submit()
    reading = asyncio.create_task(service.get(f"/v1/jobs/{job_id}/events"))

    await service.finish(await service.claim())
    answer = await reading
    messages = parse_stream(answer.body.decode())
    event = json.loads(messages[-1]["data"])

    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert messages[0]["event"] == "job.state"
    assert "id" not in messages[0]
    assert messages[-1]["event"] == event["type"] == "job.succeeded"
    assert messages[-1]["id"] == str(event["sequence"])
    assert event["data"]["id"] == job_id
    assert event["data"]["state"] == "succeeded"


async def test_a_reader_resumes_after_what_it_saw(service: Service) -> None:
    """``Last-Event-ID`` skips what was seen; once nothing is left the answer is 204."""
    job_id = await service.submit_and_finish()
    path = f"/v1/jobs/{job_id}/events"
    whole = await service.get(path)
    last = parse_stream(whole.body.decode())[-1]["id"]

    rest = await service.get(path, headers={"Last-Event-ID": last})
    earlier = await service.get(path, headers={"Last-Event-ID": str(int(last) - 1)})
    nonsense = await service.get(path, headers={"Last-Event-ID": "x"})

    assert rest.status == 204
    assert parse_stream(earlier.body.decode())[-1]["id"] == last
    assert parse_stream(nonsense.body.decode())[-1]["id"] == last


@pytest.fixture
async def chatty(
    sqlite_url: str, sqlite_database: Database, blob_url: str, redis_url: str
) -> Service:
    """The application with a comment every few milliseconds."""
    settings: Settings = make_settings(sqlite_url, blob_url, redis_url)
    return Service(settings, sqlite_database, keep_alive_s=0.02)


async def test_comments_keep_the_stream_alive(chatty: Service) -> None:
    """While nothing happens there are comments; a reader that leaves harms nobody."""
    await chatty.start()
    job_id = await chatty.submit()

    async with chatty.http.get(f"{chatty.url}/v1/jobs/{job_id}/events") as response:
        seen = b""
        while seen.count(b": still here") < 3:
            seen += await response.content.readany()
    for _ in range(500):
        if not len(chatty.app[WAITERS]):
            break
        await asyncio.sleep(0.01)

    assert len(chatty.app[WAITERS]) == 0
    assert (await chatty.get(f"/v1/jobs/{job_id}")).json["state"] == "queued"
    await chatty.stop()


async def test_a_stopping_server_lets_readers_go(sqlite_service: Service) -> None:
    """Streams and long polls end when the server stops, with the job as it is."""
    job_id = await sqlite_service.submit()
    url = f"/v1/jobs/{job_id}"
    reading = asyncio.create_task(sqlite_service.get(f"{url}/events"))
    polling = asyncio.create_task(sqlite_service.get(f"{url}?wait=15"))
    waiters = sqlite_service.app[WAITERS]
    for _ in range(500):
        if waiters.count_of(job_id) == 2:
            break
        await asyncio.sleep(0.01)

    await sqlite_service.runner.shutdown()

    assert (await reading).status == 200
    assert (await polling).json["state"] == "queued"
    assert (await sqlite_service.get(f"{url}?wait=15")).json["state"] == "queued"
