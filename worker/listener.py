"""Hears hints through arq. Redis may vanish: the listener is started again for ever, with back-off.

A hint is an id. What the work is, who holds it and how it ended is SQL's.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from arq.worker import Worker, func

from storage.queue import FUNCTION, Queue

if TYPE_CHECKING:
    from arq.typing import WorkerCoroutine

__all__ = ["listen"]

_LOG = logging.getLogger(__name__)
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0
_HINT_TIMEOUT_S = 30.0


async def listen(queue: Queue, take_hint: Callable[[str], Awaitable[object]]) -> None:
    """Call ``take_hint(job_id)`` for each hint until cancelled; never ends by itself."""

    async def score(_context: dict[Any, Any], job_id: str) -> None:
        await take_hint(job_id)

    backoff_s = _FIRST_BACKOFF_S
    while True:
        options = queue.worker_options(job_timeout_s=_HINT_TIMEOUT_S)
        worker = Worker(
            functions=[func(cast("WorkerCoroutine", score), name=FUNCTION)],
            **options,
        )
        started_at = asyncio.get_running_loop().time()
        try:
            await worker.async_run()
        except Exception as error:  # noqa: BLE001  # Redis is optional: nothing of it ends a worker
            _LOG.warning("hints stopped", extra={"reason": f"{type(error).__name__}: {error}"})
        finally:
            await _stop(worker)
            await options["redis_pool"].aclose(close_connection_pool=True)
        if asyncio.get_running_loop().time() - started_at > _LONGEST_BACKOFF_S:
            backoff_s = _FIRST_BACKOFF_S
        await asyncio.sleep(backoff_s * random.uniform(0.8, 1.2))  # noqa: S311  # jitter
        backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)


async def _stop(worker: Worker) -> None:
    """End the hints that the worker still holds; a hint that is lost is harmless."""
    hints = [*worker.tasks.values(), *worker.job_tasks.values()]
    if worker.main_task is not None:
        hints.append(worker.main_task)
    for task in hints:
        task.cancel()
    await asyncio.gather(*hints, return_exceptions=True)
