"""The processes that the load is put on, and how the sockets at their end are counted."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from tests.e2e.stack import registry_file, wait_until_ready
from tests.services import free_port

__all__ = ["Answered", "Service", "count_accepted", "open_session", "percentile", "serving"]

JOB = {"model": "m", "items": ["a text of some forty characters, or so"]}
#: Connections that one source address has ports for, with room to spare.
PORTS_AN_ADDRESS = 20_000
_ESTABLISHED = "01"
_START_S = 120


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer to a submit. ``cost_s`` is since it was due, not since it could be sent."""

    status: int
    cost_s: float
    job_id: str = ""
    retry_after_s: float = 0.0


@dataclass(slots=True)
class Service:
    """An API process that requires keys, and a client's session with one."""

    url: str
    port: int
    key: str
    session: aiohttp.ClientSession
    api: psutil.Process
    environment: dict[str, str]
    processes: list[asyncio.subprocess.Process]

    async def start(self, name: str) -> asyncio.subprocess.Process:
        """Start ``api`` or ``worker``."""
        command = (sys.executable, "-m", "scorekeep", name)
        process = await asyncio.create_subprocess_exec(*command, env=self.environment)
        self.processes.append(process)
        return process

    async def start_worker(self) -> None:
        """Start a worker with the deterministic scorer; return once it serves."""
        await self.start("worker")
        await wait_until_ready(self.session, self.url)

    async def submit(self, due_at: float | None = None) -> Answered:
        """Submit a job. Status 0: there was no answer."""
        began_at = time.perf_counter() if due_at is None else due_at
        try:
            async with self.session.post(f"{self.url}/v1/jobs", json=JOB) as answer:
                body = await answer.json()
        except (aiohttp.ClientError, TimeoutError):
            return Answered(0, time.perf_counter() - began_at)
        retry_after_s = float(answer.headers.get("Retry-After", 0))
        cost_s = time.perf_counter() - began_at
        return Answered(answer.status, cost_s, body.get("id", ""), retry_after_s)

    def memory_bytes(self) -> int:
        """Return the API's resident memory."""
        resident: int = self.api.memory_info().rss
        return resident

    def cpu_s(self) -> float:
        """Return the seconds of a core that the API has used."""
        times = self.api.cpu_times()
        return float(times.user + times.system)


@contextlib.asynccontextmanager
async def serving(redis_url: str, **settings: str) -> AsyncIterator[Service]:
    """Run an API on SQLite in a folder of its own; stop all that was started at the end."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        config = registry_file(Path(folder), {"m": {"source": "builtin:deterministic"}})
        given = {
            "DATA_DIR": folder,
            "REDIS_URL": redis_url,
            "PORT": str(port),
            "CONFIG": str(config),
            "AUTH": "required",
            "LOG_LEVEL": "ERROR",
            **settings,
        }
        environment = os.environ | {f"SCOREKEEP_{name}": value for name, value in given.items()}
        key = await _create_key(environment)
        async with open_session(key) as session:
            service = Service(
                url := f"http://127.0.0.1:{port}",
                port,
                key,
                session,
                psutil.Process(),
                environment,
                [],
            )
            try:
                service.api = psutil.Process((await service.start("api")).pid)
                await _wait_for_life(session, url)
                yield service
            finally:
                await _stop(service.processes)


def open_session(key: str, source: str | None = None) -> aiohttp.ClientSession:
    """Return a client's session; ``source`` is the loopback address that it comes from."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"},
        connector=aiohttp.TCPConnector(limit=0, local_addr=None if source is None else (source, 0)),
        timeout=aiohttp.ClientTimeout(total=600),
    )


def count_accepted(port: int) -> int:
    """Return how many established connections the server at ``port`` has accepted.

    By the kernel's table: one that still stands in the listener's line has no inode yet.
    """
    wanted, count = f":{port:04X}", 0
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = line.split(maxsplit=4)
            if local.endswith(wanted) and state == _ESTABLISHED and line.split()[9] != "0":
                count += 1
    return count


def percentile(costs_s: Sequence[float], share: float) -> float:
    """Return the least cost in milliseconds that ``share`` of all do not exceed."""
    ordered = sorted(costs_s)
    return ordered[max(0, -int(-len(ordered) * share // 1) - 1)] * 1000 if ordered else 0.0


async def _create_key(environment: dict[str, str]) -> str:
    command = (sys.executable, "-m", "scorekeep", "keys", "create", "--tenant", "load", "--json")
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return str(json.loads(out)["key"])


async def _wait_for_life(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(_START_S):
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get(f"{url}/healthz") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)


async def _stop(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in reversed(processes):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()
