"""The receivers of docs/webhooks.md run as they are printed."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from fastapi.testclient import TestClient as FastApiClient

from contract.webhooks import Event, EventType, create_secret, sign

TEXT = (Path(__file__).parent.parent / "docs" / "webhooks.md").read_text()
SECRET = create_secret()
BODY = msgspec.json.encode(
    Event(type=EventType.JOB_FAILED, timestamp="2026-11-30T10:00:00Z", sequence=3, data={})
)


def load(name: str, handled: list[Event]) -> Any:
    """Run the example of that framework; return its application."""
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {"SECRET": SECRET, "handle": handled.append, "__name__": name}
    exec(compile(found.group(1), name, "exec"), names)  # noqa: S102  # what users paste
    return names["app"]


def headers(secret: str) -> dict[str, str]:
    """Sign the body now."""
    now = int(time.time())
    return {
        "Webhook-Id": "evt_1",
        "Webhook-Timestamp": str(now),
        "Webhook-Signature": sign([secret], event_id="evt_1", timestamp=now, body=BODY),
    }


async def call_aiohttp(app: Any, secret: str) -> int:
    """POST to an aiohttp application."""
    async with TestClient(TestServer(app)) as client:
        return (await client.post("/hook", data=BODY, headers=headers(secret))).status


def call(name: str, app: Any, secret: str) -> int:
    """POST to the application and return the status."""
    if name == "aiohttp":
        return asyncio.run(call_aiohttp(app, secret))
    if name == "fastapi":
        with FastApiClient(app) as client:
            status: int = client.post("/hook", content=BODY, headers=headers(secret)).status_code
            return status
    answer = app.test_client().post("/hook", data=BODY, headers=headers(secret))
    return int(answer.status_code)


@pytest.mark.parametrize("name", ["aiohttp", "fastapi", "flask"])
def test_the_example_verifies(name: str) -> None:
    """A signed event is handled, one of another's secret is refused."""
    handled: list[Event] = []

    statuses = [call(name, load(name, handled), each) for each in (SECRET, create_secret())]

    assert statuses == [204, 400]
    assert [event.type for event in handled] == [EventType.JOB_FAILED]
