"""Which models there are: the registry's names, and what the workers say of them."""

import asyncio
import logging
import time
from collections.abc import Mapping

from contract.errors import InvalidRequestError, StoreUnavailableError, UnknownModelError
from contract.models import ModelConfig, ModelState, ModelStatus
from storage import workers
from storage.database import Database

__all__ = ["Catalog", "choose_model"]

_log = logging.getLogger(__name__)


class Catalog:
    """The models, as last read from SQL; read again when older than ``max_age_s``.

    While SQL is away the last reading stands: a submission then fails by itself.
    """

    def __init__(
        self,
        database: Database,
        registry: Mapping[str, ModelConfig],
        *,
        alive_within_s: float,
        max_age_s: float = 1.0,
    ) -> None:
        self._database = database
        self._registry = registry
        self._alive_within_s = alive_within_s
        self._max_age_s = max_age_s
        self._read_at = -max_age_s
        self._lock = asyncio.Lock()
        self._statuses = self._merge([])

    async def statuses(self) -> dict[str, ModelStatus]:
        """Return every known model by name, in the order of the names."""
        if not self._is_stale():
            return self._statuses
        async with self._lock:
            if self._is_stale():
                self._read_at = time.monotonic()
                try:
                    async with self._database.snapshot() as tx:
                        self._statuses = self._merge(
                            await workers.models(tx, alive_within_s=self._alive_within_s)
                        )
                except StoreUnavailableError:
                    _log.warning("cannot read the models", extra={"action": "models_unread"})
        return self._statuses

    async def resolve(self, name: str | None) -> ModelStatus:
        """Return the model of that name; without a name the only one.

        Raises ``UnknownModelError`` or ``InvalidRequestError`` that names those served.
        """
        return choose_model(await self.statuses(), name)

    def _is_stale(self) -> bool:
        return time.monotonic() - self._read_at >= self._max_age_s

    def _merge(self, reported: list[ModelStatus]) -> dict[str, ModelStatus]:
        merged = {
            name: ModelStatus(name=name, state=ModelState.LOADING, reason="no worker serves it yet")
            for name in self._registry
        }
        merged.update({status.name: status for status in reported})
        return dict(sorted(merged.items()))


def choose_model(statuses: Mapping[str, ModelStatus], name: str | None) -> ModelStatus:
    """Return the model of that name among ``statuses``. Raises as ``Catalog.resolve`` does."""
    if name is not None and name in statuses:
        return statuses[name]
    if name is None and len(statuses) == 1:
        return next(iter(statuses.values()))
    served = ", ".join(statuses) or "none yet: start a worker, or name models in the registry"
    if name is not None:
        message = f"no model {name[:100]!r} is served; served are: {served}"
        raise UnknownModelError(message, param="model")
    if not statuses:
        message = f"no model is served; served are: {served}"
        raise UnknownModelError(message, param="model")
    message = f"name the model; served are: {served}"
    raise InvalidRequestError(message, param="model")
