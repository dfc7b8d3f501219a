"""How a batch is laid out: which sequences share a prefix, which row each of them is read at.

A batch is a forest of nodes, runs of tokens that see their ancestors and themselves. A sequence is
a path; sequences of one group share its first node, and longer labels branch off their prompt.
All of it is index arithmetic in numpy: no tensor, no device.
"""

from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np

from worker.engine.seam import Ids, Sequence

__all__ = ["AttentionBlock", "LastRows", "Layout", "Read", "choose_last_rows", "plan_batch"]

#: the last layer is cut where its tokens are at least so many times the rows that are read
_LEAST_GAIN = 2


@dataclass(slots=True, eq=False)
class _Node:
    ids: Ids
    types: Ids | None
    parent: int
    first_position: int
    order: tuple[int, int, int] = (0, 0, 0)
    begin: int = 0

    @property
    def end(self) -> int:
        return self.begin + len(self.ids)


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """``count`` nodes of ``length`` tokens each, end to end from ``begin``, under one parent.

    ``ancestors`` are the token ranges that all of them see before themselves, in order of
    position; ``prefix_length`` is their length together.
    """

    begin: int
    count: int
    length: int
    ancestors: tuple[tuple[int, int], ...] = ()
    prefix_length: int = 0

    @property
    def end(self) -> int:
        """The token after the last."""
        return self.begin + self.count * self.length


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Where one sequence is read: ``row`` its last token, ``branches`` each one's token rows."""

    begin: int
    row: int
    branches: tuple[Ids, ...] = ()
    computed_tokens: int = 0
    shared: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LastRows:
    """The token ``rows`` that the last layer is read at, sorted, at most one of a node.

    ``reads`` has, for each block that is read, its nodes that are and where in each of them.
    """

    rows: Ids
    reads: tuple[tuple[AttentionBlock, Ids, Ids], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One batch, laid end to end. Positions count from 0 in every sequence."""

    ids: Ids
    positions: Ids
    types: Ids | None
    blocks: tuple[AttentionBlock, ...]
    reads: list[Read]
    #: what the last layer may be cut to
    last: LastRows | None = None
    #: every packed attention notes (causal, window) here: the probe at load reads it
    trace: list[tuple[bool, int | None]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """How many tokens go through the model."""
        return len(self.ids)


def choose_last_rows(layout: Layout, rows: Ids) -> LastRows | None:
    """Return how the last layer is cut to ``rows``, which are sorted; None where it does not pay.

    Several rows of a node (longer labels, likelihoods) would repeat its keys for each of them.
    """
    if _LEAST_GAIN * len(rows) > layout.tokens:
        return None
    reads = []
    for block in layout.blocks:
        low, high = np.searchsorted(rows, (block.begin, block.end))
        if low < high:
            nodes, offsets = np.divmod(rows[low:high] - block.begin, block.length)
            if (nodes[1:] == nodes[:-1]).any():
                return None
            reads.append((block, nodes, offsets))
    return LastRows(rows, tuple(reads))


class _Forest:
    def __init__(self, *, sharing: bool) -> None:
        self.nodes: list[_Node] = []
        self.tokens = 0
        self._sharing = sharing

    def add(self, parent: int, ids: Ids, types: Ids | None = None) -> int:
        """Add a run of tokens under ``parent`` (-1: none); an empty run is its parent."""
        if not len(ids) and parent >= 0:
            return parent
        if parent >= 0 and not self._sharing:
            above = self.nodes[parent]
            ids, parent = np.concatenate([above.ids, ids]), -1
        first = 0 if parent < 0 else self.depth(parent)
        self.nodes.append(_Node(ids, types, parent, first))
        self.tokens += len(ids)
        return len(self.nodes) - 1

    def depth(self, node: int) -> int:
        """How many tokens stand before what follows ``node``."""
        return self.nodes[node].first_position + len(self.nodes[node].ids)

    def rows(self, node: int, begin: int, end: int) -> Ids:
        """The rows of positions ``begin`` to ``end`` on the path to ``node``; after ``place``."""
        parts: list[Ids] = []
        while node >= 0:
            here = self.nodes[node]
            low, high = max(begin, here.first_position), min(end, self.depth(node))
            if low < high:
                shift = here.begin - here.first_position
                parts.insert(0, np.arange(low + shift, high + shift, dtype=np.int32))
            node = here.parent
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def place(self) -> list[_Node]:
        """Lay the nodes end to end, parents first, equal siblings together; return that order."""
        for node in self.nodes:
            level = self.nodes[node.parent].order[0] + 1 if node.parent >= 0 else 0
            node.order = (level, node.parent, len(node.ids))
        ordered = sorted(self.nodes, key=lambda node: node.order)
        begin = 0
        for node in ordered:
            node.begin = begin
            begin += len(node.ids)
        return ordered

    def blocks(self, ordered: list[_Node]) -> tuple[AttentionBlock, ...]:
        """Group placed nodes of one parent and one length."""
        made: list[AttentionBlock] = []
        index = 0
        while index < len(ordered):
            node, count = ordered[index], 1
            while index + count < len(ordered) and ordered[index + count].order == node.order:
                count += 1
            made.append(
                AttentionBlock(
                    begin=node.begin,
                    count=count,
                    length=len(node.ids),
                    ancestors=self._ancestors(node),
                    prefix_length=node.first_position,
                )
            )
            index += count
        return tuple(made)

    def _ancestors(self, node: _Node) -> tuple[tuple[int, int], ...]:
        ranges: list[tuple[int, int]] = []
        while node.parent >= 0:
            node = self.nodes[node.parent]
            ranges.insert(0, (node.begin, node.end))
        return tuple(ranges)


def plan_batch(sequences: Rows[Sequence], *, sharing: bool) -> Layout:
    """Lay ``sequences`` out; with ``sharing``, what a group has in common appears once.

    Every sequence must hold at least one token.
    """
    forest = _Forest(sharing=sharing)
    sizes = Counter(sequence.group for sequence in sequences if sequence.group)
    prefixes: dict[bytes, int] = {}
    paths: list[tuple[int, list[int], int, bool]] = []
    for sequence in sequences:
        before = forest.tokens
        shared = sharing and sizes[sequence.group] > 1
        prompt = _add_prompt(forest, sequence, prefixes, shared=shared)
        ends = [forest.add(prompt, branch[:-1]) for branch in sequence.branches]
        paths.append((prompt, ends, forest.tokens - before, shared))
    ordered = forest.place()
    return Layout(
        ids=_join([node.ids for node in ordered]),
        positions=_join([_positions(node) for node in ordered]),
        types=_join_types(ordered),
        blocks=forest.blocks(ordered),
        reads=[
            _read(forest, sequence, path) for sequence, path in zip(sequences, paths, strict=True)
        ],
    )


def _add_prompt(
    forest: _Forest, sequence: Sequence, prefixes: dict[bytes, int], *, shared: bool
) -> int:
    if not shared:
        return forest.add(-1, sequence.ids, sequence.token_types)
    if sequence.group not in prefixes:
        prefixes[sequence.group] = forest.add(-1, sequence.ids[: sequence.prefix_length])
    return forest.add(prefixes[sequence.group], sequence.ids[sequence.prefix_length :])


def _read(forest: _Forest, sequence: Sequence, path: tuple[int, list[int], int, bool]) -> Read:
    prompt, ends, computed, shared = path
    length = len(sequence.ids)
    last = forest.rows(prompt, length - 1, length)
    branches = tuple(
        forest.rows(end, length - 1, length - 1 + len(branch))
        for end, branch in zip(ends, sequence.branches, strict=True)
    )
    return Read(
        begin=forest.nodes[prompt].begin,
        row=int(last[0]),
        branches=branches,
        computed_tokens=computed,
        shared=shared,
    )


def _positions(node: _Node) -> Ids:
    return np.arange(node.first_position, node.first_position + len(node.ids), dtype=np.int32)


def _join(parts: list[Ids]) -> Ids:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _join_types(ordered: list[_Node]) -> Ids | None:
    if all(node.types is None for node in ordered):
        return None
    return _join(
        [np.zeros_like(node.ids) if node.types is None else node.types for node in ordered]
    )
