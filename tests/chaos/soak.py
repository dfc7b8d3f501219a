"""``python -m tests.chaos.soak [--seconds N]``: a steady load, and what grows under it.

Measures how fast one API and one worker are, then offers 60 % of that and watches the processes:
resident memory, descriptors, the lag of their event loops; and Redis keys at rest.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from tests.chaos.servers import run_redis
from tests.e2e.stack import Stack
from tests.services import list_lasting_keys

__all__ = ["Sample", "Soak", "run_soak"]

_SHARE = 0.6
_SAMPLES = 20
#: How much of a run is its start, and how much its end: a quarter each.
_PART = 4
_SETTINGS = {"SCOREKEEP_LOG_LEVEL": "WARNING", "SCOREKEEP_RESULT_TTL_S": "20"}


@dataclass(frozen=True, slots=True)
class Sample:
    """The processes at one moment, by name; the lag is the worst wake of a loop since the last."""

    at_s: float
    jobs: int
    memory_mb: dict[str, float]
    descriptors: dict[str, int]
    lag_ms: dict[str, float]

    def render(self) -> str:
        """Return one line."""
        parts = [f"{self.at_s:6.0f} s  {self.jobs:7d} jobs"]
        for name, mb in self.memory_mb.items():
            lag = f", lag {self.lag_ms[name]:.1f} ms" if name in self.lag_ms else ""
            parts.append(f"{name} {mb:.0f} MB, {self.descriptors[name]} descriptors{lag}")
        return "  ".join(parts)


@dataclass(slots=True)
class Soak:
    """What came of it. The first samples are the start, the last ones the end."""

    rate: float = 0.0
    jobs: int = 0
    samples: list[Sample] = field(default_factory=list)
    redis_keys: list[str] = field(default_factory=list)

    def find_growth(self) -> list[str]:
        """Return what grew from the start to the end, or should not be there at all."""
        count = max(1, len(self.samples) // _PART)
        start, end = self.samples[:count], self.samples[-count:]
        found = [f"Redis keys at rest: {self.redis_keys[:5]}"] if self.redis_keys else []
        for name in self.samples[0].memory_mb:
            was_mb, is_mb = (median(s.memory_mb[name] for s in part) for part in (start, end))
            if is_mb > was_mb * 1.2 + 20:
                found.append(f"memory of {name}: {was_mb:.0f} MB, then {is_mb:.0f} MB")
            was, now = (median(s.descriptors[name] for s in part) for part in (start, end))
            if now > was + 16:
                found.append(f"descriptors of {name}: {was:.0f}, then {now:.0f}")
        for name in self.samples[0].lag_ms:
            lags = ([s.lag_ms[name] for s in part if name in s.lag_ms] for part in (start, end))
            was_ms, is_ms = (median(part) if part else 0.0 for part in lags)
            if is_ms > was_ms * 2 + 100:
                found.append(f"loop lag of {name}: {was_ms:.0f} ms, then {is_ms:.0f} ms")
        return found

    def render(self) -> str:
        """Return the report."""
        lines = [f"offered: {self.rate:.0f} jobs/s, {self.jobs} jobs"]
        lines += [sample.render() for sample in self.samples]
        lines.append(f"Redis keys at rest: {len(self.redis_keys)}")
        return "\n".join([*lines, *(f"GREW  {growth}" for growth in self.find_growth())])


class Watch:
    """Samples processes for as long as the load lasts."""

    def __init__(self, folder: Path, pids: dict[str, int], soak: Soak) -> None:
        self._folder = folder
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._soak = soak
        self._read = dict.fromkeys(pids, 0)
        self._started_at = time.monotonic()

    def sample(self) -> Sample:
        """Look at everything once."""
        found = Sample(
            time.monotonic() - self._started_at,
            self._soak.jobs,
            {name: p.memory_info().rss / 2**20 for name, p in self._processes.items()},
            {name: p.num_fds() for name, p in self._processes.items()},
            {name: max(lags) for name in self._read if (lags := self._read_lags(name))},
        )
        self._soak.samples.append(found)
        return found

    def _read_lags(self, name: str) -> list[float]:
        path = lag_file(self._folder, name)
        lines = path.read_text().splitlines() if path.exists() else []
        fresh = lines[self._read[name] :]
        self._read[name] = len(lines)
        return [float(line) * 1000 for line in fresh]


def lag_file(folder: Path, name: str) -> Path:
    """Return where a process writes the lag of its loop."""
    return folder / f"lag-{name}"


@asynccontextmanager
async def _start(folder: Path, soak: Soak) -> AsyncIterator[tuple[Stack, dict[str, int]]]:
    """Run Redis, an API and a worker; look at Redis when they have stopped."""
    models = {"cheap": {"source": "builtin:deterministic"}}
    api = ("tests.chaos.lag", str(lag_file(folder, "api")), "api")
    with run_redis() as server:
        stack = Stack(folder, server.url, models, settings=_SETTINGS, api=api)
        async with stack:
            measured = str(lag_file(folder, "worker"))
            worker = await stack.start("tests.chaos.lag", measured, "worker")
            await stack.wait_for("/readyz")
            pids = {"api": stack.api_pid, "worker": worker.pid, "redis": server.pid}
            yield stack, pids
            await stack.stop_all()
            soak.redis_keys = list_lasting_keys(server.url)


async def run_soak(
    folder: Path, seconds: float, report: Callable[[str], object] = lambda line: None
) -> Soak:
    """Run for about ``seconds``; ``report`` gets a line per sample. Return what was seen."""
    soak = Soak()
    async with _start(folder, soak) as (stack, pids):
        await _measure(stack, 100)  # caches and pools fill
        soak.rate = _SHARE * await _measure(stack, 300 if seconds < 60 else 2000)
        report(f"offering {soak.rate:.0f} jobs/s")
        await _offer(stack, soak, min(30.0, seconds / 2))
        soak.jobs = 0
        watch = Watch(folder, pids, soak)
        watch.sample()  # drops the lags of the start
        soak.samples.clear()
        count = max(2, min(_SAMPLES, int(seconds / 2)))
        for _ in range(count):
            await _offer(stack, soak, seconds / count)
            report(watch.sample().render())
    return soak


async def _measure(stack: Stack, count: int) -> float:
    started_at = time.monotonic()
    bodies = [{"model": "cheap", "items": [f"measure {number}"]} for number in range(count)]
    await stack.finish(await stack.submit_many(bodies))
    return len(bodies) / (time.monotonic() - started_at)


async def _offer(stack: Stack, soak: Soak, seconds: float) -> None:
    """Submit at the rate, and wait for the end of each handful."""
    started_at, sent = time.monotonic(), 0
    while (passed_s := time.monotonic() - started_at) < seconds:
        due = int(soak.rate * passed_s) + 1 - sent
        if due > 0:
            bodies = [{"model": "cheap", "items": [f"{soak.jobs + n}"]} for n in range(due)]
            sent += due
            soak.jobs += due
            await stack.finish(await stack.submit_many(bodies))
        await asyncio.sleep(0.05)


def main() -> int:
    """Run, print; 1 if something grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scorekeep-soak-") as folder:
        soak = asyncio.run(
            run_soak(
                Path(folder),
                options.seconds,
                lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
            )
        )
    print(soak.render())  # noqa: T201
    return 1 if soak.find_growth() else 0


if __name__ == "__main__":
    sys.exit(main())
