"""The models of this worker: loaded one by one in the background, each on its own account."""

import asyncio
import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping

from contract.errors import ModelLoadError, ScoreError
from contract.models import ModelConfig, ModelState, ModelStatus
from worker.engine.seam import Scorer

__all__ = ["LoadModel", "Serving"]

_LOG = logging.getLogger(__name__)
LoadModel = Callable[[str, ModelConfig], Scorer]


class Serving:
    """Which models are loading, ready or failed. Belongs to the event loop."""

    def __init__(self, configs: Mapping[str, ModelConfig], load: LoadModel) -> None:
        self.ready: dict[str, Scorer] = {}
        self.statuses: dict[str, ModelStatus] = {
            name: ModelStatus(name=name, state=ModelState.LOADING) for name in configs
        }
        self._configs = dict(configs)
        self._load = load

    @property
    def failed(self) -> dict[str, str]:
        """The models that cannot be served here, and why."""
        return {
            name: status.reason or "unknown"
            for name, status in self.statuses.items()
            if status.state is ModelState.FAILED
        }

    @property
    def device(self) -> str:
        """The device of the models that are ready."""
        return next((scorer.description.device for scorer in self.ready.values()), "")

    async def load_all(self, on_change: Callable[[], Awaitable[object]]) -> None:
        """Load the models in a thread, in order; a failure is recorded and the next one goes on."""
        for name, config in self._configs.items():
            try:
                scorer = await _run_in_daemon(functools.partial(self._load, name, config))
            except ScoreError as error:
                self._fail(name, error.message)
            except Exception as error:  # noqa: BLE001  # the next model must load
                _LOG.exception("loading raised", extra={"model": name})
                self._fail(name, f"{type(error).__name__}: {error}")
            else:
                self.ready[name] = scorer
                self.statuses[name] = ModelStatus(
                    name=name, state=ModelState.READY, description=scorer.description
                )
                _LOG.info("model ready", extra={"model": name})
            await on_change()

    def fail(self, name: str, reason: str) -> None:
        """Serve a model no longer, because of ``reason``."""
        self.ready.pop(name, None)
        self._fail(name, reason)

    def _fail(self, name: str, reason: str) -> None:
        self.statuses[name] = ModelStatus(name=name, state=ModelState.FAILED, reason=reason)
        _LOG.error("model failed", extra={"model": name, "reason": reason})


def _run_in_daemon(call: Callable[[], Scorer]) -> "asyncio.Future[Scorer]":
    """Run ``call`` in a thread that does not keep the process: a load may take minutes."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Scorer] = loop.create_future()

    def settle(scorer: Scorer | None, error: BaseException | None) -> None:
        if future.done():
            return
        if scorer is not None:
            future.set_result(scorer)
        else:
            future.set_exception(error or ModelLoadError("the loader gave nothing"))

    def work() -> None:
        scorer, error = None, None
        try:
            scorer = call()
        except Exception as raised:  # noqa: BLE001  # handed to the waiter
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, scorer, error)

    threading.Thread(target=work, name="loader", daemon=True).start()
    return future
