"""Bodies that trickle, and a flood of ten times what the queue takes."""

import asyncio
import time
from collections import Counter

from benchmarks.load_rate import LIMIT_MS, offer
from benchmarks.load_service import Answered, Service

__all__ = ["TOKENS_A_JOB", "flood", "trickle"]

#: What the queue counts for one of our jobs.
TOKENS_A_JOB = 12
_TIMES = 10
_CLIENTS = 100
_PROBES_A_S = 20.0
#: So many submits one after the other are accepted in time before all counts as normal again.
_NORMAL = 20
_RECOVERY_S = 300


async def trickle(service: Service, count: int) -> dict[str, object]:
    """Send bodies byte by byte: when they are cut off, and an ordinary submit beside them."""
    began_at, ends = time.perf_counter(), list[float]()
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {service.key}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    )

    async def one() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(head.encode())
        answering = asyncio.create_task(reader.readuntil(b"\r\n"))
        while not answering.done():
            writer.write(b" ")
            await asyncio.wait({answering}, timeout=0.5)
        ends.append(time.perf_counter() - began_at)
        writer.close()
        return (await answering).decode().strip()

    trickling = asyncio.gather(*(one() for _ in range(count)))
    beside = await offer(service.submit, _PROBES_A_S, 4.0)
    answers = Counter(await trickling)
    return {
        "bodies": count,
        "answers": dict(answers),
        "patience, s": float(service.environment["SCOREKEEP_BODY_TIMEOUT_S"]),
        "cut off after, s": [round(min(ends), 1), round(max(ends), 1)],
        "a submit beside them, p99 ms": round(beside.p99_ms, 1),
    }


async def flood(service: Service, capacity: int) -> dict[str, object]:
    """Submit ten times ``capacity``, the queue's; then let a worker come, and look what is left."""
    answers, began_at = list[Answered](), time.perf_counter()
    left = iter(range(capacity * _TIMES))

    async def client() -> None:
        for _ in left:
            answers.append(await service.submit())

    await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    offered, seconds = len(answers), time.perf_counter() - began_at
    memory = service.memory_bytes()
    recovery = await _recover(service, answers)
    accepted = [each.job_id for each in answers if each.status == 202]
    states = await _follow(service, accepted)
    refused = [each for each in answers if each.status in {429, 503}]
    return {
        "submits, ten times the queue's room": offered,
        "offered a second": round(offered / seconds),
        "answers by status, probes after it included": dict(
            Counter(each.status for each in answers)
        ),
        "no answer": sum(not each.status for each in answers),
        "Retry-After, s": sorted({round(each.retry_after_s) for each in refused})[:1]
        + sorted({round(each.retry_after_s) for each in refused})[-1:],
        "API memory at its end, MiB": round(memory / 2**20),
        **recovery,
        "accepted": len(accepted),
        "accepted: ends": dict(states),
        "accepted and lost": len(accepted) - states["succeeded"],
    }


async def _recover(service: Service, answers: list[Answered]) -> dict[str, object]:
    """Start a worker, and submit one after the other until all is well again."""
    ended_at, in_time = time.perf_counter(), 0
    starting = asyncio.create_task(service.start_worker())
    served_at: list[float] = []
    starting.add_done_callback(lambda _: served_at.append(time.perf_counter() - ended_at))
    async with asyncio.timeout(_RECOVERY_S):
        while in_time < _NORMAL:
            answers.append(answer := await service.submit())
            is_normal = answer.status == 202 and answer.cost_s * 1000 < LIMIT_MS
            in_time = in_time + 1 if is_normal else 0
            if not is_normal:
                await asyncio.sleep(0.1)
        normal_s = time.perf_counter() - ended_at
        await starting
    return {
        "a worker serves, s after the flood": round(served_at[0], 1),
        "normal again, s after the flood": round(normal_s, 1),
    }


async def _follow(service: Service, ids: list[str]) -> Counter[str]:
    states: Counter[str] = Counter()
    left = iter(ids)

    async def client() -> None:
        for job_id in left:
            async with service.session.get(f"{service.url}/v1/jobs/{job_id}?wait=60") as answer:
                states[(await answer.json())["state"]] += 1

    await asyncio.gather(*(client() for _ in range(16)))
    return states
