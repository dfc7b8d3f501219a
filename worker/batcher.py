"""The MicroBatcher: sequences of many jobs in, one answer per sequence out.

The only place that decides what goes through a model together. It knows token counts, lanes and
lengths, no job, no SQL and no torch. One thread owns the device: it takes the next batch itself,
so between two batches there is no trip through the event loop, and what is urgent is chosen at the
last moment. Every submission is answered, also when a forward raises or the thread dies.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from contract.errors import DeviceLostError, ScoreError, UnavailableError
from contract.histograms import Histogram
from contract.jobs import LANES, Lane
from worker.deadlines import HardDeadline
from worker.engine.seam import Reading, Scorer, count_computed_tokens
from worker.engine.seam import Sequence as TokenSequence
from worker.isolation import Failure, MemoryLimits, forward_isolated

__all__ = ["MicroBatcher", "Submission", "Ticket"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
#: After this long a waiting run counts as one lane more urgent, so that bulk never starves.
_AGEING_S = 5.0
_RANK = {lane: rank for rank, lane in enumerate(LANES)}


@dataclass(slots=True, eq=False)
class Ticket:
    """What one job wants scored, and the answers so far. ``error`` says why it was given up."""

    key: str
    lane: Lane
    sequences: Sequence[TokenSequence]
    answers: list[Reading | Failure | None] = field(default_factory=list)
    missing: int = 0
    error: ScoreError | None = None
    submission: "Submission" = field(init=False)


@dataclass(slots=True, eq=False)
class _Run:
    """The part of a submission that waits in one lane, longest sequences first."""

    submission: "Submission"
    rank: int
    arrived_at: float
    waiting: list[tuple[Ticket, int]]  # popped from the end

    def urgency(self, now: float) -> tuple[float, float]:
        return (self.rank - (now - self.arrived_at) // _AGEING_S, self.arrived_at)


class Submission:
    """Jobs that were submitted together. Await ``wait()``; then each ticket has its answers."""

    def __init__(self, batcher: "MicroBatcher", scorer: Scorer, tickets: Sequence[Ticket]) -> None:
        self.scorer = scorer
        self.tickets = {ticket.key: ticket for ticket in tickets}
        self.open = sum(1 for ticket in tickets if ticket.sequences)
        self._batcher = batcher
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()

    async def wait(self) -> None:
        """Return when every ticket has all its answers or an error."""
        await self._done

    def abandon(self, key: str, error: ScoreError) -> None:
        """Give one job up: what is not yet on the device is skipped, and ``error`` is its end."""
        self._batcher.abandon(self, key, error)

    def finish(self) -> None:
        """Wake the waiter. Called with the batcher's lock held, from any thread."""
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


@dataclass(slots=True, eq=False)
class _Errand:
    """Something else that only the device's thread may do."""

    what: str
    call: Callable[[], object]
    answer: "Future[Any]"


class _Plan:
    """One batch in the making: a throw-away budget. Sequences of one group share a prefix."""

    def __init__(self, scorer: Scorer, limits: MemoryLimits) -> None:
        self.scorer = scorer
        self.entries: list[tuple[Ticket, int]] = []
        self.tokens = 0
        self._limits = limits
        self._limit = 0
        self._groups: set[bytes] = set()
        self._longest = 0

    def add(self, ticket: Ticket, index: int) -> bool:
        """Take a sequence in if it fits; the first one always does."""
        sequence = ticket.sequences[index]
        cost = sequence.cost_tokens
        if sequence.group and sequence.group in self._groups:
            cost -= sequence.prefix_length
        longest = max(self._longest, sequence.cost_tokens)
        limit = self._limit
        if longest.bit_length() != self._longest.bit_length():
            limit = self._limits.limit(self.scorer.description.name, longest)
        tokens = self.tokens + cost
        if self.entries and tokens > limit:
            return False
        if sequence.group:
            self._groups.add(sequence.group)
        self._longest, self._limit, self.tokens = longest, limit, tokens
        self.entries.append((ticket, index))
        return True


class MicroBatcher:
    """Feeds the device. ``submit``, ``abandon`` and ``stop`` are the event loop's.

    ``on_device_lost`` is called in the device thread when the device is poisoned: no forward will
    work again in this process.
    """

    def __init__(
        self,
        *,
        budget_tokens: int,
        deadline: HardDeadline,
        on_device_lost: Callable[[], object] = lambda: None,
    ) -> None:
        self.forward_s = 0.0
        self.forward_tokens = 0
        self.batches = 0
        self.batch_sequences = Histogram("batch_sequences")
        self.batch_tokens = Histogram("batch_tokens")
        self._limits = MemoryLimits(budget_tokens)
        self._deadline = deadline
        self._on_device_lost = on_device_lost
        self._changed = threading.Condition()
        self._runs: list[_Run] = []
        self._submissions: set[Submission] = set()
        self._errands: list[_Errand] = []
        self._dropped: dict[Scorer, ScoreError] = {}
        self._end: ScoreError | None = None
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)
        self._thread.start()

    def submit(self, scorer: Scorer, tickets: Sequence[Ticket]) -> Submission:
        """Queue the tickets' sequences for ``scorer`` and return at once."""
        submission = Submission(self, scorer, tickets)
        with self._changed:
            refusal = self._end or self._dropped.get(scorer)
            for ticket in tickets:
                ticket.submission = submission
                ticket.answers = [None] * len(ticket.sequences)
                ticket.missing = 0 if refusal else len(ticket.sequences)
                ticket.error = refusal
            if refusal is not None or submission.open == 0:
                submission.finish()
                return submission
            self._submissions.add(submission)
            self._runs += _split_by_lane(submission, tickets)
            self._changed.notify()
        return submission

    def run_between(self, what: str, call: Callable[[], _T]) -> "Future[_T]":
        """Have ``call`` run in the device's thread between two batches; raises what it raises."""
        answer: Future[_T] = Future()
        with self._changed:
            if self._end is None:
                self._errands.append(_Errand(what, call, answer))
                self._changed.notify()
            else:
                answer.set_exception(self._end)
        return answer

    def drop(self, scorer: Scorer, error: ScoreError) -> None:
        """Put nothing more through ``scorer``: what waits for it, or will, ends with ``error``."""
        with self._changed:
            self._dropped[scorer] = error
            self._runs = [run for run in self._runs if run.submission.scorer is not scorer]
            for submission in [each for each in self._submissions if each.scorer is scorer]:
                self._fail(submission, error)

    def abandon(self, submission: Submission, key: str, error: ScoreError) -> None:
        """See ``Submission.abandon``; harmless for a ticket that has all its answers."""
        ticket = submission.tickets[key]
        with self._changed:
            if ticket.missing:
                ticket.error, ticket.missing = error, 0
                self._close_ticket(submission)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that are submitted and not yet on the device."""
        with self._changed:
            return sum(
                ticket.sequences[index].cost_tokens
                for run in self._runs
                for ticket, index in run.waiting
            )

    def close(self) -> None:
        """Begin nothing more: after the batch in flight, whoever still waits gets an error."""
        with self._changed:
            self._end = self._end or UnavailableError("the worker is stopping")
            self._changed.notify()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close, and wait for the thread."""
        self.close()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        end: ScoreError = UnavailableError("the batcher's thread died")
        try:
            while (turn := self._take()) is not None:
                if isinstance(turn, _Errand):
                    self._run_errand(turn)
                else:
                    self._run(turn)
            end = self._end or end
        except DeviceLostError as error:
            _LOG.critical("device lost", extra={"reason": error.message})
            end = error
            self._on_device_lost()
        finally:
            self._fail_all(end)

    def _take(self) -> _Plan | _Errand | None:
        """Wait for work and return the next batch, or None when the batcher is stopped."""
        with self._changed:
            while True:
                if self._end is not None:
                    return None
                if self._errands:
                    return self._errands.pop(0)
                self._runs = [run for run in self._runs if run.waiting]
                plan = self._plan() if self._runs else None
                if plan is not None and plan.entries:
                    return plan
                if plan is None:
                    self._changed.wait()

    def _plan(self) -> _Plan:
        now = time.monotonic()
        self._runs.sort(key=lambda run: run.urgency(now))
        plan = _Plan(self._runs[0].submission.scorer, self._limits)
        for run in self._runs:
            if run.submission.scorer is plan.scorer and not _fill(plan, run):
                break
        return plan

    def _run(self, plan: _Plan) -> None:
        sequences = [ticket.sequences[index] for ticket, index in plan.entries]
        started_at = time.monotonic()
        with self._deadline.watch("forward"):
            answers = forward_isolated(plan.scorer, sequences, self._limits)
        self.forward_s += time.monotonic() - started_at
        self.forward_tokens += plan.tokens
        self.batches += 1
        self.batch_sequences.observe(len(sequences))
        self.batch_tokens.observe(count_computed_tokens(sequences))
        self._deliver(plan, answers)

    def _run_errand(self, errand: _Errand) -> None:
        if not errand.answer.set_running_or_notify_cancel():
            return
        try:
            with self._deadline.watch(errand.what):
                found = errand.call()
        except Exception as error:  # handed to the waiter
            errand.answer.set_exception(error)
            if isinstance(error, DeviceLostError):
                raise
        else:
            errand.answer.set_result(found)

    def _deliver(self, plan: _Plan, answers: Sequence[Reading | Failure]) -> None:
        with self._changed:
            for (ticket, index), answer in zip(plan.entries, answers, strict=True):
                if ticket.error is None:
                    ticket.answers[index] = answer
                    ticket.missing -= 1
                    if ticket.missing == 0:
                        self._close_ticket(ticket.submission)

    def _close_ticket(self, submission: Submission) -> None:
        submission.open -= 1
        if submission.open == 0:
            self._submissions.discard(submission)
            submission.finish()

    def _fail_all(self, error: ScoreError) -> None:
        with self._changed:
            self._end = self._end or error
            for submission in list(self._submissions):
                self._fail(submission, error)
            for errand in self._errands:
                if errand.answer.set_running_or_notify_cancel():
                    errand.answer.set_exception(error)
            self._errands.clear()
            self._runs.clear()

    def _fail(self, submission: Submission, error: ScoreError) -> None:
        for ticket in submission.tickets.values():
            if ticket.missing:
                ticket.error, ticket.missing = error, 0
        self._submissions.discard(submission)
        submission.finish()


def _split_by_lane(submission: Submission, tickets: Sequence[Ticket]) -> list[_Run]:
    """Sort for the device: shared prefixes beside each other, then by length, longest first."""
    lanes: dict[Lane, list[tuple[Ticket, int]]] = {}
    for ticket in tickets:
        entries = lanes.setdefault(ticket.lane, [])
        entries += [(ticket, index) for index in range(len(ticket.sequences))]
    now = time.monotonic()
    for entries in lanes.values():
        entries.sort(key=_sort_key)
    return [
        _Run(submission, _RANK[lane], now, entries) for lane, entries in lanes.items() if entries
    ]


def _sort_key(entry: tuple[Ticket, int]) -> tuple[bytes, int]:
    sequence = entry[0].sequences[entry[1]]
    return (sequence.group, sequence.cost_tokens)


def _fill(plan: _Plan, run: _Run) -> bool:
    """Move from the run into the plan what fits; return whether the run is empty."""
    while run.waiting:
        ticket, index = run.waiting[-1]
        if ticket.error is None and not plan.add(ticket, index):
            return False
        run.waiting.pop()
    return True
