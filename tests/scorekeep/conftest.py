"""Fixtures of the client's tests."""

from collections.abc import AsyncIterator, Iterator

import pytest

from scorekeep import AsyncClient, transport
from tests.scorekeep.scripted import Script, run_script


@pytest.fixture
def script() -> Iterator[Script]:
    """A service that says what the test tells it to."""
    with run_script() as script:
        yield script


@pytest.fixture
async def client(script: Script, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncClient]:
    """A client of that service, whose back-off takes no time."""
    monkeypatch.setattr(transport, "_FIRST_BACK_OFF_S", 0.0)
    async with AsyncClient(script.url, max_retries=2) as client:
        yield client
