"""A model whose numbers drift is served no longer; its jobs go back, the others go on."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from contract.config import Settings
from contract.errors import DeviceLostError, OutOfMemoryError, UnavailableError
from contract.jobs import JobState, Lane
from contract.models import CANARY_DRIFT, ModelConfig
from storage import workers
from tests.worker.harness import Bench, create_settings, heed, run_worker
from tests.worker.scorers import ArithmeticScorer, create_sequence
from worker.batcher import MicroBatcher, Submission, Ticket
from worker.deadlines import HardDeadline
from worker.engine.loader import load_model
from worker.engine.scorer import ModelScorer
from worker.engine.seam import CanaryResult


class CheckedScorer(ArithmeticScorer):
    """Its canary gives ``difference``, or raises; its forward may ask for a check first."""

    def __init__(self, name: str = "sums") -> None:
        super().__init__(name)
        self.difference = 0.0
        self.raised: Exception | None = None
        self.checks = 0

    def check_canary(self) -> CanaryResult:
        """Give what the test says."""
        self.checks += 1
        if self.raised is not None:
            raise self.raised
        return CanaryResult(self.difference, 1e-4)


@pytest.fixture
def often(sqlite_url: str, blob_url: str, redis_url: str) -> Settings:
    """Settings that check all the time."""
    return create_settings(sqlite_url, blob_url, redis_url, canary_s=0.02)


@pytest.fixture
def settings(often: Settings) -> Settings:
    """The bench's stores are those of ``often``."""
    return often


async def find_reason(bench: Bench, name: str) -> str | None:
    """Return why a model failed, once that is published."""
    found: list[str | None] = []

    async def has_failed() -> bool:
        async with bench.database.snapshot() as tx:
            statuses = await workers.models(tx, alive_within_s=30)
        found[:] = [one.reason for one in statuses if one.name == name and one.state == "failed"]
        return bool(found)

    await bench.wait_until(has_failed)
    return found[0]


async def test_drift_ends_the_service_of_one_model(often: Settings, bench: Bench) -> None:
    """The drifted model is published as failed and its jobs end with the reason; others score."""
    drifting, healthy = CheckedScorer("drifting"), CheckedScorer("healthy")
    async with run_worker(often, drifting, healthy):
        await bench.wait_for_models("drifting", "healthy")
        drifting.difference = 0.5
        reason = await find_reason(bench, "drifting")
        bad, good = (
            await bench.submit([[1, 2]], model="drifting"),
            await bench.submit([[1, 2]], model="healthy"),
        )
        failed, done = await bench.wait(*bad, *good)

    assert reason is not None
    assert reason.startswith(CANARY_DRIFT)
    assert "0.5" in reason
    assert failed.state is JobState.FAILED
    assert bench.problem(failed).code == "model_unavailable"
    assert CANARY_DRIFT in bench.problem(failed).message
    assert done.state is JobState.SUCCEEDED
    assert drifting.batches == []


async def test_what_waits_for_a_drifted_model_is_given_back() -> None:
    """Behind the check nothing goes through the model: it ends with an error worth a retry."""
    scorer, other = ArithmeticScorer(), ArithmeticScorer("other")
    scorer.gate = threading.Event()
    batcher = MicroBatcher(budget_tokens=3, deadline=HardDeadline(60))
    error = UnavailableError("drifted")

    def submit(to: ArithmeticScorer, *keys: str) -> Submission:
        tickets = [Ticket(key, Lane.NORMAL, [create_sequence(1, 1, 1)]) for key in keys]
        return batcher.submit(to, tickets)

    first = submit(scorer, "first")
    assert await asyncio.to_thread(scorer.entered.acquire, timeout=20)
    behind, beside = submit(scorer, "a", "b"), submit(other, "c")
    check = batcher.run_between("canary", lambda: batcher.drop(scorer, error))
    scorer.gate.set()
    await asyncio.wrap_future(check)
    after = submit(scorer, "late")
    for submission in (first, behind, beside, after):
        await submission.wait()
    batcher.stop()

    assert first.tickets["first"].error is None
    assert [behind.tickets[key].error for key in "ab"] == [error, error]
    assert after.tickets["late"].error is error
    assert beside.tickets["c"].error is None
    assert len(scorer.batches) == 1
    assert error.retryable


async def test_errands_end_with_the_batcher() -> None:
    """Who waits for the device's thread is answered when there is none any more."""
    scorer = ArithmeticScorer()
    scorer.gate = threading.Event()
    batcher = MicroBatcher(budget_tokens=3, deadline=HardDeadline(60))
    batcher.submit(scorer, [Ticket("k", Lane.NORMAL, [create_sequence(1)])])
    assert await asyncio.to_thread(scorer.entered.acquire, timeout=20)
    waiting, given_up = (batcher.run_between("canary", lambda: 1) for _ in range(2))
    given_up.cancel()
    batcher.close()
    scorer.gate.set()
    batcher.stop()

    with pytest.raises(UnavailableError):
        await asyncio.wrap_future(waiting)
    with pytest.raises(UnavailableError):
        await asyncio.wrap_future(batcher.run_between("canary", lambda: 1))


async def test_an_errand_nobody_waits_for_is_skipped() -> None:
    """A check that was given up before its turn does not run."""
    batcher = MicroBatcher(budget_tokens=3, deadline=HardDeadline(60))
    gate, ran = threading.Event(), threading.Event()
    blocking = batcher.run_between("gate", lambda: gate.wait(20))
    skipped = batcher.run_between("canary", ran.set)
    skipped.cancel()
    gate.set()

    assert await asyncio.wrap_future(blocking)
    assert await asyncio.wrap_future(batcher.run_between("canary", lambda: 7)) == 7
    assert not ran.is_set()
    batcher.stop()


@pytest.mark.parametrize(
    ("raised", "survives"),
    [(OutOfMemoryError("full"), True), (ValueError("what"), False)],
)
async def test_a_canary_that_raises(
    raised: Exception, survives: bool, often: Settings, bench: Bench
) -> None:
    """Too little memory proves nothing; inputs that no longer pass are a fault of the model."""
    scorer = CheckedScorer()
    async with run_worker(often, scorer):
        await bench.wait_for_models("sums")
        message = "canary not checked" if survives else "model failed"
        with heed(message) as heard:
            scorer.raised = raised
            await heard.wait()
        if survives:
            scorer.raised = None
            (row,) = await bench.wait(*await bench.submit([[1, 2]]))
            assert row.state is JobState.SUCCEEDED
        else:
            assert "ValueError" in str(await find_reason(bench, "sums"))


async def test_a_canary_that_loses_the_device(often: Settings, bench: Bench) -> None:
    """It ends the process, as a forward that does."""
    scorer = CheckedScorer()
    async with run_worker(often, scorer, exit_code=70) as worker:
        await bench.wait_for_models("sums")
        scorer.raised = DeviceLostError("gone")
        async with asyncio.timeout(20):
            await worker.ended.wait()

    assert scorer.checks


async def test_a_weight_that_changes_under_a_live_model(
    often: Settings,
    bench: Bench,
    tmp_path: Path,
    tiny_llama_classifier: Path,
) -> None:
    """A real model with one changed weight takes no further job, and says why."""
    config = ModelConfig(source=str(tiny_llama_classifier))
    scorer = load_model("tiny", config, tmp_path / "canaries")
    assert isinstance(scorer, ModelScorer)
    async with run_worker(often, scorer):
        await bench.wait_for_models("tiny")
        (before,) = await bench.wait(*await bench.submit([[9, 10, 11]], model="tiny"))
        with torch.no_grad():
            next(scorer.network.backbone.module.parameters()).mul_(1.01)
        reason = await find_reason(bench, "tiny")
        (after,) = await bench.wait(*await bench.submit([[9, 10, 11]], model="tiny"))

    assert before.state is JobState.SUCCEEDED
    assert reason is not None
    assert reason.startswith(CANARY_DRIFT)
    assert str(tmp_path / "canaries") in reason
    assert after.state is JobState.FAILED
    assert bench.problem(after).code == "model_unavailable"
