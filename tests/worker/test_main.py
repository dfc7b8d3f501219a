"""A whole worker on real stores: from a queued row to a durable result, and every other end."""

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from contract.config import Settings
from contract.errors import DeviceLostError, InvalidRequestError, ModelLoadError
from contract.jobs import JobState, Lane
from contract.models import ModelConfig, ModelState, ModelStatus
from contract.results import StoredResult
from contract.scores import ItemError, ScoreRequest
from storage import claims, workers
from storage.counters import read_counts
from storage.events import list_events
from tests.worker.harness import Bench, heed, run_worker
from tests.worker.scorers import ArithmeticScorer
from worker.batcher import MicroBatcher, Submission, Ticket
from worker.engine.seam import Budget, JobScores, PreparedJob, Reading, Scorer
from worker.loading import Engine
from worker.main import Worker
from worker.scoring import DEVICE_LOST_EXIT


async def test_a_job_is_scored_and_stored(settings: Settings, bench: Bench) -> None:
    """Claimed, scored, written: the row says succeeded and the bytes are in the blob."""
    async with run_worker(settings, ArithmeticScorer()):
        [job] = await bench.submit([[1, 2], [3]])
        [row] = await bench.wait(job)

    assert row.state is JobState.SUCCEEDED
    assert (row.scored_count, row.failed_count, row.attempt) == (2, 0, 1)
    assert await bench.scores(row) == [[3], [3]]


async def test_without_hints_jobs_finish(settings: Settings, bench: Bench) -> None:
    """SQL is the queue: no hint was sent at all."""
    async with run_worker(settings, ArithmeticScorer()) as worker:
        ids = await bench.submit(*[[[n]] for n in range(50)], hinted=False)
        rows = await bench.wait(*ids)

    assert worker.id
    assert {row.state for row in rows} == {JobState.SUCCEEDED}
    assert [(await bench.scores(row))[0][0] for row in rows] == list(range(50))


async def test_a_batch_shares_one_blob(settings: Settings, bench: Bench) -> None:
    """Jobs that were claimed together lie in one file."""
    ids = await bench.submit(*[[[n]] for n in range(20)])
    async with run_worker(settings, ArithmeticScorer()):
        rows = await bench.wait(*ids)

    assert len({row.blob_key for row in rows}) == 1


async def test_a_job_without_items_succeeds(settings: Settings, bench: Bench) -> None:
    """Nothing to score is no failure."""
    async with run_worker(settings, ArithmeticScorer()):
        [job] = await bench.submit([])
        [row] = await bench.wait(job)

    assert (row.state, row.scored_count) == (JobState.SUCCEEDED, 0)


async def test_a_bad_item_makes_its_job_partial(settings: Settings, bench: Bench) -> None:
    """Its neighbours, in the same job and in others, have their scores."""

    def refuse_seven(batch: list[list[int]]) -> None:
        if [7] in batch:
            raise ValueError

    ids = await bench.submit([[1], [7], [3]], [[4]], [[7]])
    async with run_worker(settings, ArithmeticScorer(fault=refuse_seven)):
        partial, whole, failed = await bench.wait(*ids)

    assert partial.state is JobState.PARTIAL
    assert (partial.scored_count, partial.failed_count) == (2, 1)
    assert partial.result is not None
    errors = msgspec.json.decode(partial.result, type=StoredResult).errors
    assert [(error.index, error.code) for error in errors] == [(1, "forward_failed")]
    scores = await bench.scores(partial)
    assert (scores[0], scores[2]) == ([1], [3])
    assert math.isnan(scores[1][0])
    assert (whole.state, failed.state) == (JobState.SUCCEEDED, JobState.FAILED)
    assert bench.problem(failed).param == "items[0]"


async def test_a_request_that_the_model_refuses_fails(settings: Settings, bench: Bench) -> None:
    """The job's error is the engine's, with status and path; the others of the batch go on."""
    scorer = ArithmeticScorer()
    prepare = scorer.prepare

    def refuse_nines(request: ScoreRequest, *, within_s: float = math.inf) -> PreparedJob:
        if request.items == [[9]]:
            message = "no nines"
            raise InvalidRequestError(message, param="items")
        if request.items == [[8]]:
            raise RuntimeError(request)
        return prepare(request, within_s=within_s)

    scorer.prepare = refuse_nines  # type: ignore[method-assign]
    ids = await bench.submit([[9]], [[8]], [[1]])
    async with run_worker(settings, scorer):
        refused, raised, fine = await bench.wait(*ids)

    problem = bench.problem(refused)
    assert (problem.code, problem.status, problem.param) == ("invalid_request", 422, "items")
    assert bench.problem(raised).code == "internal"
    assert "RuntimeError" in bench.problem(raised).message
    assert fine.state is JobState.SUCCEEDED


async def test_an_exception_in_finishing_ends_the_job(settings: Settings, bench: Bench) -> None:
    """Whatever goes wrong, no job runs for ever."""
    scorer = ArithmeticScorer()
    finish = scorer.finish

    def raise_on_two(prepared: PreparedJob, readings: Sequence[Reading | ItemError]) -> JobScores:
        if len(readings) == 2:
            raise KeyError(len(readings))
        return finish(prepared, readings)

    scorer.finish = raise_on_two  # type: ignore[method-assign]
    ids = await bench.submit([[1], [2]], [[3]])
    async with run_worker(settings, scorer):
        broken, fine = await bench.wait(*ids)

    assert (broken.state, fine.state) == (JobState.FAILED, JobState.SUCCEEDED)
    assert bench.problem(broken).code == "internal"


async def test_an_exception_in_encoding_ends_the_batch(settings: Settings, bench: Bench) -> None:
    """A fault outside any single job still gives every job of the batch its end."""
    scorer = ArithmeticScorer()

    def load(_name: str, _config: ModelConfig) -> ArithmeticScorer:
        return scorer

    def refuse(_scores: object) -> None:
        raise RuntimeError

    engine = Engine(load, refuse)  # type: ignore[arg-type]
    worker = Worker(settings, {"sums": ModelConfig(source="test")}, engine)
    running = asyncio.create_task(worker.run())
    ids = await bench.submit([[1]], [[2]])
    rows = await bench.wait(*ids)
    worker.stop()

    assert await running == 0
    assert {bench.problem(row).code for row in rows} == {"internal"}


async def test_a_model_that_fails_to_load_stops_no_other(settings: Settings, bench: Bench) -> None:
    """Its jobs end with its reason, the registry shows it, and the other model serves."""
    failing = {"broken": ModelLoadError("no weights"), "odd": RuntimeError("surprise")}
    ids = await bench.submit([[1]], model="broken")
    ids += await bench.submit([[1]], model="odd")
    ids += await bench.submit([[2]])
    async with run_worker(settings, ArithmeticScorer(), failing=failing):
        broken, odd, fine = await bench.wait(*ids)
        async with bench.database.snapshot() as tx:
            statuses = await workers.models(tx, alive_within_s=60)

    assert fine.state is JobState.SUCCEEDED
    problem = bench.problem(broken)
    assert (problem.code, problem.status) == ("model_unavailable", 503)
    assert "no weights" in problem.message
    assert "surprise" in bench.problem(odd).message
    states = {status.name: status.state for status in statuses}
    assert states == {
        "broken": ModelState.FAILED,
        "odd": ModelState.FAILED,
        "sums": ModelState.READY,
    }


async def test_jobs_wait_for_another_worker_that_loads(settings: Settings, bench: Bench) -> None:
    """A worker whose model failed leaves the jobs to one that still may serve it."""
    other = workers.WorkerRow(
        id="wrk_other",
        host="h",
        pid=1,
        device="cpu",
        models=[ModelStatus(name="broken", state=ModelState.LOADING)],
    )
    async with bench.database.transaction() as tx:
        await workers.put_worker(tx, other)
    [job, marker] = await bench.submit([[1]], model="broken") + await bench.submit([[1]])
    async with run_worker(settings, ArithmeticScorer(), failing={"broken": ModelLoadError("x")}):
        await bench.wait(marker)
        waiting = await bench.get(job)
        async with bench.database.transaction() as tx:
            await workers.drop_worker(tx, "wrk_other")
        [row] = await bench.wait(job)

    assert waiting.state is JobState.QUEUED
    assert row.state is JobState.FAILED


async def test_a_running_job_is_cancelled(settings: Settings, bench: Bench) -> None:
    """The heartbeat hears of it, the waiting items leave the device alone, no result is kept."""
    scorer = ArithmeticScorer()
    scorer.gate = threading.Event()
    async with run_worker(settings, scorer):
        [job] = await bench.submit([[1]])
        await asyncio.to_thread(scorer.entered.acquire)
        await bench.cancel(job)
        [row] = await bench.wait(job)
        scorer.gate.set()

    assert row.state is JobState.CANCELLED
    assert row.tensors == []


async def test_run_timeout_ends_the_job(settings: Settings, bench: Bench) -> None:
    """A job that runs longer than it may fails with that code; the next one runs."""
    scorer = ArithmeticScorer()
    scorer.gate = threading.Event()
    async with run_worker(settings, scorer):
        [timed] = await bench.submit([[1]], run_timeout_s=0.1)
        [row] = await bench.wait(timed)
        [untimed] = await bench.submit([[2]])
        scorer.gate.set()
        [other] = await bench.wait(untimed)

    assert bench.problem(row).code == "deadline_exceeded"
    assert other.state is JobState.SUCCEEDED


async def test_run_timeout_does_not_wait_for_the_batch(settings: Settings, bench: Bench) -> None:
    """A neighbour holds the device: the end is there when the time is over, and stays."""
    scorer = ArithmeticScorer()
    scorer.gate = threading.Event()
    [timed] = await bench.submit([[1]], run_timeout_s=0.1, hinted=False)
    [untimed] = await bench.submit([[2]], hinted=False)
    async with run_worker(settings, scorer):
        [row] = await bench.wait(timed)
        meanwhile = await bench.get(untimed)
        scorer.gate.set()
        [other] = await bench.wait(untimed)
    later = await bench.get(timed)
    async with bench.database.snapshot() as tx:
        counts = await read_counts(tx)
        events = await list_events(tx, timed)

    assert bench.problem(row).code == "deadline_exceeded"
    assert sorted(scorer.batches[0]) == [[1], [2]]
    assert meanwhile.state is JobState.RUNNING
    assert other.state is JobState.SUCCEEDED
    assert (later.version, later.tensors, len(events)) == (row.version, [], 1)
    assert counts.get("fenced_writes", 0) == 0


async def test_drain_finishes_the_batch_in_flight(
    settings: Settings, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the device is stored, the rest is queued again with nothing held against it."""
    closed, close = threading.Event(), MicroBatcher.close

    def tell(batcher: MicroBatcher) -> None:
        close(batcher)
        closed.set()

    monkeypatch.setattr(MicroBatcher, "close", tell)
    scorer = ArithmeticScorer()
    scorer.gate = threading.Event()
    tokens = [1] * 3000
    ids = await bench.submit(*[[tokens] for _ in range(6)])
    async with run_worker(settings, scorer) as worker:
        await asyncio.to_thread(scorer.entered.acquire)
        worker.stop()
        await asyncio.to_thread(closed.wait)  # else the device may begin another batch
        scorer.gate.set()
    rows = [await bench.get(job_id) for job_id in ids]

    states = [row.state for row in rows]
    assert states.count(JobState.SUCCEEDED) == len(scorer.batches) == 1
    assert states.count(JobState.QUEUED) == 5
    assert {(row.crash_count, row.error_count) for row in rows} == {(0, 0)}


async def test_a_second_stop_ends_at_once(
    settings: Settings, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second signal does not wait for anything."""
    codes: list[int] = []
    monkeypatch.setattr("worker.main.os._exit", codes.append)
    monkeypatch.setattr("worker.main.logging.shutdown", lambda: None)
    async with run_worker(settings, ArithmeticScorer()) as worker:
        worker.stop()
        worker.stop()

    assert codes == [143]


async def test_a_drain_that_takes_too_long_gives_up(
    settings: Settings, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that does not end cannot keep the process for ever."""
    codes: list[int] = []
    scorer = ArithmeticScorer()
    scorer.gate = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        assert scorer.gate is not None
        scorer.gate.set()

    monkeypatch.setattr("worker.main.os._exit", leave)
    monkeypatch.setattr("worker.main.logging.shutdown", lambda: None)
    short = msgspec.structs.replace(settings, drain_s=0.1)
    async with run_worker(short, scorer) as worker:
        await bench.submit([[1]])
        await asyncio.to_thread(scorer.entered.acquire)
        worker.stop()

    assert codes == [1]


async def test_a_lost_device_ends_the_process_and_loses_no_job(
    settings: Settings, bench: Bench
) -> None:
    """The batch goes back to the queue, and the exit code asks for a restart."""

    def lose(_batch: list[list[int]]) -> None:
        raise DeviceLostError

    scorer = ArithmeticScorer(fault=lose)
    [job] = await bench.submit([[1]])
    async with run_worker(settings, scorer, exit_code=DEVICE_LOST_EXIT) as worker:
        await worker.ended.wait()
    row = await bench.get(job)

    assert (row.state, row.crash_count) == (JobState.QUEUED, 0)


@pytest.fixture
def urgent_arrived(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when an interactive job waits for the device."""
    arrived = asyncio.Event()
    submit = MicroBatcher.submit

    def watch(batcher: MicroBatcher, scorer: Scorer, tickets: Sequence[Ticket]) -> Submission:
        submission = submit(batcher, scorer, tickets)
        if any(ticket.lane is Lane.INTERACTIVE for ticket in tickets):
            arrived.set()
        return submission

    monkeypatch.setattr(MicroBatcher, "submit", watch)
    return arrived


async def test_bulk_does_not_starve_interactive(
    settings: Settings, bench: Bench, urgent_arrived: asyncio.Event
) -> None:
    """While bulk fills the device, an interactive job is claimed and overtakes."""
    scorer = ArithmeticScorer()
    scorer.gate = threading.Event()
    bulk = await bench.submit(*[[[1] * 4000, [1] * 4000] for _ in range(8)], lane=Lane.BULK)
    async with run_worker(settings, scorer):
        await asyncio.to_thread(scorer.entered.acquire)
        [urgent] = await bench.submit([[5]], lane=Lane.INTERACTIVE)
        await asyncio.wait_for(urgent_arrived.wait(), 20)
        scorer.gate.set()
        await bench.wait(urgent, *bulk)

    position = next(n for n, batch in enumerate(scorer.batches) if [5] in batch)
    assert position == 1


async def test_a_claim_of_many_batches_delays_nobody(
    settings: Settings, bench: Bench, urgent_arrived: asyncio.Event
) -> None:
    """A fast model's worker claims eight batches of bulk at once; what is urgent waits for one."""
    scorer = ArithmeticScorer()
    async with run_worker(settings, scorer):
        await bench.wait(*await bench.submit([[1] * 4000]))  # now it is known to be fast
        scorer.gate = threading.Event()
        bulk = await bench.submit(*[[[1] * 4000] for _ in range(12)], lane=Lane.BULK)
        await asyncio.to_thread(scorer.entered.acquire)
        await asyncio.to_thread(scorer.entered.acquire)
        begun = len(scorer.batches)
        claimed = [job for job in bulk if (await bench.get(job)).attempt > 0]
        [urgent] = await bench.submit([[5]], lane=Lane.INTERACTIVE)
        await asyncio.wait_for(urgent_arrived.wait(), 20)
        scorer.gate.set()
        await bench.wait(urgent, *bulk)

    position = next(n for n, batch in enumerate(scorer.batches) if [5] in batch)
    assert len(claimed) >= 8
    assert position == begun


async def test_the_worker_publishes_itself_again(settings: Settings, bench: Bench) -> None:
    """A registry that lost its rows hears of the worker at the next heartbeat."""
    async with run_worker(settings, ArithmeticScorer()) as worker:
        await bench.wait_for_models("sums")
        async with bench.database.transaction() as tx:
            await workers.drop_worker(tx, worker.id)
        await bench.wait_for_models("sums")
    async with bench.database.snapshot() as tx:
        left = await workers.list_workers(tx)

    assert left == []


async def test_hints_reach_the_worker_of_their_model(settings: Settings, bench: Bench) -> None:
    """Two workers with a model each: every hint wakes the one that can do it."""
    slow = msgspec.structs.replace(settings, sweep_s=20.0)
    one, two = ArithmeticScorer("one"), ArithmeticScorer("two")
    async with run_worker(slow, one), run_worker(slow, two):
        await bench.wait_for_models("one", "two")
        async with asyncio.timeout(15):
            for model in ["one", "two"] * 5:
                [job] = await bench.submit([[1]], model=model)
                [row] = await bench.wait(job)
                assert row.state is JobState.SUCCEEDED


async def test_a_claim_that_raises_ends_nothing(
    settings: Settings, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one statement raises is logged; the worker goes on, and claims when it can again."""
    failures = iter(range(3))
    claim = claims.claim_jobs

    async def claim_at_last(*given: Any, **named: Any) -> Any:
        if next(failures, None) is not None:
            message = "value out of range"
            raise ValueError(message)
        return await claim(*given, **named)

    monkeypatch.setattr("worker.pump.claim_jobs", claim_at_last)
    with heed("claiming raised") as raised:
        async with run_worker(settings, ArithmeticScorer()):
            [job] = await bench.submit([[1]])
            [row] = await bench.wait(job)

    assert raised.is_set()
    assert row.state is JobState.SUCCEEDED


async def test_a_job_that_takes_too_long_to_tokenise_fails_alone(
    settings: Settings, bench: Bench
) -> None:
    """Its neighbours of the same claim go on; the limit is the setting's."""
    scorer = ArithmeticScorer()
    prepare = scorer.prepare

    def prepare_slowly(request: ScoreRequest, *, within_s: float = math.inf) -> PreparedJob:
        if request.items == [[2]]:
            budget = Budget(within_s)
            time.sleep(2 * within_s)
            budget.check()
        return prepare(request, within_s=within_s)

    scorer.prepare = prepare_slowly  # type: ignore[method-assign]
    short = msgspec.structs.replace(settings, prepare_timeout_s=0.1)
    ids = await bench.submit([[1]], [[2]], [[3]])
    async with run_worker(short, scorer):
        rows = await bench.wait(*ids)

    assert [row.state for row in rows] == [JobState.SUCCEEDED, JobState.FAILED, JobState.SUCCEEDED]
    assert b"deadline_exceeded" in (rows[1].error or b"")
