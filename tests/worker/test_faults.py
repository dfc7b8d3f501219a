"""Faults at the seams of a whole worker: the store goes away in the middle of each part."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from sqlalchemy import text

from contract.config import Settings
from contract.errors import ModelLoadError, StoreUnavailableError
from contract.jobs import JobState
from storage import workers
from storage.deliveries import claim_deliveries
from tests.worker.harness import Bench, heed, receive, run_worker
from tests.worker.scorers import ArithmeticScorer
from worker import deliveries, main, pump
from worker.bodies import render_body
from worker.maintenance import Maintenance
from worker.tasks import Tasks

#: The faults are the same on either database.
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def fail_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception
) -> list[str]:
    """Let ``owner.name`` raise at its first call; return a list that then has one entry."""
    original: Callable[..., Awaitable[Any]] = getattr(owner, name)
    raised: list[str] = []

    async def faulty(*arguments: Any, **named: Any) -> Any:
        if not raised:
            raised.append(name)
            raise error
        return await original(*arguments, **named)

    monkeypatch.setattr(owner, name, faulty)
    return raised


AWAY = StoreUnavailableError("the connection broke")


@pytest.fixture
def soon(settings: Settings) -> Settings:
    """Leases that end soon: what is lost is found again in a second."""
    return msgspec.structs.replace(settings, lease_s=1.0, max_crashes=50, webhook_timeout_s=1.0)


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [(pump, "claim_jobs", "nothing claimed"), (Tasks, "store", "batch lost: the store is away")],
)
async def test_the_store_goes_away_under_a_batch(
    owner: Any,
    name: str,
    said: str,
    soon: Settings,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While claiming or while storing: the job runs again, and ends."""
    raised = fail_once(monkeypatch, owner, name, AWAY)
    [job] = await bench.submit([[1]])
    with heed(said) as heard:
        async with run_worker(soon, ArithmeticScorer()):
            [row] = await bench.wait(job)

    assert raised == [name]
    assert heard.is_set()
    assert row.state is JobState.SUCCEEDED


async def test_a_batch_that_cannot_even_fail_runs_again(
    soon: Settings, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected fault, and another while recording it: the lease ends, the job does not."""
    fail_once(monkeypatch, Tasks, "store", RuntimeError("surprise"))
    fail_once(monkeypatch, Tasks, "fail", RuntimeError("again"))
    [job] = await bench.submit([[1]])
    with heed("batch not failed") as heard:
        async with run_worker(soon, ArithmeticScorer()):
            [row] = await bench.wait(job)

    assert heard.is_set()
    assert (row.state, row.crash_count > 0) == (JobState.SUCCEEDED, True)


async def test_jobs_of_a_failed_model_wait_for_the_store(
    soon: Settings, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end with the model's reason as soon as that can be written."""
    fail_once(monkeypatch, workers, "list_workers", AWAY)
    [job] = await bench.submit([[1]], model="broken")
    with heed("jobs of failed models wait") as heard:
        async with run_worker(soon, failing={"broken": ModelLoadError("no weights")}):
            [row] = await bench.wait(job)

    assert heard.is_set()
    assert bench.problem(row).code == "model_unavailable"


async def test_only_recent_jobs_are_remembered(
    settings: Settings, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that claimed a million jobs does not keep a million ids."""
    monkeypatch.setattr(pump, "_REMEMBERED", 3)
    ids = await bench.submit(*[[[n]] for n in range(10)])
    async with run_worker(settings, ArithmeticScorer()):
        rows = await bench.wait(*ids)

    assert {row.state for row in rows} == {JobState.SUCCEEDED}


async def test_a_worker_without_a_database_starts_and_drains(settings: Settings) -> None:
    """It says what it cannot do, tries again, and ends with 0 when it is told to."""
    alone = msgspec.structs.replace(
        settings, database_url="postgresql+asyncpg://postgres@127.0.0.1:1/none"
    )
    with (
        heed("models not published") as unpublished,
        heed("deliveries wait for the store") as undelivered,
        heed("worker not withdrawn") as stayed,
    ):
        async with run_worker(alone, ArithmeticScorer()), asyncio.timeout(40):
            await unpublished.wait()
            await undelivered.wait()

    assert stayed.is_set()


async def test_a_delivery_that_raises_is_due_again(
    soon: Settings, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ours costs an attempt's lease, not the event."""
    fail_once(monkeypatch, deliveries, "render_body", RuntimeError("surprise"))
    with heed("delivery raised") as heard:
        async with receive() as receiver, run_worker(soon, ArithmeticScorer()):
            await bench.submit([[1]], webhook_url=receiver.url)
            await receiver.wait(1)

    assert heard.is_set()
    assert len(receiver.event_ids()) == 1


async def claim_due(bench: Bench) -> list[Any]:
    """Claim what is due."""
    async with bench.database.transaction() as tx:
        return (await claim_deliveries(tx, worker="wrk_1", limit=9, lease_s=60.0)).due


async def test_orphans_are_looked_for_now_and_then(
    settings: Settings, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that fails says so, and the next one is tried."""
    monkeypatch.setattr(main, "_COLLECT_S", 0.01)
    original = Maintenance.sweep_blobs_once
    rounds: list[int] = []
    twice = asyncio.Event()

    async def sweep(maintenance: Maintenance) -> int:
        rounds.append(await original(maintenance))
        if len(rounds) == 1:
            raise AWAY
        twice.set()
        return 0

    monkeypatch.setattr(Maintenance, "sweep_blobs_once", sweep)
    with heed("maintenance waits") as heard:
        async with run_worker(settings, deliveries_only=True), asyncio.timeout(40):
            await twice.wait()

    assert heard.is_set()


async def test_a_body_without_its_blob_has_links(settings: Settings, bench: Bench) -> None:
    """Scores that cannot be read now are left out; the receiver follows the link."""
    [job] = await bench.submit([[1]], webhook_url="http://127.0.0.1:1/hook", metadata={"a": "b"})
    strict = msgspec.structs.replace(settings, webhook_allow_http=False)
    async with run_worker(strict, ArithmeticScorer()):
        [row] = await bench.wait(job)
        await bench.wait_until(lambda: is_dead(bench))
    async with bench.database.transaction() as tx:
        await tx.exec_driver_sql("UPDATE deliveries SET state = 'pending', due_at = 0")
        await tx.exec_driver_sql("DELETE FROM receivers")
    [due] = await claim_due(bench)
    whole = msgspec.json.decode(await render_body(settings, bench.blobs, due))
    assert row.blob_key is not None
    await bench.blobs.delete([row.blob_key])
    bare = msgspec.json.decode(await render_body(settings, bench.blobs, due))

    assert whole["data"]["scores"] == [[1.0]]
    assert "scores" not in bare["data"]
    assert bare["data"]["links"]["scores"].endswith(f"/v1/jobs/{job}/scores")


async def is_dead(bench: Bench) -> bool:
    """Tell whether the one delivery is over."""
    async with bench.database.snapshot() as tx:
        result = await tx.exec_driver_sql("SELECT state FROM deliveries")
        return [row.state for row in result] == ["dead"]


async def test_who_is_claimed_alone_is_held_alone(settings: Settings, bench: Bench) -> None:
    """Nothing waits behind a job that may end the process: it would be charged with that end."""
    scorer = ArithmeticScorer()
    scorer.gate = threading.Event()
    ids = await bench.submit([[1]], [[2]], [[3]], hinted=False)
    async with bench.database.transaction() as tx:
        await tx.execute(text("UPDATE jobs SET crash_count = 2"))

    held = []
    async with run_worker(settings, scorer):
        for _ in ids:
            await asyncio.to_thread(scorer.entered.acquire)
            await asyncio.sleep(0.2)  # as long as a claim takes, many times over
            states = [(await bench.get(job_id)).state for job_id in ids]
            held.append(states.count(JobState.RUNNING))
            scorer.gate.set()
            scorer.gate = threading.Event()
        scorer.gate.set()
        rows = await bench.wait(*ids)

    assert held == [1, 1, 1]
    assert {row.state for row in rows} == {JobState.SUCCEEDED}
