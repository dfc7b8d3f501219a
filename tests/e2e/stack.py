"""The real processes of one Scorekeep, started for a test and stopped after it."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
from aiohttp import web

from tests.services import free_port

START_TIMEOUT_S = 60


async def wait_until_ready(http: aiohttp.ClientSession, url: str) -> None:
    """Poll ``/readyz`` of another's service; raise ``TimeoutError`` after a minute."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with http.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.1)


def registry_file(folder: Path, models: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write ``scorekeep.toml`` with one table per model and return its path."""
    tables = [
        f"[models.{name}]\n"
        + "".join(
            f"{key} = {msgspec.json.encode(value).decode()}\n" for key, value in entry.items()
        )
        for name, entry in models.items()
    ]
    path = folder / "scorekeep.toml"
    path.write_text("\n".join(tables))
    return path


@dataclass
class Stack:
    """An API and any number of workers on one database, blob folder and Redis.

    ``get`` and ``post`` return status, headers and decoded body. Processes that still run at the
    end are terminated and waited for; one that had to be killed fails the test.
    """

    folder: Path
    redis_url: str
    models: Mapping[str, Mapping[str, Any]]
    database_url: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    api: Sequence[str] = ("api",)

    def __post_init__(self) -> None:
        self._started: list[asyncio.subprocess.Process] = []
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if "SCOREKEEP" not in name},
            "SCOREKEEP_DATA_DIR": str(self.folder / "data"),
            "SCOREKEEP_REDIS_URL": self.redis_url,
            "SCOREKEEP_CONFIG": str(registry_file(self.folder, self.models)),
            "SCOREKEEP_PORT": str(self.port),
            "SCOREKEEP_WEBHOOK_ALLOW_HTTP": "1",
            "SCOREKEEP_WEBHOOK_ALLOWED_NETWORKS": "127.0.0.0/8",
            "OMP_NUM_THREADS": "1",
            **({"SCOREKEEP_DATABASE_URL": self.database_url} if self.database_url else {}),
            **self.settings,
        }

    async def __aenter__(self) -> Self:
        self._ends = contextlib.AsyncExitStack()
        self._log = self._ends.enter_context((self.folder / "stack.log").open("ab"))
        timeout = aiohttp.ClientTimeout(total=90)
        self._http = await self._ends.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        migrating = await self.start("storage.migrating")
        if await migrating.wait() != 0:
            raise RuntimeError(self.log)
        self.api_process = await self.start(*self.api)
        self.api_pid = self.api_process.pid
        await self.wait_for("/healthz")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(self.log[-6000:])
        await self._ends.aclose()

    @property
    def log(self) -> str:
        """What the processes have logged so far."""
        return (self.folder / "stack.log").read_text(errors="replace")

    async def start(self, module: str, *arguments: str) -> asyncio.subprocess.Process:
        """Start ``python -m module`` with this stack's environment."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            env=self.environment,
            stdout=self._log,
            stderr=self._log,
        )
        self._started.append(process)
        self._ends.push_async_callback(self.stop, process)
        return process

    async def start_worker(self, *arguments: str) -> asyncio.subprocess.Process:
        """Start one more worker."""
        return await self.start("worker", *arguments)

    async def stop(self, process: asyncio.subprocess.Process) -> None:
        """Terminate ``process`` and wait; kill and raise if it does not end in 20 seconds."""
        if process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 20)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise

    async def stop_all(self) -> None:
        """Terminate whatever still runs and wait; the API is the last."""
        for process in reversed(self._started):
            await self.stop(process)

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        """Send SIGKILL and wait for the end."""
        process.kill()
        await process.wait()

    async def wait_for(self, path: str, status: int = 200) -> None:
        """Poll ``path`` until it answers ``status``; raise ``TimeoutError`` after a minute."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    if (await self.get(path))[0] == status:
                        return
                await asyncio.sleep(0.05)

    async def get(self, path: str, **options: Any) -> tuple[int, Mapping[str, str], Any]:
        """GET ``path``."""
        return await self.request("GET", path, **options)

    async def post(
        self, path: str, body: object, **options: Any
    ) -> tuple[int, Mapping[str, str], Any]:
        """POST ``body`` as JSON to ``path``."""
        return await self.request("POST", path, json=body, **options)

    async def request(
        self, method: str, path: str, **options: Any
    ) -> tuple[int, Mapping[str, str], Any]:
        """Send one request and decode a JSON answer; other bodies are returned as bytes."""
        async with self._http.request(method, self.url + path, **options) as answer:
            raw = await answer.read()
            if "json" in answer.content_type:
                return answer.status, answer.headers, msgspec.json.decode(raw)
            return answer.status, answer.headers, raw

    async def submit_many(self, bodies: list[dict[str, Any]]) -> list[str]:
        """POST each body to ``/v1/jobs``, 50 at a time, and return the ids in order."""
        gate = asyncio.Semaphore(50)

        async def submit(body: dict[str, Any]) -> str:
            async with gate:
                status, _, job = await self.post("/v1/jobs", body)
                assert status == 202, job
                return str(job["id"])

        return list(await asyncio.gather(*(submit(body) for body in bodies)))

    async def finish(self, ids: list[str], timeout_s: float = 60) -> dict[str, dict[str, Any]]:
        """Long-poll each job until it ended; return the jobs by id."""
        gate = asyncio.Semaphore(50)
        open_states = {"queued", "running"}

        async def finish(job_id: str) -> dict[str, Any]:
            async with gate:
                while True:
                    _, _, job = await self.get(f"/v1/jobs/{job_id}", params={"wait": "10"})
                    if job["state"] not in open_states:
                        return dict(job)

        async with asyncio.timeout(timeout_s):
            jobs = await asyncio.gather(*(finish(job_id) for job_id in ids))
        return dict(zip(ids, jobs, strict=True))


@dataclass
class Receiver:
    """A webhook receiver on loopback that keeps what it was sent, headers and body."""

    received: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def handle(self, request: web.Request) -> web.Response:
        """Keep the event and answer 204."""
        body = await request.read()
        self.received.append(({k.lower(): v for k, v in request.headers.items()}, body))
        async with self.arrived:
            self.arrived.notify_all()
        return web.Response(status=204)

    @property
    def ids(self) -> set[str]:
        """The distinct event ids received so far."""
        return {headers["webhook-id"] for headers, _ in self.received}

    async def wait_for(self, count: int, timeout_s: float = 30) -> None:
        """Return once ``count`` distinct events have arrived."""
        async with asyncio.timeout(timeout_s), self.arrived:
            await self.arrived.wait_for(lambda: len(self.ids) >= count)


@contextlib.asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    """Run a ``Receiver`` on a free loopback port."""
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/hook", receiver.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield receiver
    finally:
        await runner.cleanup()
