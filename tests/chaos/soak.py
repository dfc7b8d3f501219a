"""``python -m tests.chaos.soak [--seconds N]``: a steady load, and what grows under it.

Measures how fast one API and one worker are, then offers 60 % of that and compares the processes at
the start and at the end: memory, descriptors, the API's loop lag, and Redis keys at rest.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.servers import run_redis
from tests.e2e.stack import Stack
from tests.services import list_lasting_keys

__all__ = ["Sample", "Soak", "run_soak"]

_SHARE = 0.6
_SETTINGS = {"SCOREKEEP_LOG_LEVEL": "WARNING", "SCOREKEEP_RESULT_TTL_S": "20"}


@dataclass(frozen=True, slots=True)
class Sample:
    """The processes at one moment, by name; the lag is the API's slowest of 20 health checks."""

    memory_mb: dict[str, float]
    descriptors: dict[str, int]
    lag_s: float

    def render(self) -> str:
        """Return one line."""
        memory = ", ".join(f"{name} {mb:.0f} MB" for name, mb in self.memory_mb.items())
        descriptors = ", ".join(f"{name} {n}" for name, n in self.descriptors.items())
        return f"memory {memory}; descriptors {descriptors}; loop lag {self.lag_s * 1000:.1f} ms"


@dataclass(slots=True)
class Soak:
    """What came of it."""

    rate: float
    jobs: int
    start: Sample
    end: Sample
    redis_keys: list[str]

    def render(self) -> str:
        """Return the report."""
        return "\n".join(
            [
                f"offered: {self.rate:.0f} jobs/s, {self.jobs} jobs",
                f"start: {self.start.render()}",
                f"end:   {self.end.render()}",
                f"Redis keys at rest: {len(self.redis_keys)} {self.redis_keys[:5] or ''}",
            ]
        )


async def run_soak(folder: Path, seconds: float) -> Soak:
    """Run for about ``seconds`` and return what was seen."""
    models = {"cheap": {"source": "builtin:deterministic"}}
    with run_redis() as server:
        async with Stack(folder, server.url, models, settings=_SETTINGS) as stack:
            worker = await stack.start_worker()
            await stack.wait_for("/readyz")
            pids = {"api": stack.api_pid, "worker": worker.pid}
            rate = _SHARE * await _measure(stack)
            await _offer(stack, rate, min(10.0, seconds / 4))  # caches and pools fill
            start = await _sample(stack, pids)
            jobs = await _offer(stack, rate, seconds)
            end = await _sample(stack, pids)
            await stack.stop_all()
            keys = list_lasting_keys(server.url)
    return Soak(rate, jobs, start, end, keys)


async def _measure(stack: Stack) -> float:
    started_at = time.monotonic()
    bodies = [{"model": "cheap", "items": [f"measure {number}"]} for number in range(300)]
    await stack.finish(await stack.submit_many(bodies))
    return len(bodies) / (time.monotonic() - started_at)


async def _offer(stack: Stack, rate: float, seconds: float) -> int:
    """Submit a second's worth at a time, and wait for all of it at the end of each second."""
    started_at, sent = time.monotonic(), 0
    while (passed_s := time.monotonic() - started_at) < seconds:
        due = int(rate * passed_s) + 1 - sent
        if due > 0:
            bodies = [{"model": "cheap", "items": [f"{sent + n}"]} for n in range(due)]
            sent += due
            await stack.finish(await stack.submit_many(bodies))
        await asyncio.sleep(0.05)
    return sent


async def _sample(stack: Stack, pids: dict[str, int]) -> Sample:
    await asyncio.sleep(1)
    found = {name: psutil.Process(pid) for name, pid in pids.items()}
    lags = []
    for _ in range(20):
        asked_at = time.monotonic()
        await stack.get("/healthz")
        lags.append(time.monotonic() - asked_at)
    return Sample(
        {name: process.memory_info().rss / 2**20 for name, process in found.items()},
        {name: process.num_fds() for name, process in found.items()},
        max(lags),
    )


def main() -> int:
    """Run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scorekeep-soak-") as folder:
        soak = asyncio.run(run_soak(Path(folder), options.seconds))
    print(soak.render())  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
