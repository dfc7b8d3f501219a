"""The client for asyncio: submit text to be scored, wait, fetch scores and hidden states."""

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, Unpack
from urllib.parse import parse_qs, quote, urlsplit

import msgspec

from contract.bulks import ENDED_BULKS, Bulk, BulkResult
from contract.compatible import ClassifyAnswer, ClassifyRequest, RerankAnswer, RerankRequest
from contract.errors import ConflictError, GoneError
from contract.jobs import TERMINAL, JobState
from contract.models import ModelStatus
from contract.scores import Job, JobRequest, Scores
from contract.shapes import Model
from contract.webhooks import Event
from scorekeep.asking import LONGEST_POLL_S, ask
from scorekeep.bulk import BulkClient
from scorekeep.options import JobOptions, RerankOptions
from scorekeep.streams import read_events
from scorekeep.tensors import Framework, parse_tensor
from scorekeep.transport import Answer, Transport, create_error
from scorekeep.webhooks import Webhooks

__all__ = ["DEFAULT_URL", "AsyncClient", "JobPage", "check_scored"]

DEFAULT_URL = "http://127.0.0.1:8000"
_BULK_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some jobs, newest first; ``next_cursor`` is None on the last page."""

    jobs: list[Job]
    next_cursor: str | None


class _JobList(msgspec.Struct, frozen=True):
    data: list[Job]


class _Models(msgspec.Struct, frozen=True):
    data: list[Model]


class _Secret(msgspec.Struct, frozen=True):
    secrets: list[str]


class AsyncClient:
    """Speaks to one service. Use it as ``async with AsyncClient() as client``.

    Requests are repeated, up to ``max_retries`` times, when the service or the network fails in a
    way that a repetition may cure; ``Retry-After`` and ``x-should-retry`` are honoured, and every
    submission, cancellation and retry carries an idempotency key, so that a repetition changes
    nothing.
    ``timeout_s`` bounds one exchange; how long to wait for a job is each method's own argument.
    Errors are the classes of ``contract.errors``. ``api_key`` None takes ``SCOREKEEP_API_KEY``.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        max_retries: int = 4,
    ) -> None:
        self._transport = Transport(
            base_url, api_key=api_key, timeout_s=timeout_s, max_retries=max_retries
        )
        self._api_key = api_key
        self._max_retries = max_retries
        self._bulks: BulkClient | None = None
        #: Endpoints, the log of deliveries, sending again.
        self.webhooks = Webhooks(self._transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._bulks is not None:
            await self._bulks.__aexit__(None, None, None)
            self._bulks = None
        await self._transport.close()

    @property
    def bulks(self) -> BulkClient:
        """Files of many lines: submit, watch, fetch. Only where an event loop runs."""
        if self._bulks is None:
            self._bulks = BulkClient(self._transport.base_url, api_key=self._api_key)
        return self._bulks

    async def submit(
        self,
        items: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        idempotency_key: str | None = None,
        wait_s: float = 0.0,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Submit a job and return it as the service answers: queued, or done within ``wait_s``.

        The job is durable when this returns. The same ``idempotency_key`` with the same arguments
        returns the same job, also from another process; left out, a new one is made up.
        """
        request = JobRequest(
            items=items if isinstance(items, str) else _listed(items),
            **options,
        )
        key = idempotency_key or uuid.uuid4().hex
        prefer = f"wait={math.ceil(wait_s)}" if wait_s > 0 else "respond-async"
        answer = await self._transport.send(
            "POST",
            "/v1/jobs",
            body=msgspec.json.encode(request),
            headers={"Idempotency-Key": f'"{key}"', "Prefer": prefer},
            wait_s=wait_s,
        )
        return msgspec.json.decode(answer.body, type=Job)

    async def get(self, job: str | Job, *, wait_s: float = 0.0) -> Job:
        """Return the job; with ``wait_s``, as soon as it has ended or that time has passed."""
        query = {"wait": str(math.ceil(wait_s))} if wait_s > 0 else None
        answer = await self._transport.send("GET", _path(job), query=query, wait_s=wait_s)
        return msgspec.json.decode(answer.body, type=Job)

    async def wait(self, job: str | Job, *, timeout_s: float | None = None) -> Job:
        """Return the job once it has ended, however it ended.

        Raises ``TimeoutError`` after ``timeout_s``; the job itself goes on.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while True:
            left_s = LONGEST_POLL_S if deadline is None else deadline - loop.time()
            found = await self.get(job, wait_s=max(0.0, min(left_s, LONGEST_POLL_S)))
            if found.state in TERMINAL:
                return found
            if deadline is not None and loop.time() >= deadline:
                message = f"job {found.id} is still {found.state} after {timeout_s:g} s"
                raise TimeoutError(message)

    async def score(
        self,
        items: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        idempotency_key: str | None = None,
        timeout_s: float | None = 300.0,
        **options: Unpack[JobOptions],
    ) -> Scores:
        """Submit, wait, and return the scores: one row per item, null where an item failed.

        ``scores.job`` is the id under which they are kept. Raises the job's own error where no
        item could be scored, ``ConflictError`` where it was cancelled or expired, and
        ``TimeoutError`` after ``timeout_s``.
        """
        wait_s = LONGEST_POLL_S if timeout_s is None else min(timeout_s, LONGEST_POLL_S)
        started = asyncio.get_running_loop().time()
        job = await self.submit(items, idempotency_key=idempotency_key, wait_s=wait_s, **options)
        if job.state not in TERMINAL:
            spent_s = asyncio.get_running_loop().time() - started
            left_s = None if timeout_s is None else max(0.0, timeout_s - spent_s)
            job = await self.wait(job, timeout_s=left_s)
        check_scored(job)
        return await self.scores(job)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        idempotency_key: str | None = None,
        timeout_s: float | None = 300.0,
        **options: Unpack[RerankOptions],
    ) -> RerankAnswer:
        """Return the documents' indexes by relevance to the query, the best first.

        ``id`` of the answer is the job. Documents that failed are in ``errors`` alone. Raises as
        ``score`` does.
        """
        given: RerankOptions = {"return_documents": False, **options}
        body = msgspec.json.encode(RerankRequest(query=query, documents=list(documents), **given))
        raw = await ask(
            self._transport, "/v1/rerank", body, key=idempotency_key, timeout_s=timeout_s
        )
        return msgspec.json.decode(raw, type=RerankAnswer)

    async def classify(
        self,
        inputs: str | Sequence[str],
        *,
        model: str | None = None,
        idempotency_key: str | None = None,
        timeout_s: float | None = 300.0,
    ) -> ClassifyAnswer:
        """Return the likeliest label of each input and the numbers of all, in input order.

        The numbers are the checkpoint's own: probabilities, or whatever its activation gives.
        Raises as ``score`` does.
        """
        texts = inputs if isinstance(inputs, str) else [*inputs]
        body = msgspec.json.encode(ClassifyRequest(input=texts, model=model))
        raw = await ask(
            self._transport, "/v1/classify", body, key=idempotency_key, timeout_s=timeout_s
        )
        return msgspec.json.decode(raw, type=ClassifyAnswer)

    async def events(self, job: str | Job, *, after: int = 0) -> AsyncIterator[Event]:
        """Yield a job's events as they happen, after the sequence number ``after``; end with it.

        Connections that break are opened again where they broke.
        """
        path = f"{_path(job)}/events"
        stream = read_events(self._transport, path, after=after, max_retries=self._max_retries)
        async for event in stream:
            yield event

    async def wait_for_bulk(self, bulk: str | Bulk, *, timeout_s: float | None = None) -> Bulk:
        """Return a bulk once it has ended. Raises ``TimeoutError`` after ``timeout_s``."""
        bulk_id = bulk if isinstance(bulk, str) else bulk.id
        async with asyncio.timeout(timeout_s):
            while True:
                found = await self.bulks.get(bulk_id)
                if found.state in ENDED_BULKS:
                    return found
                await asyncio.sleep(_BULK_POLL_S)

    async def bulk_results(self, bulk: str | Bulk, *, after: int = 0) -> AsyncIterator[BulkResult]:
        """Yield results in the order of the lines, after the line ``after``, as far as they are.

        ``bulks.write_results`` keeps them in a file, and goes on where it stopped.
        """
        bulk_id = bulk if isinstance(bulk, str) else bulk.id
        path, query = f"/v1/bulks/{quote(bulk_id, safe='')}/results", {"after": str(after)}
        async with self._transport.stream(path, query=query) as lines:
            async for line in lines:
                yield msgspec.json.decode(line, type=BulkResult)

    async def scores(self, job: str | Job) -> Scores:
        """Return the scores of a job that has ended."""
        answer = await self._transport.send("GET", f"{_path(job)}/scores")
        return msgspec.json.decode(answer.body, type=Scores)

    async def hidden_states(
        self, job: str | Job, *, framework: Framework = "numpy", item: int | None = None
    ) -> Any:  # noqa: ANN401  # an array or a tensor, as asked
        """Return the pooled hidden states ``[items, hidden]`` of a job that asked for them.

        Rows of items that failed are NaN. With ``item``, only that item's row, ``[hidden]``.
        ``numpy`` gives an array (bfloat16 widened to float32), ``torch`` a tensor in the model's
        dtype.
        """
        data = await self.hidden_states_file(job, item=item)
        tensor = parse_tensor(data, "hidden_states", framework)
        return tensor if item is None else tensor.reshape(-1)

    async def hidden_states_file(self, job: str | Job, *, item: int | None = None) -> bytes:
        """Return the hidden states as the service keeps them: the bytes of a safetensors file."""
        part = "hidden_states" if item is None else f"items/{item}/hidden_state"
        return (await self._transport.send("GET", f"{_path(job)}/{part}")).body

    async def list(
        self,
        *,
        state: JobState | None = None,
        model: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> JobPage:
        """Return a page of jobs, newest first; its ``next_cursor`` is the next one's ``cursor``."""
        given = {"state": state, "model": model, "cursor": cursor, "limit": str(limit)}
        query = {name: value for name, value in given.items() if value is not None}
        answer = await self._transport.send("GET", "/v1/jobs", query=query)
        jobs = msgspec.json.decode(answer.body, type=_JobList).data
        return JobPage(jobs, _next_cursor(answer))

    async def iterate(
        self, *, state: JobState | None = None, model: str | None = None
    ) -> AsyncIterator[Job]:
        """Yield all jobs, newest first, page by page."""
        page = await self.list(state=state, model=model, limit=100)
        while True:
            for job in page.jobs:
                yield job
            if page.next_cursor is None:
                return
            page = await self.list(state=state, model=model, cursor=page.next_cursor, limit=100)

    async def cancel(self, job: str | Job) -> Job:
        """Ask for a job to be stopped: at once while it is queued, soon while it runs.

        Raises ``ConflictError`` where it has ended.
        """
        key = uuid.uuid4().hex
        answer = await self._transport.send(
            "POST", f"{_path(job)}/cancel", headers={"Idempotency-Key": f'"{key}"'}
        )
        return msgspec.json.decode(answer.body, type=Job)

    async def retry(self, job: str | Job) -> Job:
        """Have the items scored that have no score; the others keep theirs. The same id.

        Raises ``ConflictError`` unless it ended as failed, partial or expired.
        """
        key = uuid.uuid4().hex
        answer = await self._transport.send(
            "POST", f"{_path(job)}/retry", headers={"Idempotency-Key": f'"{key}"'}
        )
        return msgspec.json.decode(answer.body, type=Job)

    async def delete(self, job: str | Job) -> None:
        """Remove a job that has ended, its scores and its hidden states, for good.

        One that is gone already is no error: the first request may have lost its answer.
        """
        with contextlib.suppress(GoneError):
            await self._transport.send("DELETE", _path(job))

    async def models(self) -> Sequence[ModelStatus]:
        """Return what is served, and why not where it is not."""
        answer = await self._transport.send("GET", "/v1/models")
        return [
            ModelStatus(
                name=model.id,
                state=model.state,
                reason=model.reason,
                description=model.description,
            )
            for model in msgspec.json.decode(answer.body, type=_Models).data
        ]

    async def limits(self) -> dict[str, float]:
        """Return every limit of the service by name."""
        answer = await self._transport.send("GET", "/v1/limits")
        return msgspec.json.decode(answer.body, type=dict[str, float])

    async def webhook_secret(self) -> str:
        """Return the newest secret that this tenant's webhooks are signed with."""
        answer = await self._transport.send("GET", "/v1/webhooks/default/secret")
        return _secret_of(answer)


def check_scored(job: Job) -> None:
    """Raise the error of a job that ended without a single score."""
    if job.state is JobState.FAILED and (problem := job.error) is not None:
        error = create_error(
            problem.code, problem.message, status=problem.status, param=problem.param
        )
        error.add_note(f"job: {job.id}")
        raise error
    if job.state not in {JobState.SUCCEEDED, JobState.PARTIAL}:
        message = f"job {job.id} is {job.state}: it has no scores"
        raise ConflictError(message)


def _next_cursor(answer: Answer) -> str | None:
    """Read the cursor in ``Link: <…?cursor=…>; rel="next"``."""
    target, _, parameters = answer.headers.get("Link", "").partition(">")
    if 'rel="next"' not in parameters:
        return None
    return parse_qs(urlsplit(target.removeprefix("<")).query)["cursor"][0]


def _secret_of(answer: Answer) -> str:
    return msgspec.json.decode(answer.body, type=_Secret).secrets[0]


def _path(job: str | Job) -> str:
    return f"/v1/jobs/{quote(job if isinstance(job, str) else job.id, safe='')}"


def _listed(items: Sequence[str] | Sequence[Sequence[int]]) -> list[str | list[int]]:
    return [item if isinstance(item, str) else [*item] for item in items]
