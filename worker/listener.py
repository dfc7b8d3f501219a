"""Hears hints through arq. Redis may vanish: the listener is started again for ever, with back-off.

A hint is an id. What the work is, who holds it and how it ended is SQL's.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

from arq.connections import ArqRedis
from arq.worker import Worker, func

from storage.queue import FUNCTION, Queue

if TYPE_CHECKING:
    from arq.typing import WorkerCoroutine

__all__ = ["listen"]

_LOG = logging.getLogger(__name__)
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0
_HINT_TIMEOUT_S = 30.0
_STOP_TRIES = 5
#: A hint in somebody's hands is looked at so often, in case they died.
_LOOK_AGAIN_S = 1.0
#: Hints are told as they come; what was not heard is found by looking so often.
_POLL_S = 0.1
#: Long enough to clean up on a busy machine: a second cancellation would cut that off.
_STOP_TRY_S = 2.0


class _Worker(Worker):
    """arq's worker. It shields the end of a job from cancellation; ``finishing`` knows those.

    arq asks Redis four things about every hint in the queue at each of its hundred polls a second,
    also about those in somebody's hands, which stay in the queue until they are done: with 15 of
    them that takes a quarter of a core. Here each is looked at once a second, which takes a tenth.
    """

    def __init__(
        self,
        score: Callable[[dict[Any, Any], str], Awaitable[None]],
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__([func(cast("WorkerCoroutine", score), name=FUNCTION)], **options)
        self.finishing: set[asyncio.Task[None]] = set()
        self._looked_at: dict[bytes, float] = {}
        self.hinted = asyncio.Event()

    async def _poll_iteration(self) -> None:
        """Look once, then wait until there is something to look for.

        arq lets a hundredth of a second pass between two looks: that stays the least.
        """
        self.hinted.clear()
        await super()._poll_iteration()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self.hinted.wait()

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Start what nobody has, as far as there is room."""
        now = time.monotonic()
        looked_at = self._looked_at
        due = [each for each in job_ids if now - looked_at.get(each, -math.inf) >= _LOOK_AGAIN_S]
        due.sort(key=lambda each: looked_at.get(each, -math.inf))  # what is new comes first
        due = due[: max(0, self.max_jobs - self.job_counter)]
        kept = {each: looked_at[each] for each in job_ids if each in looked_at}
        self._looked_at = kept | dict.fromkeys(due, now)
        await super().start_jobs(due)

    async def finish_job(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401  # arq's
        """Remove what Redis keeps of a hint."""
        await self._finish(super().finish_job(*arguments, **named))

    async def finish_failed_job(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401  # arq's
        """Remove what Redis keeps of a hint that was taken back."""
        await self._finish(super().finish_failed_job(*arguments, **named))

    async def _finish(self, end: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(end)
        self.finishing.add(task)
        task.add_done_callback(self.finishing.discard)
        await task
        self.hinted.set()  # there is room for another


async def listen(queue: Queue, model: str, take_hint: Callable[[str], Awaitable[object]]) -> None:
    """Call ``take_hint(job_id)`` for each hint of ``model``'s jobs; ends only by cancellation."""

    async def score(_context: dict[Any, Any], job_id: str) -> None:
        await take_hint(job_id)

    backoff_s = _FIRST_BACKOFF_S
    while True:
        options = queue.worker_options(model, job_timeout_s=_HINT_TIMEOUT_S)
        worker = _Worker(score, **options)
        started_at = asyncio.get_running_loop().time()
        listening = asyncio.create_task(worker.async_run())
        waking = asyncio.create_task(_wake(queue, model, worker))
        try:
            await asyncio.wait([listening])  # not awaited: arq may swallow a cancellation
        finally:
            waking.cancel()
            await _await_whole(_end(worker, [listening, waking], options["redis_pool"]))
        _LOG.warning("hints stopped", extra={"reason": _describe(listening)})
        if asyncio.get_running_loop().time() - started_at > _LONGEST_BACKOFF_S:
            backoff_s = _FIRST_BACKOFF_S
        await asyncio.sleep(backoff_s * random.uniform(0.8, 1.2))  # noqa: S311  # jitter
        backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)


async def _wake(queue: Queue, model: str, worker: _Worker) -> None:
    """Have a worker look for hints as they come. Those that are missed it finds by itself."""
    async with contextlib.aclosing(queue.hinted(model)) as heard:
        async for _ in heard:
            worker.hinted.set()


async def _end(worker: _Worker, own: "list[asyncio.Task[None]]", pool: ArqRedis) -> None:
    """End arq's worker and the hints it holds, then its connections.

    A hint that is lost is harmless. Tasks are counted anew each time: arq may swallow a
    cancellation and start more of them.
    """
    for _ in range(_STOP_TRIES):
        tasks = {*own, *worker.tasks.values(), *worker.job_tasks.values(), *worker.finishing}
        if worker.main_task is not None:
            tasks.add(worker.main_task)
        running = {task for task in tasks if not task.done()}
        if not running:
            break
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=_STOP_TRY_S)
    await pool.aclose(close_connection_pool=True)


async def _await_whole(end: Coroutine[Any, Any, None]) -> None:
    """Await ``end`` to its end, however often this task is cancelled meanwhile.

    A model that fails its canary while the worker stops is told twice to be heard no more.
    """
    task = asyncio.create_task(end)
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    await task
    if cancelled is not None:
        raise cancelled


def _describe(task: "asyncio.Task[None]") -> str:
    """Say why it ended; reads its exception, so that nobody complains that it was not read."""
    error = None if task.cancelled() or not task.done() else task.exception()
    return f"{type(error).__name__}: {error}"
