"""The MicroBatcher: budgets, lanes, and one answer per sequence whatever happens."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from contract.errors import DeadlineExceededError, DeviceLostError, OutOfMemoryError, ScoreError
from contract.jobs import Lane
from tests.worker.scorers import ArithmeticScorer, create_sequence
from worker.batcher import MicroBatcher, Ticket
from worker.deadlines import HardDeadline
from worker.isolation import Failure


@pytest.fixture
def batcher() -> Iterator[MicroBatcher]:
    """A batcher with a budget of eight tokens."""
    made = MicroBatcher(budget_tokens=8, deadline=HardDeadline(60))
    yield made
    made.stop()


def create_ticket(key: str, *rows: list[int], lane: Lane = Lane.NORMAL) -> Ticket:
    """Return a ticket whose sequences are these ids."""
    return Ticket(key, lane, [create_sequence(*row) for row in rows])


def sums_of(ticket: Ticket) -> list[float | str]:
    """Return the ticket's sums, and the codes of what failed."""
    return [
        answer.error.code if isinstance(answer, Failure) else float(answer.values[0])
        for answer in ticket.answers
        if answer is not None
    ]


async def test_every_sequence_gets_its_own_answer(batcher: MicroBatcher) -> None:
    """Answers come back in the order of each ticket, however they were batched."""
    scorer = ArithmeticScorer()
    tickets = [create_ticket("a", [1], [2, 3, 4], [5]), create_ticket("b", [6, 7])]

    await batcher.submit(scorer, tickets).wait()

    assert [sums_of(ticket) for ticket in tickets] == [[1, 9, 5], [13]]
    assert batcher.batches == len(scorer.batches)
    assert batcher.forward_s >= 0


async def test_batches_keep_the_budget_and_take_the_longest_first(batcher: MicroBatcher) -> None:
    """No batch holds more than the budget unless one sequence alone does."""
    scorer = ArithmeticScorer()
    ticket = create_ticket("a", [1] * 3, [1] * 20, [1] * 5, [1] * 4)

    await batcher.submit(scorer, [ticket]).wait()

    assert [[len(row) for row in batch] for batch in scorer.batches] == [[20], [5], [4, 3]]
    assert sums_of(ticket) == [3, 20, 5, 4]


async def test_a_shared_prefix_is_counted_once(batcher: MicroBatcher) -> None:
    """Sequences of one group fill the budget with their own tokens only."""
    scorer = ArithmeticScorer()
    rows = [create_sequence(1, 2, 3, 4, n, group=b"g", prefix_length=4) for n in range(4)]

    await batcher.submit(scorer, [Ticket("a", Lane.NORMAL, rows)]).wait()

    assert [len(batch) for batch in scorer.batches] == [4]


async def test_an_urgent_lane_overtakes_between_two_batches(batcher: MicroBatcher) -> None:
    """What is interactive goes on the device next, though bulk came first."""
    scorer = ArithmeticScorer()
    scorer.gate = threading.Event()
    bulk = batcher.submit(scorer, [create_ticket("b", [1] * 8, [1] * 8, [1] * 8, lane=Lane.BULK)])
    await asyncio.to_thread(scorer.entered.acquire)
    urgent = batcher.submit(scorer, [create_ticket("i", [9], lane=Lane.INTERACTIVE)])
    waiting = batcher.waiting_tokens
    scorer.gate.set()

    await urgent.wait()
    await bulk.wait()

    assert waiting == 17
    assert scorer.batches[1][0] == [9]


async def test_lanes_of_one_submission_are_told_apart(batcher: MicroBatcher) -> None:
    """A submission may mix lanes; the interactive part goes first."""
    scorer = ArithmeticScorer()
    tickets = [
        create_ticket("b", [1] * 8, lane=Lane.BULK),
        create_ticket("i", [2] * 8, lane=Lane.INTERACTIVE),
    ]

    await batcher.submit(scorer, tickets).wait()

    assert [batch[0][0] for batch in scorer.batches] == [2, 1]


async def test_models_are_not_mixed(batcher: MicroBatcher) -> None:
    """A batch goes through one model."""
    one, two = ArithmeticScorer("one"), ArithmeticScorer("two")
    one.gate = threading.Event()
    first = batcher.submit(one, [create_ticket("a", [1])])
    await asyncio.to_thread(one.entered.acquire)
    others = [batcher.submit(two, [create_ticket("b", [2])])]
    others.append(batcher.submit(one, [create_ticket("c", [3])]))
    one.gate.set()

    for submission in [first, *others]:
        await submission.wait()

    assert one.batches == [[[1]], [[3]]]
    assert two.batches == [[[2]]]


async def test_nothing_to_score_is_done_at_once(batcher: MicroBatcher) -> None:
    """A ticket without sequences has all its answers, alone or beside others."""
    await batcher.submit(ArithmeticScorer(), [create_ticket("a")]).wait()
    mixed = [create_ticket("a"), create_ticket("b", [4])]

    await batcher.submit(ArithmeticScorer(), mixed).wait()

    assert sums_of(mixed[1]) == [4]


async def test_one_bad_sequence_fails_alone(batcher: MicroBatcher) -> None:
    """An exception is traced to its sequence; the neighbours have their readings."""

    def refuse_seven(batch: list[list[int]]) -> None:
        if [7] in batch:
            raise ValueError(batch)

    ticket = create_ticket("a", *[[n] for n in range(8)])

    await batcher.submit(ArithmeticScorer(fault=refuse_seven), [ticket]).wait()

    assert sums_of(ticket) == [0, 1, 2, 3, 4, 5, 6, "forward_failed"]
    assert all(answer.proven for answer in ticket.answers if isinstance(answer, Failure))


async def test_the_search_for_culprits_is_bounded() -> None:
    """A model that always raises costs a bounded number of forwards; the rest is unproven."""

    def refuse(batch: list[list[int]]) -> None:
        raise ValueError(batch)

    scorer = ArithmeticScorer(fault=refuse)
    batcher = MicroBatcher(budget_tokens=4096, deadline=HardDeadline(60))
    ticket = create_ticket("a", *[[n] for n in range(1000)])

    await batcher.submit(scorer, [ticket]).wait()
    batcher.stop()

    assert len(ticket.answers) == 1000
    assert sum(isinstance(a, Failure) and not a.proven for a in ticket.answers) > 900
    assert len(scorer.batches) <= 1 + 16 + 8 * 10


async def test_a_short_list_of_readings_is_a_fault(batcher: MicroBatcher) -> None:
    """A score is never taken from a forward that answers for another number of sequences."""
    scorer = ArithmeticScorer()
    complete = scorer.forward
    scorer.forward = lambda sequences: complete(sequences)[1:]  # type: ignore[method-assign]
    ticket = create_ticket("a", [1], [2])

    await batcher.submit(scorer, [ticket]).wait()

    assert sums_of(ticket) == ["forward_failed", "forward_failed"]


async def test_out_of_memory_halves_and_is_remembered(batcher: MicroBatcher) -> None:
    """After one failure the same shape is never tried at that size again."""

    def fit_two(batch: list[list[int]]) -> None:
        if len(batch) > 2:
            raise OutOfMemoryError

    scorer = ArithmeticScorer(fault=fit_two)
    first, second = (create_ticket(key, *[[1, 1]] * 4) for key in "ab")

    await batcher.submit(scorer, [first]).wait()
    scorer.batches.clear()
    await batcher.submit(scorer, [second]).wait()

    assert sums_of(first) == sums_of(second) == [2, 2, 2, 2]
    assert [len(batch) for batch in scorer.batches] == [2, 2]


async def test_an_item_too_large_for_the_device_says_so(batcher: MicroBatcher) -> None:
    """A sequence that does not fit even alone fails as out of memory."""

    def refuse_long(batch: list[list[int]]) -> None:
        if any(len(row) > 3 for row in batch):
            raise MemoryError

    ticket = create_ticket("a", [1] * 4, [1])

    await batcher.submit(ArithmeticScorer(fault=refuse_long), [ticket]).wait()

    assert sums_of(ticket) == ["out_of_memory", 1]


async def test_a_lost_device_answers_everybody_and_says_so() -> None:
    """Nobody waits for a device that is gone, neither before nor after it went."""

    def lose(batch: list[list[int]]) -> None:
        raise DeviceLostError

    lost = threading.Event()
    batcher = MicroBatcher(budget_tokens=8, deadline=HardDeadline(60), on_device_lost=lost.set)
    scorer = ArithmeticScorer(fault=lose)
    before, after = create_ticket("a", [1] * 8, [1] * 8), create_ticket("b", [1])

    await batcher.submit(scorer, [before]).wait()
    await batcher.submit(scorer, [after]).wait()
    batcher.stop()

    assert lost.is_set()
    assert isinstance(before.error, DeviceLostError)
    assert isinstance(after.error, DeviceLostError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_thread_leaves_nobody_waiting() -> None:
    """Even what no handler catches reaches every waiting submission."""

    def die(batch: list[list[int]]) -> None:
        raise KeyboardInterrupt

    batcher = MicroBatcher(budget_tokens=8, deadline=HardDeadline(60))
    ticket = create_ticket("a", [1])

    await batcher.submit(ArithmeticScorer(fault=die), [ticket]).wait()
    batcher.stop()

    assert isinstance(ticket.error, ScoreError)
    assert ticket.error.retryable


async def test_an_abandoned_job_is_skipped(batcher: MicroBatcher) -> None:
    """What was given up leaves the queue, and its neighbours are scored."""
    scorer = ArithmeticScorer()
    scorer.gate = threading.Event()
    blocker = batcher.submit(scorer, [create_ticket("x", [1] * 8)])
    await asyncio.to_thread(scorer.entered.acquire)
    dropped, kept = create_ticket("a", [2], [3]), create_ticket("b", [4])
    submission = batcher.submit(scorer, [dropped, kept])
    submission.abandon("a", DeadlineExceededError())
    submission.abandon("a", DeadlineExceededError())
    scorer.gate.set()

    await blocker.wait()
    await submission.wait()

    assert isinstance(dropped.error, DeadlineExceededError)
    assert sums_of(kept) == [4]
    assert scorer.batches[1:] == [[[4]]]


async def test_a_job_may_be_abandoned_on_the_device(batcher: MicroBatcher) -> None:
    """Its waiter is answered at once; the readings that come later change nothing."""
    scorer = ArithmeticScorer()
    scorer.gate = threading.Event()
    ticket = create_ticket("a", [1])
    submission = batcher.submit(scorer, [ticket])
    await asyncio.to_thread(scorer.entered.acquire)

    submission.abandon("a", DeadlineExceededError())
    await submission.wait()
    scorer.gate.set()
    await batcher.submit(scorer, [create_ticket("b", [2])]).wait()

    assert ticket.answers == [None]


async def test_stopping_answers_what_still_waits() -> None:
    """A batch in flight ends; what has not begun is given back as retryable."""
    scorer = ArithmeticScorer()
    scorer.gate = threading.Event()
    batcher = MicroBatcher(budget_tokens=8, deadline=HardDeadline(60))
    running, waiting = create_ticket("a", [1] * 8), create_ticket("b", [1] * 8)
    submissions = [batcher.submit(scorer, [running])]
    await asyncio.to_thread(scorer.entered.acquire)
    submissions.append(batcher.submit(scorer, [waiting]))
    stopping = asyncio.create_task(asyncio.to_thread(batcher.stop))
    scorer.gate.set()

    for submission in submissions:
        await submission.wait()
    await stopping

    assert sums_of(running) == [8]
    assert waiting.error is None or waiting.error.retryable


def test_a_hang_is_noticed() -> None:
    """What runs longer than the limit is named, and so is an event loop that stands still."""
    patient, strict = HardDeadline(60), HardDeadline(0)
    with patient.watch("forward"):
        calm = patient.find_overdue()
    with strict.watch("forward"):
        stuck_loop = strict.find_overdue()

    assert calm is None
    assert patient.find_overdue() is None
    assert stuck_loop == "event loop"


def test_a_hung_forward_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the loop turns, the overdue stage is the one that is named."""
    deadline = HardDeadline(5)
    now = 1000.0
    monkeypatch.setattr("worker.deadlines.time.monotonic", lambda: now)
    with deadline.watch("forward"):
        now = 1006.0
        deadline.move()

        assert deadline.find_overdue() == "forward"
