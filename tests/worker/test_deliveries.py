"""Deliveries end to end: one id per event, the ladder, and slow receivers that slow nobody."""

import asyncio

import msgspec
import pytest
from aiohttp import web

from contract.config import Settings
from contract.jobs import JobState
from storage.delivery_log import DeliveryRow, list_deliveries
from tests.worker.harness import TENANT, Bench, receive, reply, run_worker
from tests.worker.scorers import ArithmeticScorer


@pytest.fixture(autouse=True)
def short_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of a hundredth of a second, and pauses as short."""
    monkeypatch.setattr("worker.webhooks.LADDER_S", (0.01,) * 9)
    monkeypatch.setattr("worker.webhooks._LONGEST_PAUSE_S", 0.01)


async def get_deliveries(bench: Bench, job: str) -> list[DeliveryRow]:
    """Return the job's deliveries."""
    async with bench.database.snapshot() as tx:
        return await list_deliveries(tx, TENANT, job)


async def wait_for_end(bench: Bench, job: str) -> DeliveryRow:
    """Return the job's delivery when it is over."""

    async def is_over() -> bool:
        return any(row.state != "pending" for row in await get_deliveries(bench, job))

    await bench.wait_until(is_over)
    return (await get_deliveries(bench, job))[0]


async def test_a_webhook_says_what_happened(settings: Settings, bench: Bench) -> None:
    """Signed, small scores inline, links for the rest."""
    async with receive() as receiver, run_worker(settings, ArithmeticScorer()):
        [job] = await bench.submit([[1, 2], [4]], webhook_url=receiver.url, metadata={"a": "b"})
        await receiver.wait(1)
        delivery = await wait_for_end(bench, job)

    [event] = receiver.events(await bench.secret())
    assert event.type == "job.succeeded"
    assert event.data["id"] == job
    assert event.data["scores"] == [[3.0], [4.0]]
    assert event.data["metadata"] == {"a": "b"}
    assert event.data["links"]["scores"].endswith(f"/v1/jobs/{job}/scores")
    assert (delivery.state, len(delivery.attempts)) == ("delivered", 1)


async def test_failing_then_succeeding_keeps_one_id(settings: Settings, bench: Bench) -> None:
    """Every attempt carries the same id and the same body, and each is in the log."""
    answers = [reply(500), reply(503, b"busy\0"), reply(204)]
    async with receive(*answers) as receiver, run_worker(settings, ArithmeticScorer()):
        [job] = await bench.submit([[1]], webhook_url=receiver.url)
        delivery = await wait_for_end(bench, job)

    assert len(receiver.calls) == 3
    assert len(receiver.event_ids()) == 1
    assert len({body for _, body in receiver.calls}) == 1
    assert [attempt.status for attempt in delivery.attempts] == [500, 503, 204]
    assert delivery.state == "delivered"


@pytest.mark.timeout(90)  # its receiver rests longer after each
async def test_ten_failures_are_the_end(settings: Settings, bench: Bench) -> None:
    """The ladder has ten attempts; then the delivery is dead, and the job is not touched."""
    async with receive(reply(500)) as receiver, run_worker(settings, ArithmeticScorer()):
        [job] = await bench.submit([[1]], webhook_url=receiver.url)
        delivery = await wait_for_end(bench, job)

    assert (delivery.state, len(delivery.attempts)) == ("dead", 10)
    assert (await bench.get(job)).state is JobState.SUCCEEDED


async def test_gone_is_the_end_at_once(settings: Settings, bench: Bench) -> None:
    """410 is not asked again."""
    async with receive(reply(410)) as receiver, run_worker(settings, ArithmeticScorer()):
        [job] = await bench.submit([[1]], webhook_url=receiver.url)
        delivery = await wait_for_end(bench, job)

    assert (delivery.state, len(receiver.calls)) == ("dead", 1)


async def test_a_slow_receiver_slows_nobody_else(settings: Settings, bench: Bench) -> None:
    """With many events due for a receiver that hangs, another gets all of its own."""
    release = asyncio.Event()

    async def stall(_request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.Response()

    narrow = msgspec.structs.replace(settings, webhook_concurrency=16)
    async with receive(stall) as slow, receive() as quick:
        await bench.submit(*[[[1]]] * 40, webhook_url=slow.url)
        await bench.submit(*[[[1]]] * 10, webhook_url=quick.url)
        async with run_worker(narrow, ArithmeticScorer()):
            await quick.wait(10)
            held = len(slow.calls)
            release.set()
            await slow.wait(40)

    assert held < 16
    assert (len(quick.event_ids()), len(slow.event_ids())) == (10, 40)


async def test_large_results_are_behind_links(settings: Settings, bench: Bench) -> None:
    """A body stays under 20 kB however many items, errors and labels a job has."""
    many = [[n] for n in range(3000)]
    async with receive() as receiver, run_worker(settings, ArithmeticScorer()):
        await bench.submit(
            many, webhook_url=receiver.url, metadata={f"{n}" * 30: "x" * 500 for n in range(10, 26)}
        )
        await receiver.wait(1)

    [event] = receiver.events(await bench.secret())
    assert "scores" not in event.data
    assert event.data["counts"]["succeeded"] == 3000
    assert len(receiver.calls[0][1]) < 20_000
