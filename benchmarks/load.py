"""What one API process does under load, on loopback: submits, waits, streams, trickles and a flood.

``python -m benchmarks.load [--scale 0.1]`` starts an API (SQLite, keys required) and, for the
flood, a worker with the deterministic scorer; prints a line for each measurement. ``--scale``
multiplies the numbers of clients: 1 is 5 000 long polls and 1 000 streams (see ``ulimit -n``).
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil

from tests.e2e.stack import registry_file
from tests.services import free_port, start_redis

_JOB = {"model": "m", "items": ["a text of some forty characters, or so"]}
_LIMIT_MS = 100.0
_STEP_S = 4.0


class _Machine:
    """An API process, perhaps a worker, and a client with a key."""

    def __init__(self, folder: Path, redis_url: str, **settings: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = registry_file(folder, {"m": {"source": "builtin:deterministic"}})
        given = {
            "DATA_DIR": str(folder),
            "REDIS_URL": redis_url,
            "PORT": str(self.port),
            "CONFIG": str(config),
            "AUTH": "required",
            "LOG_LEVEL": "ERROR",
            **settings,
        }
        self.environment = os.environ | {f"SCOREKEEP_{k}": v for k, v in given.items()}
        self.processes: list[asyncio.subprocess.Process] = []

    async def run(self, *words: str) -> str:
        """Run a command of ours to its end; return what it printed."""
        command = (sys.executable, "-m", "scorekeep", *words)
        process = await asyncio.create_subprocess_exec(
            *command, env=self.environment, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        return out.decode()

    async def start(self, name: str) -> asyncio.subprocess.Process:
        """Start ``api`` or ``worker``."""
        command = (sys.executable, "-m", "scorekeep", name)
        process = await asyncio.create_subprocess_exec(*command, env=self.environment)
        self.processes.append(process)
        return process

    async def stop(self) -> None:
        """Stop what was started."""
        for process in reversed(self.processes):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await process.wait()


_Running = tuple[_Machine, aiohttp.ClientSession, psutil.Process]


@contextlib.asynccontextmanager
async def _service(redis_url: str, **settings: str) -> AsyncIterator[_Running]:
    with tempfile.TemporaryDirectory() as folder:
        machine = _Machine(Path(folder), redis_url, **settings)
        key = json.loads(await machine.run("keys", "create", "--tenant", "load", "--json"))["key"]
        api = await machine.start("api")
        session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=300),
        )
        try:
            async with asyncio.timeout(120):
                while True:
                    with contextlib.suppress(aiohttp.ClientConnectionError):
                        async with session.get(f"{machine.url}/healthz") as answer:
                            if answer.status == 200:
                                break
                    await asyncio.sleep(0.1)
            yield machine, session, psutil.Process(api.pid)
        finally:
            await session.close()
            await machine.stop()


async def _post(session: aiohttp.ClientSession, url: str) -> tuple[int, float, str, float]:
    began = time.perf_counter()
    async with session.post(f"{url}/v1/jobs", json=_JOB) as answer:
        body = await answer.json()
        retry_s = float(answer.headers.get("Retry-After", 0))
    cost_ms = (time.perf_counter() - began) * 1000
    return answer.status, cost_ms, body.get("id", ""), retry_s


async def _submits(session: aiohttp.ClientSession, url: str) -> None:
    """The most submits a second whose p99 stays under the limit: more clients, step by step."""
    best = "none"
    for clients in (1, 2, 4, 8, 16, 32, 64):
        costs: list[float] = []
        until = time.perf_counter() + _STEP_S

        async def client(costs: list[float] = costs, until: float = until) -> None:
            while time.perf_counter() < until:
                status, cost_ms, _, _ = await _post(session, url)
                assert status == 202, status
                costs.append(cost_ms)

        await asyncio.gather(*(client() for _ in range(clients)))
        costs.sort()
        p99 = costs[max(0, int(len(costs) * 0.99) - 1)]
        line = f"{len(costs) / _STEP_S:.0f}/s with {clients} clients, p99 {p99:.0f} ms"
        if p99 >= _LIMIT_MS:
            _say(f"submits: {best}; beyond: {line}")
            return
        best = line
    _say(f"submits: {best}")


async def _idle(
    session: aiohttp.ClientSession, url: str, api: psutil.Process, scale: float
) -> None:
    """Thousands that wait: what they cost in memory and CPU, and a request beside them."""
    _, _, job_id, _ = await _post(session, url)
    before, opened = api.memory_info().rss, []
    for name, count, path in (
        ("long polls", int(5000 * scale), f"/v1/jobs/{job_id}?wait=60"),
        ("streams", int(1000 * scale), f"/v1/jobs/{job_id}/events"),
    ):
        began = time.perf_counter()
        tasks = [asyncio.create_task(_hold(session, url + path)) for _ in range(count)]
        opened += tasks
        async with asyncio.timeout(120):
            while len(api.net_connections()) < len(opened):  # noqa: ASYNC110  # another process's
                await asyncio.sleep(0.2)
        grown = api.memory_info().rss - before
        _say(
            f"{count} {name}: open after {time.perf_counter() - began:.1f} s, "
            f"{grown / 2**20:.0f} MiB more, {grown / max(1, count) / 1024:.1f} KiB each"
        )
        before += grown
    spent = api.cpu_times().user + api.cpu_times().system
    began = time.perf_counter()
    costs = sorted([(await _post(session, url))[1] for _ in range(20)])
    share = (api.cpu_times().user + api.cpu_times().system - spent) / (time.perf_counter() - began)
    _say(
        f"beside {len(opened)} waiting: a submit takes {costs[10]:.0f} ms (median of 20), "
        f"the API {share:.0%} of a core"
    )
    async with session.post(f"{url}/v1/jobs/{job_id}/cancel") as answer:
        assert answer.status == 200
    began = time.perf_counter()
    async with asyncio.timeout(120):
        ended = Counter(await asyncio.gather(*opened))
    _say(f"job cancelled: all answered after {time.perf_counter() - began:.1f} s: {dict(ended)}")


async def _hold(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as answer:
        body = await answer.read()
    return f"{answer.status} {'cancelled' if b'cancelled' in body else 'other'}"


async def _trickle(machine: _Machine, key: str, count: int) -> None:
    """Bodies of one byte at a time: when they are cut off."""
    began = time.perf_counter()
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {key}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    )

    async def one() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", machine.port)
        writer.write(head.encode())
        answering = asyncio.create_task(reader.readuntil(b"\r\n"))
        while not answering.done():
            writer.write(b" ")
            await asyncio.wait({answering}, timeout=0.5)
        writer.close()
        return (await answering).strip()

    answers = Counter(await asyncio.gather(*(one() for _ in range(count))))
    _say(
        f"{count} trickling bodies: {dict(answers)} after {time.perf_counter() - began:.1f} s "
        f"(patience {machine.environment['SCOREKEEP_BODY_TIMEOUT_S']} s)"
    )


async def _flood(redis_url: str, capacity: int) -> None:
    """Ten times what the queue takes: what is answered, that nothing accepted is lost, recovery."""
    tokens = str(capacity * 14)
    async with _service(redis_url, QUEUE_TOKENS=tokens) as (machine, session, api):
        answers: Counter[int] = Counter()
        accepted: list[str] = []
        waits: list[float] = []

        async def client(count: int) -> None:
            for _ in range(count):
                status, _, job_id, retry_s = await _post(session, machine.url)
                answers[status] += 1
                accepted.append(job_id) if status == 202 else waits.append(retry_s)

        began = time.perf_counter()
        await asyncio.gather(*(client(capacity // 5) for _ in range(50)))
        _say(
            f"flood: {capacity * 10} submits of a queue for {capacity} in "
            f"{time.perf_counter() - began:.1f} s: {dict(answers)}, Retry-After "
            f"{min(waits, default=0):.0f} to {max(waits, default=0):.0f} s; "
            f"API {api.memory_info().rss / 2**20:.0f} MiB"
        )
        began = time.perf_counter()
        await machine.start("worker")
        async with asyncio.timeout(300):
            while (await _post(session, machine.url))[0] != 202:  # noqa: ASYNC110  # as above
                await asyncio.sleep(0.2)
        _say(f"flood: room again {time.perf_counter() - began:.1f} s after a worker began to start")
        states: Counter[str] = Counter()
        for job_id in accepted:
            async with session.get(f"{machine.url}/v1/jobs/{job_id}?wait=60") as answer:
                states[(await answer.json())["state"]] += 1
        _say(f"flood: of {len(accepted)} accepted {dict(states)}")
        assert states == {"succeeded": len(accepted)}


async def _run(scale: float, parts: set[str]) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with start_redis() as redis_url:
        async with _service(redis_url, BODY_TIMEOUT_S="5") as (machine, session, api):
            if "submits" in parts:
                await _submits(session, machine.url)
            if "idle" in parts:
                await _idle(session, machine.url, api, scale)
            if "trickle" in parts:
                key = session.headers["Authorization"]
                await _trickle(machine, key, max(1, int(200 * scale)))
        if "flood" in parts:
            await _flood(redis_url, int(1000 * scale))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Read the scale and the parts, and measure."""
    parts = ("submits", "idle", "trickle", "flood")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", choices=parts, action="append")
    options = parser.parse_args()
    asyncio.run(_run(options.scale, set(options.only or parts)))


if __name__ == "__main__":
    main()
