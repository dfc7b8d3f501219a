"""How many submits a second stay under a p99: an open loop, whose rate is searched upward.

A submit is due at its moment whether or not the one before was answered, and its time counts from
there: a server that falls behind cannot slow its clients down and look well.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from benchmarks.load_service import Answered, Service, percentile

__all__ = ["Step", "find_rate", "measure_submits", "offer"]

LIMIT_MS = 100.0
_FIRST = 40.0
_GROWTH = 1.5
_HALVINGS = 3
#: So many seconds' worth of submits may be open: beyond that the step has failed already.
_BEHIND_S = 2.0


@dataclass(slots=True)
class Step:
    """What became of submits offered at ``rate`` a second."""

    rate: float
    answers: list[Answered] = field(default_factory=list)
    gave_up: bool = False

    @property
    def p99_ms(self) -> float:
        """The time that 99 of 100 do not exceed."""
        return percentile([each.cost_s for each in self.answers], 0.99)

    @property
    def is_good(self) -> bool:
        """Whether every submit was accepted, in time."""
        accepted = all(each.status == 202 for each in self.answers)
        return accepted and not self.gave_up and self.p99_ms < LIMIT_MS


async def offer(send: Callable[[float], Awaitable[Answered]], rate: float, seconds: float) -> Step:
    """Send ``rate`` a second for ``seconds``; return all that was answered, also late."""
    step, open_ = Step(rate), set[asyncio.Task[Answered]]()
    began_at = time.perf_counter()
    for number in range(max(1, int(rate * seconds))):
        due_at = began_at + number / rate
        if (ahead_s := due_at - time.perf_counter()) > 0:
            await asyncio.sleep(ahead_s)
        if len(open_) > rate * _BEHIND_S:
            step.gave_up = True
            break
        task = asyncio.ensure_future(send(due_at))
        open_.add(task)
        task.add_done_callback(open_.discard)
        task.add_done_callback(lambda done: step.answers.append(done.result()))
    await asyncio.gather(*open_)
    return step


async def find_rate(trial: Callable[[float], Awaitable[Step]]) -> list[Step]:
    """Raise the rate until a step fails, then halve the gap; return all steps in order."""
    steps, best, rate = list[Step](), 0.0, _FIRST
    while True:
        steps.append(await trial(rate))
        if not steps[-1].is_good:
            break
        best, rate = rate, rate * _GROWTH
    beyond = rate
    for _ in range(_HALVINGS if best else 0):
        rate = (best + beyond) / 2
        steps.append(await trial(rate))
        best, beyond = (rate, beyond) if steps[-1].is_good else (best, rate)
    return steps


async def measure_submits(service: Service, seconds: float) -> dict[str, object]:
    """Search the rate; return the best, and every step on the way."""
    await offer(service.submit, _FIRST, 1.0)  # connections, caches
    steps = await find_rate(lambda rate: offer(service.submit, rate, seconds))
    good = [step for step in steps if step.is_good]
    best = max(good, key=lambda step: step.rate) if good else None
    return {
        "submits/s with p99 < 100 ms": round(best.rate) if best else 0,
        "p99 there, ms": round(best.p99_ms, 1) if best else None,
        "seconds a step": seconds,
        "steps (rate: p99 ms, not accepted)": {
            f"{step.rate:.0f}": [
                round(step.p99_ms, 1),
                sum(each.status != 202 for each in step.answers),
            ]
            for step in steps
        },
    }
