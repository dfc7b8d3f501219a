"""One service with its workers, and one browser, for all tests of the dashboard.

They live on a loop of their own, as long as the session: starting them takes seconds. The service's
processes go on while other tests run.
"""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

from tests.dashboard.seeing import Sight, find_chromium, open_sight
from tests.e2e.stack import Receiver, Stack, receiving
from tests.services import start_redis
from worker.engine.deterministic import SOURCE

MODELS: dict[str, dict[str, Any]] = {
    "sentiment": {"source": SOURCE},
    "judge": {"source": SOURCE, "path": "causal", "instruction": "Judge."},
    "short": {"source": SOURCE, "max_tokens": 16},
    "later": {"source": SOURCE},
}
#: What the worker serves; jobs of the others wait.
SERVED = ("sentiment", "judge", "short")
#: The only model of the bare service.
HOSTILE_MODEL = "<img src=x onerror=alert(1)>"

Look = Callable[..., Coroutine[Any, Any, Sight]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Chromium."""
    path = find_chromium()
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(
            executable_path=path,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield started
        await started.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A service with a worker that serves all models but one."""
    settings = {"SCOREKEEP_SWEEP_S": "0.2", "SCOREKEEP_HEARTBEAT_S": "0.5"}
    folder = tmp_path_factory.mktemp("dashboard")
    with start_redis() as redis_url:
        async with Stack(folder, redis_url, MODELS, settings=settings) as made:
            await made.start_worker(*(f"--model={name}" for name in SERVED))
            await made.wait_for("/readyz")
            yield made
            await made.stop_all()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def bare(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Another service on data of its own: no worker, and never a job."""
    models = {f'"{HOSTILE_MODEL}"': {"source": SOURCE}}
    async with Stack(tmp_path_factory.mktemp("bare"), stack.redis_url, models) as made:
        yield made
        await made.stop_all()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def receiver() -> AsyncIterator[Receiver]:
    """A receiver of webhooks."""
    async with receiving() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def look(browser: Browser, stack: Stack) -> AsyncIterator[Look]:
    """Open pages of the dashboard; no error, no violation, and no request elsewhere is forgiven.

    ``tolerates`` names what a test provokes: a part of each message that it expects.
    """
    sights: list[Sight] = []
    tolerated: list[str] = []
    async with AsyncExitStack() as contexts:

        async def open_page(
            address: str = "", *, url: str = "", tolerates: tuple[str, ...] = (), **options: Any
        ) -> Sight:
            sight = await open_sight(browser, url or stack.url, **options)
            contexts.push_async_callback(sight.page.context.close)
            sights.append(sight)
            tolerated.extend(tolerates)
            await sight.go(address)
            return sight

        yield open_page
    for sight in sights:
        faults = [e for e in sight.errors if not any(part in e for part in tolerated)]
        assert faults == []
        assert sight.elsewhere == []
