"""Scorers for tests: real arithmetic on the ids, and faults on demand."""

import math
import threading
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np

from contract.models import ModelDescription, ScoringPath
from contract.scores import ItemError, ScoreRequest, TokenCounts, Usage
from worker.engine.seam import JobScores, PreparedItem, PreparedJob, Reading, Sequence

__all__ = ["ArithmeticScorer", "create_sequence", "describe"]


def describe(name: str, fingerprint: str = "") -> ModelDescription:
    """Return the description of a one-label classifier."""
    return ModelDescription(
        name=name,
        path=ScoringPath.CLASSIFICATION,
        architecture="Arithmetic",
        labels=["sum"],
        label_count=1,
        hidden_size=1,
        max_tokens=1 << 20,
        dtype="float32",
        device="cpu",
        fingerprint=fingerprint,
    )


def create_sequence(*ids: int, group: bytes = b"", prefix_length: int = 0) -> Sequence:
    """Return a sequence of these ids."""
    array = np.array(ids, dtype=np.int32)
    return Sequence(ids=array, cost_tokens=len(ids), group=group, prefix_length=prefix_length)


class ArithmeticScorer:
    """Scores an item with the sum of its ids; ``fault`` may raise on a batch first.

    ``batches`` keeps the ids of each forward. With ``gate`` set, a forward waits for it;
    ``entered`` is released once per forward that has begun.
    """

    def __init__(
        self,
        name: str = "sums",
        fault: Callable[[list[list[int]]], object] | None = None,
        fingerprint: str = "",
    ) -> None:
        self.description = describe(name, fingerprint)
        self.fault = fault
        self.batches: list[list[list[int]]] = []
        self.gate: threading.Event | None = None
        self.entered = threading.Semaphore(0)
        self.within_s = math.inf

    def prepare(self, request: ScoreRequest, *, within_s: float = math.inf) -> PreparedJob:
        """Take token ids as they are, and a text as its code points."""
        self.within_s = within_s
        items = []
        ids: list[int]
        rows: list[Any] = list(request.item_list)
        for index, item in enumerate(rows):
            ids = [ord(c) for c in item] if isinstance(item, str) else [int(c) for c in item]
            items.append(
                PreparedItem(index, TokenCounts(len(ids), len(ids), 0), create_sequence(*ids))
            )
        return PreparedJob(request, items, labels=["sum"])

    def forward(self, sequences: Rows[Sequence]) -> list[Reading]:
        """Sum the ids of each."""
        batch = [[int(token_id) for token_id in sequence.ids] for sequence in sequences]
        self.batches.append(batch)
        self.entered.release()
        if self.gate is not None:
            assert self.gate.wait(20)
        if self.fault is not None:
            self.fault(batch)
        return [Reading(np.array([sum(ids)], dtype=np.float32)) for ids in batch]

    def finish(self, prepared: PreparedJob, readings: Rows[Reading | ItemError]) -> JobScores:
        """Collect the sums."""
        rows, errors = [], []
        for index, reading in enumerate(readings):
            if isinstance(reading, ItemError):
                errors.append(ItemError(index, reading.code, reading.message))
                rows.append([np.nan])
            else:
                rows.append([float(reading.values[0])])
        tokens = [item.tokens for item in prepared.items]
        used = sum(count.used for count in tokens)
        return JobScores(
            tensors={"scores": np.array(rows, dtype=np.float32).reshape(-1, 1)},
            labels=["sum"],
            label_counts=[1] * len(rows),
            errors=errors,
            tokens=tokens,
            usage=Usage(prompt_tokens=used, total_tokens=used, computed_tokens=used),
            receipt={"model": self.description.name, "architecture": "Arithmetic"},
            warnings=[],
        )
