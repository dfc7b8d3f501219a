"""A worker inside the test's own event loop, on real stores, and receivers on 127.0.0.1."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from contract.config import Settings
from contract.jobs import TERMINAL, Lane
from contract.models import ModelConfig, ModelState
from contract.scores import Problem
from contract.webhooks import Event, verify
from storage import workers
from storage.blobs import BlobStore
from storage.database import Database
from storage.jobs import JobRow, NewJob, add_jobs, get_job
from storage.outcomes import cancel_job
from storage.queue import Queue
from storage.tenants import webhook_secrets
from worker.engine.encoding import encode
from worker.engine.seam import Scorer
from worker.loading import Engine
from worker.main import Worker

__all__ = [
    "Bench",
    "Receiver",
    "create_settings",
    "heed",
    "receive",
    "reply",
    "run_worker",
]

TENANT = "default"


def create_settings(database_url: str, blob_url: str, redis_url: str, **changes: Any) -> Settings:
    """Return settings for fast tests: short sweeps, loopback receivers allowed."""
    values: dict[str, Any] = {
        "database_url": database_url,
        "blob_url": blob_url,
        "redis_url": redis_url,
        "lease_s": 5.0,
        "heartbeat_s": 0.2,
        "sweep_s": 0.1,
        "drain_s": 10.0,
        "webhook_allow_http": True,
        "webhook_allowed_networks": "127.0.0.0/8",
        "webhook_timeout_s": 5.0,
    }
    return Settings(**(values | changes))


@dataclass
class Bench:
    """The stores as a client would use them: submit, wait, read."""

    database: Database
    blobs: BlobStore
    queue: Queue
    settings: Settings

    async def submit(
        self,
        *item_lists: Sequence[Sequence[int] | str],
        model: str = "sums",
        lane: Lane = Lane.NORMAL,
        hinted: bool = True,
        parameters: Mapping[str, Any] | None = None,
        **extra: Any,
    ) -> list[str]:
        """Add one job per list of items; hint them unless told otherwise."""
        new = [
            NewJob(
                tenant=TENANT,
                model=model,
                lane=lane,
                request=msgspec.json.encode({"items": items, "model": model, **(parameters or {})}),
                item_count=len(items),
                estimated_tokens=sum(len(item) for item in items),
                **extra,
            )
            for items in item_lists
        ]
        async with self.database.transaction() as tx:
            rows = await add_jobs(tx, new)
        if hinted:
            await self.queue.hint([row.hint for row in rows])
        return [row.id for row in rows]

    async def get(self, job_id: str) -> JobRow:
        """Return the row."""
        async with self.database.snapshot() as tx:
            return await get_job(tx, TENANT, job_id)

    async def cancel(self, job_id: str) -> JobRow:
        """Ask for the end of a job."""
        async with self.database.transaction() as tx:
            return await cancel_job(tx, TENANT, job_id)

    async def wait(self, *ids: str, timeout_s: float = 40.0) -> list[JobRow]:
        """Return the rows when all are terminal."""
        async with asyncio.timeout(timeout_s):
            rows: dict[str, JobRow] = {}
            while len(rows) < len(ids):
                for job_id in ids:
                    row = await self.get(job_id) if job_id not in rows else None
                    if row is not None and row.state in TERMINAL:
                        rows[job_id] = row
                await asyncio.sleep(0.01)
        return [rows[job_id] for job_id in ids]

    async def wait_until(self, check: Callable[[], Awaitable[bool]]) -> None:
        """Return when ``check`` holds, which reads what sends no signal."""
        async with asyncio.timeout(40):
            while not await check():  # noqa: ASYNC110  # the store sends no signal
                await asyncio.sleep(0.01)

    async def wait_until_claimed(self, job_id: str) -> None:
        """Return when a worker holds the job."""

        async def is_claimed() -> bool:
            return (await self.get(job_id)).attempt > 0

        await self.wait_until(is_claimed)

    async def wait_for_models(self, *names: str) -> None:
        """Return when all of these are ready on a live worker."""

        async def are_ready() -> bool:
            async with self.database.snapshot() as tx:
                statuses = await workers.models(tx, alive_within_s=30)
            ready = {status.name for status in statuses if status.state is ModelState.READY}
            return set(names) <= ready

        await self.wait_until(are_ready)

    async def read(self, row: JobRow, name: str) -> "np.ndarray[Any, Any]":
        """Return one of the job's float32 tensors."""
        tensor = next(tensor for tensor in row.tensors if tensor.name == name)
        assert row.blob_key is not None
        raw = await self.blobs.get_range(row.blob_key, tensor.begin, tensor.end)
        return np.frombuffer(raw, np.float32).reshape(tensor.shape)

    async def scores(self, row: JobRow) -> list[list[float]]:
        """Return the stored scores, NaN where an item failed."""
        rows: list[list[float]] = (await self.read(row, "scores")).tolist()
        return rows

    async def secret(self) -> str:
        """Return the tenant's webhook secret."""
        async with self.database.transaction() as tx:
            return (await webhook_secrets(tx, TENANT))[0]

    def problem(self, row: JobRow) -> Problem:
        """Return the job's recorded error."""
        assert row.error is not None
        return msgspec.json.decode(row.error, type=Problem)


@contextlib.asynccontextmanager
async def run_worker(
    settings: Settings,
    *scorers: Scorer,
    failing: Mapping[str, Exception] | None = None,
    deliveries_only: bool = False,
    exit_code: int = 0,
) -> AsyncIterator[Worker]:
    """Run a worker that serves ``scorers``; drain it at the end and check that it ended well."""
    known = {scorer.description.name: scorer for scorer in scorers}
    faults = dict(failing or {})

    def load(name: str, _config: ModelConfig) -> Scorer:
        if name in faults:
            raise faults[name]
        return known[name]

    names = [*known, *faults]
    configs = None if deliveries_only else {name: ModelConfig(source="test") for name in names}
    worker = Worker(settings, configs, Engine(load, encode))
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        if not running.done() and not worker.stopping:
            worker.stop()
        async with asyncio.timeout(20):
            code = await running
    assert code == exit_code


@contextlib.contextmanager
def heed(message: str) -> Iterator[asyncio.Event]:
    """Yield an event that is set when ``message`` is logged, by whichever thread."""
    loop, heard = asyncio.get_running_loop(), asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == message:
                loop.call_soon_threadsafe(heard.set)

    listener, logger = Listener(), logging.getLogger("worker")
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield heard
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(listener)


@dataclass
class Receiver:
    """A webhook receiver. ``answers`` are given in turn, the last one for ever."""

    answers: list[Callable[[web.Request], Awaitable[web.StreamResponse]]]
    url: str = ""
    calls: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    called: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Keep the call and give the next answer."""
        body = await request.read()
        async with self.called:
            self.calls.append((dict(request.headers), body))
            answer = self.answers[min(len(self.calls), len(self.answers)) - 1]
            self.called.notify_all()
        return await answer(request)

    async def wait(self, count: int) -> None:
        """Return when there were ``count`` calls."""
        async with asyncio.timeout(40), self.called:
            await self.called.wait_for(lambda: len(self.calls) >= count)

    async def wait_for_ids(self, count: int) -> None:
        """Return when ``count`` different events came."""
        async with asyncio.timeout(40), self.called:
            await self.called.wait_for(lambda: len(self.event_ids()) >= count)

    def events(self, secret: str) -> list[Event]:
        """Return the events, each verified."""
        return [verify(body, headers, secret) for headers, body in self.calls]

    def event_ids(self) -> set[str]:
        """Return the distinct ids."""
        return {
            {name.lower(): value for name, value in headers.items()}["webhook-id"]
            for headers, _ in self.calls
        }


def reply(
    status: int, body: bytes = b"", **headers: str
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return an answer of that status."""

    async def answer(_request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, body=body, headers=named)

    return answer


@contextlib.asynccontextmanager
async def receive(
    *answers: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[Receiver]:
    """Run a receiver on a free port of 127.0.0.1."""
    receiver = Receiver(list(answers) or [reply(204)])
    app = web.Application()
    app.router.add_post("/hook", receiver.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    receiver.url = f"http://127.0.0.1:{port}/hook"
    try:
        yield receiver
    finally:
        await runner.cleanup()
