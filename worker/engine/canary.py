"""A few fixed inputs whose scores are known: does the model still give them?

The expected logits are the stock model's, taken at load before the engine touched it, and kept in
a file at the first load ever, so that an upgrade that changes the numbers is seen as well.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from worker.engine.capabilities import TOLERANCES, Examined
from worker.engine.seam import Reading, Sequence

__all__ = ["Canary", "CanaryResult"]

Forward = Callable[[Rows[Sequence]], list[Reading]]


class _Record(msgspec.Struct, frozen=True):
    """What the file holds; another checkpoint under the same name does not match it."""

    weights: str
    dtype: str
    probes: list[list[int]]
    logits: list[list[float]]


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """``difference`` from the expected logits, as a share of the largest of them."""

    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the model may go on taking jobs."""
        return self.difference <= self.tolerance


@dataclass(frozen=True, slots=True)
class Canary:
    """The fixed inputs of one model. ``check`` runs a forward: device thread only."""

    record: _Record
    tolerance: float
    columns: int

    @classmethod
    def of(cls, examined: Examined, weights: str) -> "Canary":
        """Return the canary of a model that was just examined."""
        dtype = next(examined.network.backbone.module.parameters()).dtype
        # of a vocabulary only the first columns are kept: they depend on everything as well
        columns = min(examined.width, 64)
        record = _Record(
            weights=weights,
            dtype=str(dtype),
            probes=[[int(token) for token in ids] for ids in examined.probes],
            logits=[[float(value) for value in row[:columns]] for row in examined.stock],
        )
        return cls(record, TOLERANCES[dtype], columns)

    def remember(self, path: Path) -> "Canary":
        """Return the canary that holds what ``path`` recorded; record it where nothing fits.

        A file of other weights or that cannot be read is replaced.
        """
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=_Record)
        except (OSError, msgspec.DecodeError):
            kept = None
        if kept is not None and (kept.weights, kept.probes) == (
            self.record.weights,
            self.record.probes,
        ):
            return replace(self, record=kept)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(self.record))
        return self

    def check(self, forward: Forward, *, causal: bool) -> CanaryResult:
        """Score the fixed inputs with ``forward`` and compare."""
        labels = np.arange(self.columns, dtype=np.int32) if causal else None
        sequences = [
            Sequence(ids=np.array(ids, np.int32), cost_tokens=len(ids), labels=labels)
            for ids in self.record.probes
        ]
        found = np.stack([reading.values for reading in forward(sequences)]).astype(np.float64)
        expected = np.array(self.record.logits)
        known = np.isfinite(expected) | np.isfinite(found)
        scale = max(float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0)), 1e-6)
        difference = float(np.abs(found - expected)[known].max(initial=0.0)) / scale
        return CanaryResult(difference if np.isfinite(difference) else float("inf"), self.tolerance)
