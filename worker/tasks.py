"""What happens to a batch of claimed jobs, as named steps: this file tells the story.

prepare (tokenise, in a thread) → score (on the device) → conclude (scores and one safetensors
file, in a thread) → store (blob first, then one fenced transaction) → announce. Everything may
run twice: the attempt number decides whose result counts.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from contract import errors
from contract.config import Settings
from contract.errors import DeadlineExceededError, ScoreError, StoreUnavailableError
from contract.scores import ScoreRequest, Usage
from storage import claims as claims_table
from storage.blobs import BlobInfo
from storage.claims import Claim, ClaimedJob
from storage.forgetting import rewrite
from storage.ids import create_id
from storage.outcomes import JobOutcome, complete_jobs, find_completed
from storage.score_cache import put_cached
from worker.batcher import MicroBatcher, Submission, Ticket
from worker.caching import list_entries, recall, tell_known
from worker.crashing import crash_here
from worker.deadlines import HardDeadline
from worker.earlier import list_open, place_readings, read_earlier
from worker.engine.encoding import EncodedBatch
from worker.engine.merging import keep_all, merge
from worker.engine.seam import JobScores, PreparedJob, Scorer
from worker.engine.seam import Sequence as TokenSequence
from worker.isolation import Failure
from worker.leases import LeaseKeeper
from worker.results import fail_job, has_scores, list_readings, render_outcome, render_problem
from worker.stores import Stores
from worker.work import Conclusion, Counts, Work

__all__ = ["Tasks"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0
_RETRY_DELAY_S = 1.0


@dataclass(slots=True)
class Tasks:
    """The steps, and what they need. Belongs to the event loop; ``announced`` wakes deliveries."""

    settings: Settings
    stores: Stores
    leases: LeaseKeeper
    batcher: MicroBatcher
    deadline: HardDeadline
    encode: Callable[[Mapping[str, JobScores]], EncodedBatch]
    announced: Callable[[], object] = lambda: None
    counts: Counts = field(default_factory=Counts)
    running: dict[str, Submission] = field(default_factory=dict)

    async def prepare(self, scorer: Scorer, jobs: Sequence[ClaimedJob]) -> list[Work]:
        """Tokenise in a thread; a request that this model cannot score ends here, alone."""
        works = [Work(job) for job in jobs]
        for work in works:
            try:
                work.earlier = await read_earlier(self.stores.blobs, work.job)
            except StoreUnavailableError as error:  # it is given back
                work.error = error
        await asyncio.to_thread(self._prepare_all, scorer, works)
        await recall(self.stores, scorer, works)
        return works

    async def score(self, scorer: Scorer, works: Sequence[Work]) -> None:
        """Put everything through the model and wait until each job has its answers.

        A job whose ``run_timeout_s`` passes does not wait for the others: it ends then.
        """
        for work in works:
            if work.prepared is not None:
                work.ticket = Ticket(work.job.id, work.job.lane, _list_sequences(work))
        tickets = [work.ticket for work in works if work.ticket is not None]
        submission = self.batcher.submit(scorer, tickets)
        self.running.update((ticket.key, submission) for ticket in tickets)
        ends: list[asyncio.Task[None]] = []
        timers = [
            self._limit_run_time(scorer, work, work.job.run_timeout_s, ends)
            for work in works
            if work.ticket is not None and work.job.run_timeout_s is not None
        ]
        try:
            await submission.wait()
        finally:
            for timer in timers:
                timer.cancel()
            for ticket in tickets:
                if self.running.get(ticket.key) is submission:  # not a later attempt's
                    del self.running[ticket.key]
        await asyncio.gather(*ends)
        crash_here("after_forward", self.settings.crash_at)

    async def conclude(self, scorer: Scorer, works: Sequence[Work]) -> Conclusion:
        """Turn readings into scores, and the scores of the batch into one safetensors file."""
        return await asyncio.to_thread(self._conclude_all, scorer, works)

    async def store(self, conclusion: Conclusion) -> None:
        """Make the blob durable, then write all rows in one transaction; announce what is ours."""
        outcomes = conclusion.outcomes
        claims = [outcome.claim for outcome in outcomes]
        blob: BlobInfo | None = None
        if conclusion.blob_key is not None:
            blob = await self._write_blob(conclusion.blob_key, conclusion.data, claims)
            crash_here("after_blob", self.settings.crash_at)
        done = await self._commit(conclusion, blob) if outcomes else set()
        crash_here("after_commit", self.settings.crash_at)
        await self._give_back(conclusion)
        await self._drop_fenced(outcomes, done, blob)
        self._count_done(outcomes, done)
        if done:
            await self.stores.queue.publish_finished(sorted(done))
            self.announced()
        for key in conclusion.earlier_keys:
            await rewrite(self.stores.database, self.stores.blobs, key)

    async def fail(self, jobs: Sequence[ClaimedJob], error: Exception) -> None:
        """End every job of a batch with ``error``: nothing runs for ever."""
        problem = render_problem(error)
        outcomes = [fail_job(job, problem) for job in jobs]
        await self.store(Conclusion(outcomes))

    async def release(self, jobs: Sequence[ClaimedJob]) -> None:
        """Give jobs back to the queue untouched; no error is counted."""
        await self._give_back(Conclusion(released=[Work(job) for job in jobs]))

    def abandon(self, lost: set[str], cancelled: set[str]) -> None:
        """Stop work on jobs that are no longer ours, or that nobody wants any more."""
        for job_id in lost | cancelled:
            submission = self.running.get(job_id)
            if submission is not None:
                submission.abandon(job_id, ScoreError("given up"))

    def _prepare_all(self, scorer: Scorer, works: Sequence[Work]) -> None:
        within_s = self.settings.prepare_timeout_s
        for work in works:
            if work.error is not None:
                continue
            try:
                with self.deadline.watch("prepare"):
                    request = msgspec.json.decode(work.job.request, type=ScoreRequest)
                    prepared = scorer.prepare(request, within_s=within_s)
                    _check_count(work.job, prepared)
                    if work.earlier is not None:
                        work.places = list_open(scorer, prepared, work.earlier)
                    work.prepared = prepared
            except Exception as error:  # noqa: BLE001  # the job runner: the job says why
                work.error = error

    def _limit_run_time(
        self, scorer: Scorer, work: Work, limit_s: float, ends: list[asyncio.Task[None]]
    ) -> asyncio.TimerHandle:
        """End one job of a batch when its time is over; the task that writes it joins ``ends``."""
        error = DeadlineExceededError(f"the attempt took longer than run_timeout_s of {limit_s:g}")

        def end() -> None:
            if work.ticket is not None:
                work.ticket.submission.abandon(work.job.id, error)
            ends.append(asyncio.create_task(self._end_apart(scorer, work)))

        left_s = work.started_at + limit_s - time.monotonic()
        return asyncio.get_running_loop().call_later(max(0.0, left_s), end)

    async def _end_apart(self, scorer: Scorer, work: Work) -> None:
        """Write what became of one job now: its scores if it has them all, else its error.

        Its lease is then dropped, so that its batch leaves it out; where the store is away its
        batch tries again.
        """
        try:
            await self.store(await self.conclude(scorer, [work]))
        except (StoreUnavailableError, OSError) as error:
            _LOG.warning("job not ended in time", extra={"reason": str(error)})
        work.scores = None

    def _conclude_all(self, scorer: Scorer, works: Sequence[Work]) -> Conclusion:
        conclusion = Conclusion()
        with self.deadline.watch("conclude"):
            for work in works:
                self._conclude_one(scorer, work, conclusion)
            kept = {
                work.job.id: work.scores
                for work in works
                if work.scores is not None and has_scores(work.scores)
            }
            encoded = self.encode(kept) if kept else None
        if encoded is not None:
            conclusion.blob_key = f"batches/{create_id('btc')}.safetensors"
            conclusion.data = encoded.data
        conclusion.earlier_keys = {
            work.job.kept.blob_key
            for work in works
            if work.scores is not None and work.job.kept is not None
        }
        conclusion.outcomes += [
            render_outcome(
                work.job,
                work.scores,
                tensors=encoded.tensors[work.job.id] if encoded and work.job.id in kept else (),
            )
            for work in works
            if work.scores is not None
        ]
        conclusion.entries = list_entries(works)
        return conclusion

    def _conclude_one(self, scorer: Scorer, work: Work, conclusion: Conclusion) -> None:
        ticket = work.ticket
        error = work.error or (ticket.error if ticket is not None else None)
        if not self.leases.holds(work.claim):
            return
        if isinstance(error, ScoreError) and error.retryable:
            conclusion.released.append(work)
        elif error is not None and work.earlier is not None:
            problem = render_problem(error)
            work.scores = keep_all(work.earlier, problem.code, problem.message)
        elif error is not None:
            conclusion.outcomes.append(fail_job(work.job, render_problem(error)))
        elif self._deserves_another(work):
            conclusion.again.append(work)
        elif work.prepared is not None:
            try:
                work.scores = _finish(scorer, work, work.prepared)
            except Exception as raised:  # noqa: BLE001  # the job runner: the job says why
                _LOG.exception("finishing raised", extra={"job": work.job.id})
                conclusion.outcomes.append(fail_job(work.job, render_problem(raised)))

    def _deserves_another(self, work: Work) -> bool:
        """Whether some items were not tried alone, and attempts are left."""
        unproven = work.ticket is not None and any(
            isinstance(answer, Failure) and not answer.proven for answer in work.ticket.answers
        )
        return unproven and work.job.error_count + 1 < self.settings.max_attempts

    async def _write_blob(self, key: str, data: bytes, claims: Sequence[Claim]) -> BlobInfo:
        put = functools.partial(self.stores.blobs.put, key, data)
        return await self._retry("blob not written", claims, put)

    async def _commit(self, conclusion: Conclusion, blob: BlobInfo | None) -> set[str]:
        """Complete in one transaction. After an error that may hide a commit, read first."""
        outcomes = conclusion.outcomes
        claims = [outcome.claim for outcome in outcomes]
        tried = False

        async def commit() -> set[str]:
            nonlocal tried
            earlier: set[str] = set()
            started_at = time.monotonic()
            async with self.stores.database.transaction() as tx:
                if tried:
                    earlier = await find_completed(tx, claims, blob)
                tried = True
                left = [outcome for outcome in outcomes if outcome.id not in earlier]
                done = await complete_jobs(tx, left, blob) if left else set()
                await put_cached(tx, [e for e in conclusion.entries if e.job_id in done])
                crash_here("before_commit", self.settings.crash_at)
            self.counts.commits += 1
            self.counts.commit_s += time.monotonic() - started_at
            return done | earlier

        done = await self._retry("results not written", claims, commit)
        self.leases.drop(claims)
        return done

    async def _retry(
        self, message: str, claims: Sequence[Claim], call: Callable[[], Awaitable[_T]]
    ) -> _T:
        """Try again with back-off while we hold one of the jobs: nothing is computed twice."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                return await call()
            except (StoreUnavailableError, OSError) as error:
                _LOG.warning(message, extra={"reason": str(error), "jobs": len(claims)})
                if not self.leases.alive(claims):
                    raise
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)

    async def _give_back(self, conclusion: Conclusion) -> None:
        if not conclusion.released and not conclusion.again:
            return
        released = [work.claim for work in conclusion.released]
        again = [work.claim for work in conclusion.again]
        claims = [*released, *again]

        async def give_back() -> tuple[int, int]:
            async with self.stores.database.transaction() as tx:
                freed = await claims_table.release_jobs(tx, released) if released else set()
                delayed: set[str] = set()
                if again:
                    failure = render_problem(_first_failure(conclusion.again[0]))
                    problem = msgspec.json.encode(failure)
                    delayed = await claims_table.retry_later(tx, again, problem, _RETRY_DELAY_S)
            return len(freed), len(delayed)

        freed, delayed = await self._retry("jobs not given back", claims, give_back)
        self.leases.drop(claims)
        self.counts.released += freed
        self.counts.retried += delayed

    def _count_done(self, outcomes: Sequence[JobOutcome], done: set[str]) -> None:
        self.counts.completed += len(done)
        for outcome in outcomes:
            if outcome.id in done:
                self.counts.items += outcome.scored
                if outcome.usage is not None:
                    usage = msgspec.json.decode(outcome.usage, type=Usage)
                    self.counts.tokens += usage.prompt_tokens
                    self.counts.from_cache += usage.from_cache or 0

    async def _drop_fenced(
        self, outcomes: Sequence[JobOutcome], done: set[str], blob: BlobInfo | None
    ) -> None:
        fenced = len(outcomes) - len(done)
        if not fenced:
            return
        self.counts.fenced += fenced
        _LOG.warning("results fenced: another attempt owns the jobs", extra={"jobs": fenced})
        if blob is not None and not done:
            await self.stores.blobs.delete([blob.key])


def _list_sequences(work: Work) -> list[TokenSequence]:
    sequences = [] if work.prepared is None else work.prepared.sequences
    return sequences if work.places is None else [sequences[place] for place in work.places]


def _check_count(job: ClaimedJob, prepared: PreparedJob) -> None:
    if len(prepared.items) != job.item_count:
        message = f"the request has {len(prepared.items)} items, its job {job.item_count}"
        raise errors.ScoringError(message)


def _finish(scorer: Scorer, work: Work, prepared: PreparedJob) -> JobScores:
    readings = list_readings(work.ticket)
    if work.places is None or work.earlier is None:
        return scorer.finish(prepared, readings)
    fresh = scorer.finish(prepared, place_readings(prepared, work.places, readings))
    return (tell_known if work.is_known else merge)(fresh, work.earlier)


def _first_failure(work: Work) -> ScoreError:
    answers = work.ticket.answers if work.ticket is not None else []
    return next(answer.error for answer in answers if isinstance(answer, Failure))
