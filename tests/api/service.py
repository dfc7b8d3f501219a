"""The real application on a loopback port, and a worker's part played through storage."""

import asyncio
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy

from api.app import create_app, create_runner
from api.routes.events import KEEP_ALIVE_S
from contract.config import Settings
from contract.jobs import JobState
from contract.models import ModelConfig, ModelDescription, ModelState, ModelStatus, ScoringPath
from contract.results import StoredResult
from contract.scores import ItemError, Problem, Usage
from storage import claims, workers
from storage.blobs import BlobStore
from storage.claims import ClaimedJob
from storage.database import Database
from storage.ids import create_id
from storage.outcomes import JobOutcome, complete_jobs
from storage.queue import Queue
from storage.refs import TensorRef
from storage.tensors import Tensor, parse_header, render_safetensors
from storage.workers import WorkerRow

REGISTRY = {"tiny": ModelConfig(source="x"), "other": ModelConfig(source="y")}
HIDDEN = 4
DESCRIPTION = ModelDescription(
    name="tiny",
    path=ScoringPath.CLASSIFICATION,
    architecture="BertForSequenceClassification",
    labels=["negative", "positive"],
    label_count=2,
    hidden_size=HIDDEN,
    max_tokens=64,
    dtype="bfloat16",
    device="cpu",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server answered."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def json(self) -> Any:  # whatever the server sent
        """The decoded body; NaN and infinity are refused."""
        return json.loads(self.body, parse_constant=_refuse_constant)


class Caller(ABC):
    """Somebody who sends requests."""

    __slots__ = ()

    @abstractmethod
    async def request(self, method: str, path: str, **options: Any) -> Answer:
        """Send a request."""

    async def get(self, path: str, **options: Any) -> Answer:
        """GET ``path``."""
        return await self.request("GET", path, **options)

    async def post(self, path: str, body: object, **headers: str) -> Answer:
        """POST ``body`` as JSON; underscores in header names become hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.request("POST", path, json=body, headers=named)

    async def submit(self, **fields: Any) -> str:
        """Submit a job to ``tiny`` and return its id."""
        answer = await self.post("/v1/jobs", {"model": "tiny", "items": ["a", "b"], **fields})
        assert answer.status == 202, answer.body
        job_id: str = answer.json["id"]
        return job_id


@dataclass
class Service(Caller):
    """One API process's application, and what its other side shares with it."""

    settings: Settings
    database: Database
    registry: Mapping[str, ModelConfig] = field(default_factory=lambda: REGISTRY)
    keep_alive_s: float = 15.0

    async def start(self) -> None:
        """Listen on a free loopback port."""
        self.app = create_app(self.settings, self.registry)
        self.app._state[KEEP_ALIVE_S] = self.keep_alive_s
        self.runner = create_runner(self.app, shutdown_s=2)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20))
        self.blobs = BlobStore.open(self.settings.blobs)
        self.queue = Queue(self.settings.redis_url)

    async def stop(self) -> None:
        """Stop listening and close everything."""
        await self.http.close()
        await self.runner.cleanup()
        await self.queue.close()

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        """Send a request; no error answer but ``internal`` raises."""
        async with self.http.request(method, self.url + path, **options) as response:
            answer = Answer(response.status, response.headers, await response.read())
        assert answer.status != 500 or b'"internal"' not in answer.body, answer.body
        assert response.headers["X-Request-Id"]
        return answer

    async def report(self, *statuses: ModelStatus) -> None:
        """Report models as a worker does."""
        row = WorkerRow(id=create_id("wrk"), host="h", pid=1, device="cpu", models=list(statuses))
        async with self.database.transaction() as tx:
            await workers.put_worker(tx, row)

    async def report_ready(self) -> None:
        """Report ``tiny`` as ready."""
        await self.report(ModelStatus(name="tiny", state=ModelState.READY, description=DESCRIPTION))

    async def claim(self, *, limit: int = 100) -> list[ClaimedJob]:
        """Claim as a worker does."""
        async with self.database.transaction() as tx:
            return await claims.claim_jobs(
                tx, worker="w", models=["tiny"], max_jobs=limit, max_tokens=10**9, lease_s=30
            )

    async def next_claim(self) -> list[ClaimedJob]:
        """Claim as a worker does, as soon as there is something."""
        for _ in range(1000):
            if claimed := await self.claim():
                return claimed
            await asyncio.sleep(0.01)
        message = "nothing to claim"
        raise AssertionError(message)

    async def finish(
        self,
        jobs: Sequence[ClaimedJob],
        *,
        failed: Sequence[int] = (),
        hidden_dtype: str = "BF16",
        tell: bool = True,
    ) -> None:
        """Complete jobs as a worker does: one blob, one transaction, one word to the waiters.

        Item ``i``'s scores are ``[i, -i]``, its hidden state ``[i] * 4``.
        """
        layout = [(job.id, job.item_count) for job in jobs]
        data = render_safetensors(_tensors(layout, hidden_dtype))
        blob = await self.blobs.put(f"{create_id('btc')}.safetensors", data)
        places: dict[str, list[TensorRef]] = {job.id: [] for job in jobs}
        for entry in parse_header(data):
            job_id, _, name = entry.name.partition("/")
            places[job_id].append(TensorRef(name, entry.dtype, entry.shape, entry.begin, entry.end))
        outcomes = [_outcome(job, places[job.id], failed) for job in jobs]
        async with self.database.transaction() as tx:
            done = await complete_jobs(tx, outcomes, blob)
        assert done == {job.id for job in jobs}
        if tell:
            await self.queue.publish_finished(sorted(done))

    async def fail(self, job: ClaimedJob, problem: Problem) -> None:
        """Complete a job as failed."""
        outcome = JobOutcome(
            id=job.id,
            attempt=job.attempt,
            state=JobState.FAILED,
            scored=0,
            failed=job.item_count,
            error=msgspec.json.encode(problem),
        )
        async with self.database.transaction() as tx:
            await complete_jobs(tx, [outcome])
        await self.queue.publish_finished([job.id])

    async def submit_and_finish(self, **fields: Any) -> str:
        """Submit a job, score it, and return its id."""
        job_id = await self.submit(return_pooled_hidden_states=True, **fields)
        await self.finish(await self.claim())
        return job_id


def hidden_bytes(index: int, dtype: str = "BF16") -> bytes:
    """Return the bytes of item ``index``'s hidden state."""
    number = struct.pack("<f", float(index))
    return (number[2:] if dtype == "BF16" else number) * HIDDEN


def _tensors(layout: Sequence[tuple[str, int]], dtype: str) -> list[Tensor]:
    tensors: list[Tensor] = []
    for job_id, count in layout:
        scores = b"".join(struct.pack("<2f", index, -index) for index in range(count))
        hidden = b"".join(hidden_bytes(index, dtype) for index in range(count))
        mass = struct.pack(f"<{count}f", *([0.5] * count))
        tensors += [
            Tensor(f"{job_id}/scores", "F32", [count, 2], scores),
            Tensor(f"{job_id}/label_mass", "F32", [count], mass),
            Tensor(f"{job_id}/hidden_states", dtype, [count, HIDDEN], hidden),
        ]
    return tensors


def _outcome(job: ClaimedJob, tensors: list[TensorRef], failed: Sequence[int]) -> JobOutcome:
    asked = b'"return_pooled_hidden_states":true' in job.request
    kept = [tensor for tensor in tensors if asked or tensor.name != "hidden_states"]
    result = StoredResult(
        labels=["negative", "positive"],
        label_counts=[2] * job.item_count,
        errors=[ItemError(index, "input_too_long", "900 tokens, 64 fit") for index in failed],
    )
    return JobOutcome(
        id=job.id,
        attempt=job.attempt,
        state=JobState.PARTIAL if failed else JobState.SUCCEEDED,
        scored=job.item_count - len(failed),
        failed=len(failed),
        usage=msgspec.json.encode(Usage(7, 7, 0, 7)),
        result=msgspec.json.encode(result),
        receipt=("f" * 64, b'{"model":"tiny"}'),
        tensors=kept,
    )


def _refuse_constant(name: str) -> float:
    message = f"{name} is not JSON"
    raise AssertionError(message)
