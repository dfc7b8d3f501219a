"""What benchmarks/load.py measures with: counted connections, a searched rate, percentiles."""

import asyncio
import os
import time
from contextlib import AsyncExitStack

import psutil
import pytest

from benchmarks.load_rate import Step, find_rate, offer
from benchmarks.load_service import Answered, count_accepted, open_session, percentile
from tests.api.service import Service


@pytest.mark.parametrize("sources", [[None], ["127.0.0.2", "127.0.0.3"]], ids=["one", "several"])
async def test_connections_are_counted_at_the_server(
    sources: list[str | None], sqlite_service: Service
) -> None:
    """As many as clients wait, from whatever address, by the kernel's table and by psutil."""
    port, job_id = sqlite_service.runner.addresses[0][1], await sqlite_service.submit()
    before = count_accepted(port)
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(open_session("", each)) for each in sources]
        url = f"{sqlite_service.url}/v1/jobs/{job_id}/events"
        held = [await session.get(url) for session in sessions for _ in range(40)]
        counted = count_accepted(port) - before
        peers = [
            each.raddr.ip
            for each in psutil.Process(os.getpid()).net_connections("tcp")
            if each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED and each.raddr
        ]
        await sqlite_service.post(f"/v1/jobs/{job_id}/cancel", None)
        bodies = [await each.read() for each in held]

    assert counted == len(held) == 40 * len(sources)
    assert len(peers) - before == counted
    assert {each for each in sources if each} <= set(peers)
    assert all(b"job.cancelled" in body for body in bodies)


async def test_a_connection_that_nobody_accepted_is_not_counted() -> None:
    """What the kernel keeps in the listener's line is established, and waits at the door."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    asyncio.get_running_loop().remove_reader(server.sockets[0].fileno())
    _, writer = await asyncio.open_connection("127.0.0.1", port)

    assert count_accepted(port) == 0

    writer.close()
    await writer.wait_closed()
    server.close()


@pytest.mark.parametrize("limit", [10.0, 100.0, 1000.0])
async def test_a_search_ends_near_the_limit(limit: float) -> None:
    """It goes up until a step fails, and then comes close from below; none at all is said too."""

    async def trial(rate: float) -> Step:
        return Step(rate, [Answered(202, 0.01 if rate <= limit else 0.2)] * 10)

    steps = await find_rate(trial)

    best = max((step.rate for step in steps if step.is_good), default=0.0)
    assert best <= limit
    assert best > limit * 0.9 or limit < steps[0].rate == 40.0


async def test_an_open_loop_counts_from_when_a_submit_was_due() -> None:
    """A server that stands still for a while is late for all that came meanwhile."""
    free_at = time.perf_counter() + 0.3

    async def send(due_at: float) -> Answered:
        await asyncio.sleep(max(0.0, free_at - time.perf_counter()))
        return Answered(202, time.perf_counter() - due_at)

    step = await offer(send, rate=100.0, seconds=0.5)

    late = [each for each in step.answers if each.cost_s > 0.1]
    assert len(step.answers) == 50
    assert len(late) >= 15
    assert not step.is_good


async def test_an_open_loop_gives_up_on_a_server_that_is_far_behind() -> None:
    """Two seconds' worth open are enough to know."""
    free = asyncio.Event()

    async def send(_due_at: float) -> Answered:
        await free.wait()
        return Answered(202, 0.0)

    offering = asyncio.create_task(offer(send, rate=1000.0, seconds=100.0))
    await asyncio.sleep(2.5)
    free.set()
    step = await offering

    assert step.gave_up
    assert not step.is_good


def test_a_percentile_is_the_nearest_rank() -> None:
    """In milliseconds; of nothing it is nothing."""
    costs_s = [each / 1000 for each in range(1, 101)]

    assert percentile(costs_s, 0.99) == pytest.approx(99)
    assert percentile(costs_s, 0.5) == pytest.approx(50)
    assert percentile([0.007], 0.99) == pytest.approx(7)
    assert percentile([], 0.99) == 0.0
