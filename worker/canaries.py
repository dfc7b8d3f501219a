"""Do the models still give what they gave? Asked again and again, between two batches.

A model that does not is served no longer: whatever waits for it goes back to the queue, where
another worker may take it.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable

from contract.errors import DeviceLostError, OutOfMemoryError, ScoreError, UnavailableError
from contract.models import CANARY_DRIFT
from worker.batcher import MicroBatcher
from worker.engine.seam import Scorer, SelfChecking
from worker.serving import Serving

__all__ = ["Canaries"]

_LOG = logging.getLogger(__name__)


class Canaries:
    """Holds each ready model against its record every ``period_s``. Belongs to the event loop."""

    def __init__(self, serving: Serving, batcher: MicroBatcher, *, period_s: float) -> None:
        self._serving = serving
        self._batcher = batcher
        self._period_s = period_s

    async def run(self, on_change: Callable[[], Awaitable[object]]) -> None:
        """Check until cancelled; ``on_change`` is awaited when a model has failed."""
        while True:
            await asyncio.sleep(self._period_s)
            if await self.check_once():
                await on_change()

    async def check_once(self) -> list[str]:
        """Check every ready model once; return the names of those that failed."""
        failed = []
        for name, scorer in list(self._serving.ready.items()):
            if not isinstance(scorer, SelfChecking):
                continue
            check = self._batcher.run_between("canary", functools.partial(self._check, scorer))
            try:
                reason = await asyncio.wrap_future(check)
            except ScoreError as error:  # the worker stops: there is nothing to decide
                _LOG.warning("canary not checked", extra={"model": name, "reason": error.message})
                continue
            if reason is not None:
                self._serving.fail(name, reason)
                failed.append(name)
        return failed

    def _check(self, scorer: Scorer) -> str | None:
        """Return why the model may take no more jobs, or None; in the device's thread."""
        reason = _find_fault(scorer)
        if reason is not None:
            name = scorer.description.name
            self._batcher.drop(scorer, UnavailableError(f"the model {name} failed here: {reason}"))
        return reason


def _find_fault(scorer: Scorer) -> str | None:
    if not isinstance(scorer, SelfChecking):
        return None
    try:
        result = scorer.check_canary()
    except (DeviceLostError, OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001  # what a model raises on inputs it once scored
        return f"{CANARY_DRIFT}: the fixed inputs raised {type(error).__name__}"
    return None if result.passed else result.explain()
