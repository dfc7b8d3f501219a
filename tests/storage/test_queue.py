"""Hints: they arrive through arq, and nothing breaks when Redis is away, slow or empty."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import redis
from arq.worker import Worker, func

from contract.errors import UnavailableError
from storage import queue as queue_module
from storage.queue import FUNCTION, Queue
from storage.statements import Claim, parse_hint, parse_hinted_model, render_hint
from tests.services import free_port, start_redis


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[Queue]:
    """A queue on an empty Redis."""
    queue = Queue(redis_url)
    yield queue
    await queue.close()


async def _work(queue: Queue, model: str = "m") -> list[str]:
    """Run an arq worker until no hint is left; return the ids in their order."""
    heard: list[str] = []

    async def score(ctx: dict[Any, Any], job_id: str) -> None:
        heard.append(job_id)

    function = func(score, name=FUNCTION)
    worker = Worker([function], burst=True, **queue.worker_options(model))
    await worker.main()
    await worker.close()
    return heard


async def test_hints_reach_an_arq_worker(queue: Queue, redis_url: str) -> None:
    """Those of first and later attempts; nothing is left behind at rest."""
    assert await queue.hint(["job_a:0:m", "job_b:3:m"])
    assert await queue.hint([])

    assert sorted(await _work(queue)) == ["job_a", "job_b"]
    with redis.Redis.from_url(redis_url) as client:
        left = set(client.keys())
    assert left <= {b"arq:queue:m:health-check"}


async def test_a_cancelled_hint_ends(queue: Queue) -> None:
    """Whatever step it is cancelled in, and though redis-py waits with ``asyncio.wait_for``."""
    await queue.hint(["job_a:0:m"])
    cancelled_in = 0
    for steps in range(300):
        hinting = asyncio.create_task(queue.hint([f"job_{steps}:0:m"]))
        for _ in range(steps):
            await asyncio.sleep(0)
        if hinting.done():
            continue
        hinting.cancel()
        await asyncio.wait([hinting], timeout=5)
        assert hinting.cancelled(), steps
        cancelled_in += 1

    assert cancelled_in >= 10
    assert await queue.hint(["job_b:0:m"])


async def test_a_closed_queue_opens_nothing(redis_url: str) -> None:
    """Whether a command comes after the end or is on its way to Redis at the end."""
    queue = Queue(redis_url)
    hinting = asyncio.create_task(queue.hint(["job_a:0:m"]))
    await asyncio.sleep(0)
    await queue.close()

    assert not await hinting
    assert not await queue.hint(["job_b:0:m"])
    with pytest.raises(UnavailableError):
        await queue.check()
    with redis.Redis.from_url(redis_url) as client:
        assert len(client.client_list()) == 1


async def test_many_hints_travel_together(queue: Queue) -> None:
    """More than one pipeline holds, in far less than a round trip each."""
    assert await queue.hint([f"job_{number}:0:m" for number in range(1200)])

    assert len(await _work(queue)) == 1200


async def test_a_hint_is_written_whole_again(queue: Queue, redis_url: str) -> None:
    """Where Redis lost the set and kept the key, the next hint arrives."""
    await queue.hint(["job_a:0:m"])
    with redis.Redis.from_url(redis_url) as client:
        client.delete("arq:queue:m")
    assert await _work(queue) == []

    await queue.hint(["job_a:0:m"])

    assert await _work(queue) == ["job_a"]


async def test_payloads_are_not_pickles(queue: Queue, redis_url: str) -> None:
    """Msgspec's MessagePack: nobody who can write to Redis can make us run code."""
    await queue.hint(["job_a:0:m"])
    with redis.Redis.from_url(redis_url) as client:
        payload = client.get("arq:job:job_a:0")

    assert isinstance(payload, bytes)
    assert msgspec.msgpack.decode(payload)["f"] == FUNCTION
    await _work(queue)


async def test_the_keys_of_a_dead_worker_are_forgotten(queue: Queue, redis_url: str) -> None:
    """What arq kept of the last attempt would starve the others until it expires."""
    await queue.hint(["job_a:0:m"])
    with redis.Redis.from_url(redis_url) as client:
        client.set("arq:in-progress:job_a:0", b"1", px=60_000)
        await queue.forget(["job_a:1:m"])
        await queue.forget([])

        assert client.keys() == []


async def test_waiters_hear_of_finished_jobs(queue: Queue, redis_url: str) -> None:
    """Each id once, and nonsense on the channel is passed over."""
    listening = queue.finished()
    first = asyncio.ensure_future(anext(listening))
    with redis.Redis.from_url(redis_url) as client:
        await _until(lambda: client.pubsub_numsub("scorekeep:finished")[0][1] == 1)
        client.publish("scorekeep:finished", b"nonsense")
    assert await queue.publish_finished([])

    assert await queue.publish_finished(["job_a", "job_b"])

    assert await asyncio.wait_for(first, 5) == "job_a"
    assert await asyncio.wait_for(anext(listening), 5) == "job_b"
    await listening.aclose()


async def test_redis_away_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Hints and wake-ups say false within half a second, and the log has one line."""
    queue = Queue(f"redis://127.0.0.1:{free_port()}/0")
    caplog.set_level(logging.INFO)
    begin = time.monotonic()

    assert not await queue.hint(["job_a:0:m"])
    assert not await queue.publish_finished(["job_a"])
    await queue.forget(["job_a:1:m"])
    with pytest.raises(UnavailableError):
        await queue.check()

    assert time.monotonic() - begin < 5
    assert [record.message for record in caplog.records] == [
        "Redis is away, workers sweep the database"
    ]
    await queue.close()


async def test_a_redis_that_hangs_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """A half-open connection costs half a second, not a request."""
    writers: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    queue = Queue(f"redis://127.0.0.1:{port}/0")
    begin = time.monotonic()

    assert not await queue.hint(["job_a:0:m"])

    assert time.monotonic() - begin < 2
    await queue.close()
    for writer in writers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    silent.close()
    await silent.wait_closed()


async def test_listening_survives_a_restart_of_redis(caplog: pytest.LogCaptureFixture) -> None:
    """The listener reconnects by itself; the log says when Redis was back."""
    port = free_port()
    caplog.set_level(logging.INFO)
    queue = Queue(f"redis://127.0.0.1:{port}/0")
    listening = queue.finished()
    hearing = asyncio.ensure_future(anext(listening))
    for _ in range(2):
        server = start_redis(port=port)
        await asyncio.to_thread(server.__enter__)
        await _until_published(queue, hearing)
        assert await asyncio.wait_for(hearing, 10) == "job_a"
        hearing = asyncio.ensure_future(anext(listening))
        await asyncio.to_thread(server.__exit__, None, None, None)

    hearing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await hearing
    await queue.close()
    assert "Redis is back" in [record.message for record in caplog.records]


async def test_a_listener_without_an_echo_starts_anew(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pings stay unanswered too long, the connection counts as half-open."""
    monkeypatch.setattr(queue_module, "_LISTEN_BEAT_S", 0.05)
    listening = queue._listen("scorekeep:finished")

    async def deaf(*_: object, **__: object) -> None:
        await asyncio.sleep(0.03)

    monkeypatch.setattr("redis.asyncio.client.PubSub.get_message", deaf)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(listening), 5)


async def test_check_passes_where_redis_answers(queue: Queue) -> None:
    """A healthy Redis is no error."""
    await queue.check()


def test_a_unix_socket_has_no_keepalive() -> None:
    """The options of TCP are not for it."""
    assert Queue("unix:///tmp/x.sock")._keepalive() == {}


def test_hints_name_job_attempt_and_model() -> None:
    """The model's name may hold colons."""
    hint = render_hint("job_a", 7, "org/m:tag")
    assert parse_hint(hint) == Claim("job_a", 7)
    assert parse_hinted_model(hint) == "org/m:tag"


async def test_each_model_has_its_own_queue(queue: Queue) -> None:
    """Who serves a model hears of its jobs and of no others; what was claimed is forgotten."""
    assert await queue.hint(["job_a:0:one", "job_b:0:two", "job_c:0:one", "job_d:0:two"])
    await queue.forget(["job_c:1:one", "job_d:1:two"])

    assert await _work(queue, "one") == ["job_a"]
    assert await _work(queue, "two") == ["job_b"]


async def _until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_true():  # noqa: ASYNC110  # the signal is in another process
            await asyncio.sleep(0.01)


async def _until_published(queue: Queue, hearing: asyncio.Future[str]) -> None:
    async with asyncio.timeout(20):
        while not hearing.done():
            await queue.publish_finished(["job_a"])
            await asyncio.sleep(0.05)
