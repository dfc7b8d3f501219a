"""Histograms that are added up over all workers: their bounds, which every process must agree on.

In SQL each bucket is a counter of its own: ``name:bound`` counts what fell between the bound before
and this one, ``name:inf`` what was larger, ``name:sum`` adds the values.
"""

from bisect import bisect_left
from collections.abc import Mapping

__all__ = ["BOUNDS", "Histogram", "accumulate"]

#: By name, upper bounds, ascending.
BOUNDS: Mapping[str, tuple[int, ...]] = {
    "batch_sequences": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    "batch_tokens": (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536),
}


class Histogram:
    """Counts values since the process started. One thread observes, any thread reads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bounds = BOUNDS[name]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0

    def observe(self, value: int) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def totals(self) -> dict[str, float]:
        """Return the counters under which it is stored."""
        named = zip([*map(str, self._bounds), "inf"], self._counts, strict=True)
        return {f"{self._name}:{bound}": float(count) for bound, count in named} | {
            f"{self._name}:sum": float(self._sum)
        }


def accumulate(name: str, counts: Mapping[str, float]) -> tuple[list[tuple[str, float]], float]:
    """Return Prometheus' buckets, each with all that is below it, and the sum of the values."""
    buckets: list[tuple[str, float]] = []
    below = 0.0
    for bound in [*map(str, BOUNDS[name]), "inf"]:
        below += counts.get(f"{name}:{bound}", 0.0)
        buckets.append(("+Inf" if bound == "inf" else bound, below))
    return buckets, counts.get(f"{name}:sum", 0.0)
