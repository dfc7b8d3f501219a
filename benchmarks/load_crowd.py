"""Thousands of long polls and event streams held at once against one API process."""

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack

import aiohttp

from benchmarks.load_rate import offer
from benchmarks.load_service import (
    PORTS_AN_ADDRESS,
    Answered,
    Service,
    count_accepted,
    open_session,
    percentile,
)

__all__ = ["hold_crowd"]

#: New connections a second: a crowd that arrives, not one that waits at the door.
_ARRIVE_A_S = 400.0
_WAITED_JOBS = 100
_SETTLE_S = 2.0
_PROBES_A_S = 20.0
_GATHER_S = 180


class _Crowd:
    """Those who wait, and what each was answered."""

    def __init__(self, service: Service, ids: list[str]) -> None:
        self._service = service
        self._ids = ids
        self._sessions: list[aiohttp.ClientSession] = []
        self.tasks: list[asyncio.Task[str]] = []

    async def grow(self, stack: AsyncExitStack, path: str, count: int) -> None:
        """Let ``count`` more come, and return once the server has accepted them all."""
        before, url = count_accepted(self._service.port), self._service.url
        for number in range(count):
            if len(self.tasks) >= len(self._sessions) * PORTS_AN_ADDRESS:
                source = f"127.0.0.{2 + len(self._sessions)}" if self._sessions else None
                session = open_session(self._service.key, source)
                self._sessions.append(await stack.enter_async_context(session))
            job_id = self._ids[len(self.tasks) % len(self._ids)]
            ask = _ask(self._sessions[-1], f"{url}/v1/jobs/{job_id}{path}")
            self.tasks.append(asyncio.create_task(ask))
            if number % (_ARRIVE_A_S // 20) == 0:
                await asyncio.sleep(0.05)
        async with asyncio.timeout(_GATHER_S):
            while count_accepted(self._service.port) < before + count:  # another process's
                if any(task.done() for task in self.tasks):
                    break  # lost already: it is counted at the end
                await asyncio.sleep(0.2)

    @property
    def left_early(self) -> int:
        """How many do not wait any more."""
        return sum(task.done() for task in self.tasks)


async def hold_crowd(service: Service, scale: float) -> dict[str, object]:
    """Hold them, measure what they cost and an ordinary request beside them, then let them go."""
    ids = [(await service.submit()).job_id for _ in range(_WAITED_JOBS)]
    figures: dict[str, object] = {}
    alone = await offer(service.submit, _PROBES_A_S, 5.0)
    figures["a submit alone, p99 ms"] = round(alone.p99_ms, 1)
    async with AsyncExitStack() as stack:
        crowd = _Crowd(service, ids)
        for name, count, path in (
            ("long polls", int(5000 * scale), "?wait=600"),
            ("event streams", int(1000 * scale), "/events"),
        ):
            memory, began_at = service.memory_bytes(), time.perf_counter()
            accepted = count_accepted(service.port)
            await crowd.grow(stack, path, count)
            figures[f"{name}: opened"] = count_accepted(service.port) - accepted
            figures[f"{name}: opened within, s"] = round(time.perf_counter() - began_at, 1)
            await asyncio.sleep(_SETTLE_S)
            grown = service.memory_bytes() - memory
            figures[f"{name}: API memory each, KiB"] = round(grown / max(1, count) / 1024, 1)
        figures |= await _measure_beside(service)
        figures["left before the end"] = crowd.left_early
        figures |= await _let_go(service, crowd, ids)
    return figures


async def _measure_beside(service: Service) -> dict[str, object]:
    """An ordinary submit, and an ordinary look at a job, while all the others wait."""
    job_id = (await service.submit()).job_id
    spent_s, began_at = service.cpu_s(), time.perf_counter()
    submits, looks = await asyncio.gather(
        offer(service.submit, _PROBES_A_S, 10.0),
        offer(lambda due_at: _look(service, job_id, due_at), _PROBES_A_S, 10.0),
    )
    share = (service.cpu_s() - spent_s) / (time.perf_counter() - began_at)
    return {
        "beside them: a submit, p99 ms": round(submits.p99_ms, 1),
        "beside them: a look at a job, p99 ms": round(looks.p99_ms, 1),
        "beside them: not 2xx": sum(
            each.status not in {200, 202} for each in submits.answers + looks.answers
        ),
        "beside them: the API's share of a core": round(share, 2),
        "API memory, MiB": round(service.memory_bytes() / 2**20),
    }


async def _let_go(service: Service, crowd: _Crowd, ids: list[str]) -> dict[str, object]:
    """End every job that is waited for at once, beside more submits."""
    began_at = time.perf_counter()
    beside = asyncio.create_task(offer(service.submit, _PROBES_A_S, 5.0))
    for job_id in ids:
        async with service.session.post(f"{service.url}/v1/jobs/{job_id}/cancel") as answer:
            assert answer.status == 200
    async with asyncio.timeout(_GATHER_S):
        ends = Counter(await asyncio.gather(*crowd.tasks))
    seconds = time.perf_counter() - began_at
    costs = [each.cost_s for each in (await beside).answers]
    answered = ends.pop("told", 0)
    return {
        "answered with the job's end": answered,
        "lost": sum(ends.values()),
        "lost, by kind": dict(ends),
        "all answered within, s": round(seconds, 1),
        "a submit meanwhile, p99 ms": round(percentile(costs, 0.99), 1),
    }


async def _ask(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url) as answer:
            body = await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return type(error).__name__
    if answer.status != 200:
        return str(answer.status)
    return "told" if b'"cancelled"' in body else "not told"


async def _look(service: Service, job_id: str, due_at: float) -> Answered:
    async with service.session.get(f"{service.url}/v1/jobs/{job_id}") as answer:
        await answer.read()
    return Answered(answer.status, time.perf_counter() - due_at)
