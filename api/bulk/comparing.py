"""Two results of one input held against each other: differences, ranks, flips. Any thread.

Pure Python on arrays: a million rows of two columns take some seconds and 50 MB.
"""

import heapq
import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

__all__ = ["Change", "Comparer", "Comparison", "differing_fields"]

_MOST_CHANGED = 50


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One item that changed: its line and position, and both rows of scores."""

    custom_id: str
    item: int
    difference: float
    a: list[float]
    b: list[float]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """``GET …/compare/…``. ``rank_correlation`` is Spearman's, per column; null where undefined.

    ``receipt`` has the fields that differ, each with both values. ``labels`` names the columns.
    ``flips`` counts items whose highest column changed.
    """

    a: str
    b: str
    object: str = "comparison"
    receipt: dict[str, list[Any]]
    labels: list[Any]
    items: int
    only_in_a: int
    only_in_b: int
    failed: int
    identical: int
    max_difference: float | None
    mean_difference: float | None
    rank_correlation: list[float | None]
    flips: int
    changed: list[Change]


class Comparer:
    """Takes pairs of rows; then gives the comparison. A difference is the largest of a row."""

    def __init__(self) -> None:
        self.labels: list[Any] = []
        self._columns: list[tuple[array[float], array[float]]] = []
        self._changed: list[tuple[float, int, Change]] = []
        self._items = self._identical = self._flips = self._failed = 0
        self._sum = 0.0

    def add(
        self, custom_id: str, item: int, a: Sequence[float] | None, b: Sequence[float] | None
    ) -> None:
        """Compare one item; rows that are missing, or of other widths, count as failed."""
        if a is None or b is None or len(a) != len(b) or not a:
            self._failed += 1
            return
        while len(self._columns) < len(a):
            self._columns.append((array("d"), array("d")))
        for (first, second), x, y in zip(self._columns, a, b, strict=False):
            first.append(x)
            second.append(y)
        difference = max(abs(x - y) for x, y in zip(a, b, strict=True))
        self._items += 1
        self._sum += difference
        if difference == 0:
            self._identical += 1
            return
        if len(a) > 1 and _best(a) != _best(b):
            self._flips += 1
        change = Change(custom_id=custom_id, item=item, difference=difference, a=[*a], b=[*b])
        entry = (difference, self._items, change)
        if len(self._changed) < _MOST_CHANGED:
            heapq.heappush(self._changed, entry)
        else:
            heapq.heappushpop(self._changed, entry)

    def finish(
        self, a: str, b: str, *, receipt: dict[str, list[Any]], only_in_a: int, only_in_b: int
    ) -> Comparison:
        """Return the comparison. Sorts every column: call it in a thread."""
        changed = [entry[2] for entry in sorted(self._changed, key=lambda each: -each[0])]
        return Comparison(
            a=a,
            b=b,
            receipt=receipt,
            labels=self.labels,
            items=self._items,
            only_in_a=only_in_a,
            only_in_b=only_in_b,
            failed=self._failed,
            identical=self._identical,
            max_difference=(changed[0].difference if changed else 0.0) if self._items else None,
            mean_difference=self._sum / self._items if self._items else None,
            rank_correlation=[_correlate(first, second) for first, second in self._columns],
            flips=self._flips,
            changed=changed,
        )


def differing_fields(a: dict[str, Any], b: dict[str, Any]) -> dict[str, list[Any]]:
    """Return what differs between two receipts."""
    names = sorted(set(a) | set(b))
    return {name: [a.get(name), b.get(name)] for name in names if a.get(name) != b.get(name)}


def _best(row: Sequence[float]) -> int:
    return max(range(len(row)), key=row.__getitem__)


def _correlate(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rho: Pearson's correlation of the ranks, ties sharing their mean rank."""
    first, second = _ranks(a), _ranks(b)
    mean = (len(a) + 1) / 2
    spread_a = math.fsum((x - mean) ** 2 for x in first)
    spread_b = math.fsum((y - mean) ** 2 for y in second)
    if spread_a == 0 or spread_b == 0:
        return None
    shared = math.fsum((x - mean) * (y - mean) for x, y in zip(first, second, strict=True))
    return max(-1.0, min(1.0, shared / math.sqrt(spread_a * spread_b)))


def _ranks(values: Sequence[float]) -> "array[float]":
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = array("d", bytes(8 * len(values)))
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in _slice(order, start, end):
            ranks[position] = (start + end) / 2 + 1
        start = end + 1
    return ranks


def _slice(order: Sequence[int], start: int, end: int) -> Iterable[int]:
    return (order[index] for index in range(start, end + 1))
