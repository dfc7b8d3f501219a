"""Hints through a Redis that restarts, is killed, and was never there."""

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from storage.queue import Queue
from tests.services import free_port, start_redis
from tests.worker.harness import heed
from worker.listener import listen


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """A connection that nobody closed is reported by the test that left it, not by a later one."""
    yield
    gc.collect()


class Ear:
    """Keeps the hints that were heard."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.changed = asyncio.Condition()

    async def take(self, job_id: str) -> None:
        """Hear one."""
        async with self.changed:
            self.heard.append(job_id)
            self.changed.notify_all()

    async def wait_for(self, job_id: str) -> None:
        """Return when it was heard."""
        async with asyncio.timeout(40), self.changed:
            await self.changed.wait_for(lambda: job_id in self.heard)


@contextlib.asynccontextmanager
async def listening(url: str, ear: Ear) -> AsyncIterator[Queue]:
    """Listen on ``url``, until the end of the ``async with``."""
    queue = Queue(url)
    task = asyncio.create_task(listen(queue, "m", ear.take))
    try:
        yield queue
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=40)
        assert task.cancelled()
        await queue.close()


async def hint_until_taken(queue: Queue, job_id: str) -> None:
    """Hint as the sweeper does: again, until Redis takes it."""
    async with asyncio.timeout(40):
        while not await queue.hint([job_id]):
            pass


async def test_a_hint_arrives_once(redis_url: str) -> None:
    """The id is what arrives; a hint that was sent twice is one."""
    ear = Ear()
    async with listening(redis_url, ear) as queue:
        await queue.hint(["job_1:0:m", "job_1:0:m"])
        await queue.hint(["job_2:0:m"])
        await ear.wait_for("job_1")
        await ear.wait_for("job_2")

    assert sorted(ear.heard) == ["job_1", "job_2"]


async def test_a_listener_that_is_stopped_twice_closes_its_connections(redis_url: str) -> None:
    """A model that fails its canary while the worker stops: the second stop skips nothing."""
    ear = Ear()
    queue = Queue(redis_url)
    task = asyncio.create_task(listen(queue, "m", ear.take))
    await queue.hint(["job_1:0:m"])
    await ear.wait_for("job_1")
    await queue.close()

    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task], timeout=20)

    assert task.cancelled()
    with redis.Redis.from_url(redis_url) as client:
        assert [entry["cmd"] for entry in client.client_list()] == ["client|list"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_redis_comes_back_empty(how: signal.Signals) -> None:
    """A Redis that was stopped or killed, and lost everything: hints are heard again."""
    port, ear = free_port(), Ear()
    with contextlib.ExitStack() as first:
        url = first.enter_context(start_redis(port=port))
        async with listening(url, ear) as queue:
            await queue.hint(["job_1:0:m"])
            await ear.wait_for("job_1")
            with heed("hints stopped") as stopped:
                stop_redis(url, how)
                async with asyncio.timeout(40):
                    await stopped.wait()
            with start_redis(port=port):
                await hint_until_taken(queue, "job_2:0:m")
                await ear.wait_for("job_2")

    assert ear.heard == ["job_1", "job_2"]


def stop_redis(url: str, how: signal.Signals) -> None:
    """End the server at ``url``."""
    with redis.Redis.from_url(url) as client:
        pid = int(client.info("server")["process_id"])
    os.kill(pid, how)


async def test_redis_appears_later() -> None:
    """A worker may start before its Redis."""
    port, ear = free_port(), Ear()
    with heed("hints stopped") as failed:
        async with listening(f"redis://127.0.0.1:{port}/0", ear) as queue:
            async with asyncio.timeout(40):
                await failed.wait()
            with start_redis(port=port):
                await hint_until_taken(queue, "job_1:0:m")
                await ear.wait_for("job_1")

    assert ear.heard == ["job_1"]


async def test_a_hint_that_is_being_held_does_not_keep_the_listener(redis_url: str) -> None:
    """A hint waits for room in the worker: the end comes at once all the same."""
    taken = asyncio.Event()
    never = asyncio.Event()

    async def hold(_job_id: str) -> None:
        taken.set()
        await never.wait()

    ear = Ear()
    ear.take = hold  # type: ignore[method-assign, assignment]
    async with listening(redis_url, ear) as queue, asyncio.timeout(40):
        await queue.hint(["job_1:0:m"])
        await taken.wait()

    assert not never.is_set()


async def test_a_hint_in_somebodys_hands_is_not_asked_for_at_every_poll(redis_url: str) -> None:
    """While one waits in our hands, Redis is asked of it once a second, not a hundred times."""
    taken, done = asyncio.Event(), asyncio.Event()

    async def hold(_job_id: str) -> None:
        taken.set()
        await done.wait()

    queue = Queue(redis_url)
    task = asyncio.create_task(listen(queue, "m", hold))
    async with asyncio.timeout(40):
        await hint_until_taken(queue, "job_1:0:m")
        await taken.wait()
        with redis.Redis.from_url(redis_url) as client:
            client.config_resetstat()
            while _calls(client, "zrangebyscore") < 5:  # noqa: ASYNC110  # another's polls
                await asyncio.sleep(0.05)
            looks = _calls(client, "zscore")
        done.set()
        task.cancel()
        await asyncio.wait([task])
    await queue.close()

    assert looks <= 5


def _calls(client: "redis.Redis", command: str) -> int:
    stats = client.info("commandstats")
    assert isinstance(stats, dict)
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])
