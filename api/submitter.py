"""Jobs into SQL: the only place that adds them. Concurrent submits share one commit."""

import asyncio
import logging
from dataclasses import dataclass

from api.idempotency import IdempotencyKey, is_known
from api.limits import Gate
from contract.errors import (
    GoneError,
    IdempotencyConflictError,
    NoCapacityError,
    NotFoundError,
    OverloadedError,
    ScoreError,
    StoreUnavailableError,
)
from contract.origins import parse_origin
from contract.tracing import span
from storage import idempotency, jobs
from storage.database import Database, Transaction
from storage.jobs import JobRow, NewJob
from storage.queue import Queue

__all__ = ["Submission", "Submitted", "Submitter"]

_log = logging.getLogger(__name__)
_GROUP_JOBS = 256
_GROUP_BYTES = 32 * 1024 * 1024
_ANSWER_TIMEOUT_S = 30.0
_UNHINTED_JOBS = 10_000
_LINKED_TRACES = 64


@dataclass(frozen=True, slots=True)
class Submission:
    """A job to be added, and the client's key for it."""

    job: NewJob
    key: IdempotencyKey | None = None


@dataclass(frozen=True, slots=True)
class Submitted:
    """The job as recorded; ``replayed`` where the key was used before with the same body."""

    row: JobRow
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class _Waiting:
    submission: Submission
    answer: asyncio.Future[Submitted]


class Submitter:
    """Adds jobs in groups: what arrives while one commit runs goes into the next.

    A commit costs an fsync; nothing waits for a group to fill. Hints go out after the commit and
    may fail. A submission that cannot be recorded fails alone.
    """

    def __init__(self, database: Database, queue: Queue, gate: Gate) -> None:
        self._database = database
        self._queue = queue
        self._gate = gate
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue(maxsize=4096)
        self._unhinted: list[str] = []
        self._unhinted_some = asyncio.Event()
        #: Of what is to be hinted: the traces that the hint is linked to.
        self._traces: list[str] = []

    async def submit(self, submission: Submission) -> Submitted:
        """Return once the job is durable.

        Raises ``IdempotencyConflictError`` for a key used with another body, ``GoneError`` for one
        whose job was deleted, ``StoreUnavailableError`` while SQL is away; ``OverloadedError`` and
        ``NoCapacityError`` for a new job where there is no room. One that was let in before is
        answered in any case.
        """
        job = submission.job
        try:
            async with self._gate.admitting(job.tenant, job.lane, job.estimated_tokens) as count:
                submitted = await self._add(submission)
                if not submitted.replayed:
                    count()
                return submitted
        except (OverloadedError, NoCapacityError):
            key = submission.key
            if key is None or not await is_known(self._database, job.tenant, key):
                raise
        return await self._add(submission)

    async def _add(self, submission: Submission) -> Submitted:
        answer: asyncio.Future[Submitted] = asyncio.get_running_loop().create_future()
        try:
            with span("store job", kind="producer"):
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    await self._waiting.put(_Waiting(submission, answer))
                    return await answer
        except TimeoutError as error:
            message = "the store did not answer in time; use an idempotency key to try again"
            raise StoreUnavailableError(message, retry_after_s=5) from error

    async def run(self) -> None:
        """Add what is submitted, for ever. On the way out every waiting submit gets its answer."""
        group: list[_Waiting] = []
        try:
            while True:
                group = await self._take_group()
                await self._add_group(group)
        finally:
            while not self._waiting.empty():
                group.append(self._waiting.get_nowait())
            stopping = StoreUnavailableError("the server is stopping", retry_after_s=1)
            _fail(group, stopping)

    async def hint(self) -> None:
        """Tell Redis what was added, for ever. Beyond a limit ids are left to the sweep."""
        while True:
            await self._unhinted_some.wait()
            self._unhinted_some.clear()
            job_ids, self._unhinted = self._unhinted, []
            traces, self._traces = self._traces, []
            with span("hint jobs", kind="producer", links=traces, jobs=len(job_ids)):
                await self._queue.hint(job_ids)

    async def _take_group(self) -> list[_Waiting]:
        group = [await self._waiting.get()]
        size = len(group[0].submission.job.request)
        while len(group) < _GROUP_JOBS and size < _GROUP_BYTES and not self._waiting.empty():
            group.append(self._waiting.get_nowait())
            size += len(group[-1].submission.job.request)
        return [one for one in group if not one.answer.done()]

    async def _add_group(self, group: list[_Waiting]) -> None:
        """Add a group in one transaction; where that fails, each on its own."""
        try:
            await self._commit(group)
        except StoreUnavailableError as error:
            _fail(group, error)
        except Exception as error:  # noqa: BLE001  # the edge: each waiting submit gets its answer
            if len(group) == 1:
                _log.exception("cannot add a job", extra={"action": "submit_failed"})
                _fail(group, error)
                return
            for one in group:
                if not one.answer.done():
                    await self._add_group([one])

    async def _commit(self, group: list[_Waiting]) -> None:
        plain = [one for one in group if one.submission.key is None]
        keyed = [(one, one.submission.key) for one in group if one.submission.key is not None]
        # In key order, so that two processes cannot wait for each other's keys.
        keyed.sort(key=lambda pair: (pair[1].route, pair[1].key))
        results: list[tuple[_Waiting, Submitted | ScoreError]] = []
        async with self._database.transaction() as tx:
            rows = await jobs.add_jobs(tx, [one.submission.job for one in plain])
            results += [(one, Submitted(row)) for one, row in zip(plain, rows, strict=True)]
            results += [(one, await _add_keyed(tx, one.submission.job, key)) for one, key in keyed]
        for one, result in results:
            if one.answer.done():
                continue
            if isinstance(result, ScoreError):
                one.answer.set_exception(result)
            else:
                one.answer.set_result(result)
        added = [r.row.hint for _, r in results if isinstance(r, Submitted) and not r.replayed]
        self._unhinted += added[: _UNHINTED_JOBS - len(self._unhinted)]
        found = (parse_origin(one.submission.job.origin).traceparent for one in group)
        traces = [trace for trace in found if trace]
        self._traces += traces[: _LINKED_TRACES - len(self._traces)]
        self._unhinted_some.set()


async def _add_keyed(tx: Transaction, job: NewJob, key: IdempotencyKey) -> Submitted | ScoreError:
    """Add the job unless its key has one. A key's own fault is returned, not raised."""
    try:
        existing = await idempotency.find_or_claim(
            tx, job.tenant, key.route, key.key, key.body_hash
        )
        if existing is not None:
            return Submitted(await jobs.get_job(tx, job.tenant, existing), replayed=True)
    except (IdempotencyConflictError, NotFoundError, GoneError) as error:
        return error
    (row,) = await jobs.add_jobs(tx, [job])
    await idempotency.bind(tx, job.tenant, key.route, key.key, row.id)
    return Submitted(row)


def _fail(group: list[_Waiting], error: Exception) -> None:
    for one in group:
        if not one.answer.done():
            one.answer.set_exception(error)
