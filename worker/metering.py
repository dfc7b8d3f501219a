"""Adds what this process did to the counters of the installation, which ``/metrics`` shows."""

import logging
from collections.abc import Callable, Mapping, Sequence

from contract.errors import StoreUnavailableError
from storage.counters import add_counts
from storage.database import Database
from storage.throughput import add_throughput

__all__ = ["Meter", "Source"]

_LOG = logging.getLogger(__name__)
#: Totals since the process started, by the counter's name.
Source = Callable[[], Mapping[str, float]]


class Meter:
    """Adds the growth of its sources since it last did. Belongs to the event loop."""

    def __init__(self, database: Database, sources: Sequence[Source]) -> None:
        self._database = database
        self._sources = sources
        self._added: dict[str, float] = {}

    async def add_once(self) -> int:
        """Add what is new; return how many counters grew. What the store refuses waits."""
        totals = {name: value for source in self._sources for name, value in source().items()}
        grown = {
            name: value - self._added.get(name, 0.0)
            for name, value in totals.items()
            if value > self._added.get(name, 0.0)
        }
        if not grown:
            return 0
        try:
            async with self._database.transaction() as tx:
                await add_counts(tx, grown)
                await add_throughput(tx, grown)
        except StoreUnavailableError as error:
            _LOG.warning("counters wait", extra={"reason": error.message})
            return 0
        self._added |= totals
        return len(grown)
