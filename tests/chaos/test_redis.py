"""Whatever Redis does: submits answer 202 throughout, and every job finishes."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
import redis

from contract.jobs import JobState
from storage.queue import Queue
from tests.chaos.proxy import Proxy, run_proxy
from tests.chaos.rig import Rig, open_rig, through
from tests.chaos.servers import RedisServer, run_redis
from tests.worker.harness import run_worker
from worker.listener import listen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


@dataclass
class Broken:
    """A Redis, the proxy before it, and what runs on both."""

    server: RedisServer
    proxy: Proxy
    rig: Rig

    def ask(self, *command: str | int) -> object:
        """Send a command past the proxy."""
        with redis.Redis.from_url(self.server.url) as client:
            return client.execute_command(*command)


@pytest.fixture
async def broken(sqlite_url: str, blob_url: str) -> AsyncIterator[Broken]:
    """Nothing is broken yet."""
    with run_redis() as server:
        async with (
            run_proxy(server.port) as proxy,
            open_rig(sqlite_url, blob_url, through(proxy, server.url)) as rig,
        ):
            yield Broken(server, proxy, rig)


async def flush_all(broken: Broken) -> None:
    """Everything is forgotten."""
    broken.ask("FLUSHALL")


async def kill(broken: Broken) -> None:
    """It is gone, and stays away."""
    await asyncio.to_thread(broken.server.kill)


async def restart(broken: Broken) -> None:
    """It is gone, and back, empty."""
    await broken.server.restart()


async def fill(broken: Broken) -> None:
    """It refuses every write."""
    broken.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    broken.ask("CONFIG", "SET", "maxmemory", 1)


async def evict(broken: Broken) -> None:
    """It throws keys away, whichever were used longest ago."""
    broken.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    broken.ask("CONFIG", "SET", "maxmemory", "2mb")
    for number in range(200):
        broken.ask("SET", f"junk {number}", "x" * 50_000, "PX", 60_000)


async def lose_the_queue(broken: Broken) -> None:
    """The set of hints is gone, the jobs' keys are not."""
    broken.ask("DEL", "arq:queue")


async def go_silent(broken: Broken) -> None:
    """Connections stay and nothing answers."""
    broken.proxy.silent = True


async def freeze(broken: Broken) -> None:
    """Connections are half-open; new ones work."""
    broken.proxy.freeze()


async def slow_down(broken: Broken) -> None:
    """Every packet takes 50 ms."""
    broken.proxy.latency_s = 0.05


async def heal(broken: Broken) -> None:
    """Make it a good Redis again."""
    broken.proxy.silent, broken.proxy.latency_s = False, 0.0
    if not broken.server.is_up():
        await asyncio.to_thread(broken.server.start)
    broken.ask("CONFIG", "SET", "maxmemory", 0)


@pytest.mark.parametrize(
    "fault",
    [flush_all, kill, restart, fill, evict, lose_the_queue, go_silent, freeze, slow_down],
    ids=lambda fault: fault.__name__,
)
async def test_jobs_finish_whatever_redis_does(
    fault: Callable[[Broken], Awaitable[None]],
    broken: Broken,
    record_property: Callable[[str, object], None],
) -> None:
    """Jobs from before and during the fault finish; after it hints work again."""
    rig = broken.rig
    async with run_worker(rig.settings, rig.scorer):
        await rig.time_one()
        rig.scorer.gate = gate = threading.Event()
        before = await rig.submit(10)
        await fault(broken)
        gate.set()
        started_at = time.monotonic()
        during = await rig.submit(20)
        submitted_s = time.monotonic() - started_at
        rows = await rig.bench.wait(*before, *during, timeout_s=40)
        finished_s = time.monotonic() - started_at
        await heal(broken)
        healed_s = await rig.time_one()

    record_property("submitted_s", submitted_s)
    print(  # noqa: T201
        f"{fault.__name__}: 20 submits {submitted_s:.2f} s, all done {finished_s:.2f} s, "
        f"one after healing {healed_s:.2f} s"
    )
    assert {row.state for row in rows} == {JobState.SUCCEEDED}
    assert submitted_s < 10


async def test_half_open_connections_are_noticed(broken: Broken) -> None:
    """Whoever only listens, and whoever polls, hears again within seconds; so do new senders."""
    url = through(broken.proxy, broken.server.url)
    heard, hinted = asyncio.Event(), asyncio.Event()

    async def hear(queue: Queue) -> None:
        async with contextlib.aclosing(queue.finished()) as finished:
            async for _ in finished:
                heard.set()

    async def take(_job_id: str) -> None:
        hinted.set()

    async def time_until(event: asyncio.Event, say: Callable[[], Awaitable[object]]) -> float:
        started_at = time.monotonic()
        event.clear()
        async with asyncio.timeout(20):
            while not event.is_set():
                await say()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), 0.1)
        return time.monotonic() - started_at

    near, far = Queue(url), Queue(broken.server.url)
    numbers = itertools.count()
    says: dict[str, tuple[asyncio.Event, Callable[[], Awaitable[object]]]] = {
        "listener": (heard, lambda: far.publish_finished(["job_1"])),
        "worker": (hinted, lambda: far.hint([f"job_{next(numbers)}:0:m"])),
        "sender": (heard, lambda: near.publish_finished(["job_1"])),
    }
    tasks = [asyncio.create_task(hear(near)), asyncio.create_task(listen(near, "m", take))]
    try:
        for event, say in says.values():
            await time_until(event, say)
        broken.proxy.freeze()
        took = await asyncio.gather(*(time_until(event, say) for event, say in says.values()))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await near.close()
        await far.close()

    print("half-open Redis:", dict(zip(says, took, strict=True)))  # noqa: T201
    assert max(took) < 8
