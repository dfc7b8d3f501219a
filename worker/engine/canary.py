"""A few fixed inputs whose scores are known: does the model still give them?

What is expected are the stock model's logits in float32, taken at the first load ever before the
engine touched it, and kept in a file, so that an upgrade that changes the numbers is seen as well.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from contract.models import ModelConfig
from worker.engine.capabilities import TOLERANCES, Examined
from worker.engine.seam import CanaryResult, Floats, Reading, Sequence

__all__ = ["Canary", "find_record"]

_LOG = logging.getLogger(__name__)
Forward = Callable[[Rows[Sequence]], list[Reading]]


class _Record(msgspec.Struct, frozen=True):
    """What the file holds; another checkpoint under the same name does not match it.

    ``spread`` is how far the stock model in the served ``dtype`` is from ``logits``, which are of
    dtype ``reference``: float32 unless memory was short.
    """

    weights: str
    dtype: str
    reference: str
    spread: float
    probes: list[list[int]]
    logits: list[list[float]]


@dataclass(frozen=True, slots=True)
class Canary:
    """The fixed inputs of one model. ``check`` runs a forward: device thread only."""

    record: _Record
    #: what the engine may add to the record's spread
    margin: float
    columns: int
    path: Path | None = None

    @classmethod
    def of(cls, examined: Examined, weights: str) -> "Canary":
        """Return the canary of a model that was just examined."""
        dtype = next(examined.network.backbone.module.parameters()).dtype
        # of a vocabulary only the first columns are kept: they depend on everything as well
        columns = min(examined.width, 64)
        exact = examined.reference
        logits = examined.stock if exact is None else exact
        record = _Record(
            weights=weights,
            dtype=str(dtype),
            reference=str(dtype) if exact is None else "torch.float32",
            spread=_measure(examined.stock[:, :columns], logits[:, :columns]),
            probes=[[int(token) for token in ids] for ids in examined.probes],
            logits=[[float(value) for value in row[:columns]] for row in logits],
        )
        return cls(record, TOLERANCES[dtype], columns)

    def remember(self, path: Path) -> "Canary":
        """Return the canary that holds what ``path`` recorded; record it where nothing fits.

        A file of other weights or that cannot be read is replaced; where none can be written,
        this load's own record stands and the log says so.
        """
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=_Record)
        except (OSError, msgspec.DecodeError):
            kept = None
        if kept is not None and (kept.weights, kept.dtype, kept.probes) == (
            self.record.weights,
            self.record.dtype,
            self.record.probes,
        ):
            return replace(self, record=kept, path=path)
        try:
            _write(path, msgspec.json.encode(self.record))
        except OSError as error:
            _LOG.warning("canary not recorded", extra={"path": str(path), "reason": str(error)})
            return self
        return replace(self, path=path)

    def check(self, forward: Forward, *, causal: bool) -> CanaryResult:
        """Score the fixed inputs with ``forward`` and compare."""
        labels = np.arange(self.columns, dtype=np.int32) if causal else None
        sequences = [
            Sequence(ids=np.array(ids, np.int32), cost_tokens=len(ids), labels=labels)
            for ids in self.record.probes
        ]
        found = np.stack([reading.values for reading in forward(sequences)])
        return CanaryResult(
            _measure(found, np.array(self.record.logits)),
            self.margin + self.record.spread,
            "" if self.path is None else str(self.path),
        )


def find_record(folder: Path, weights: str, name: str, config: ModelConfig) -> Path:
    """Return where the record of these weights under this entry is kept."""
    entry = msgspec.json.encode([weights, name, config])
    return folder / f"{hashlib.sha256(entry).hexdigest()[:32]}.json"


def _measure(found: Floats, expected: Floats) -> float:
    """Return the largest difference as a share of the largest expected logit."""
    ours, theirs = found.astype(np.float64), expected.astype(np.float64)
    known = np.isfinite(theirs) | np.isfinite(ours)
    scale = max(float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)), 1e-6)
    difference = float(np.abs(ours - theirs)[known].max(initial=0.0)) / scale
    return difference if np.isfinite(difference) else float("inf")


def _write(path: Path, data: bytes) -> None:
    """Two workers may record at the same time: each file appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
