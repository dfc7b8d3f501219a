"""The one door to the engine's heavy half, opened in the loading thread.

torch takes seconds to import. Imported here inside a function, it neither delays the start of a
worker nor is loaded at all by a process that only delivers, or that serves no real model.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from contract.models import ModelConfig
from worker.engine.deterministic import SOURCE, DeterministicScorer
from worker.engine.encoding import EncodedBatch, encode
from worker.engine.seam import JobScores, Scorer

__all__ = ["Engine", "create_engine"]


@dataclass(frozen=True, slots=True)
class Engine:
    """What a worker uses of the engine besides its scorers."""

    load_model: Callable[[str, ModelConfig], Scorer]
    encode: Callable[[Mapping[str, JobScores]], EncodedBatch]


def create_engine(canaries: Path | None = None) -> Engine:
    """Return the engine; torch is imported when the first real model is loaded.

    What the models' fixed inputs must give is kept in the folder ``canaries``.
    """
    return Engine(functools.partial(_load_model, canaries=canaries), encode)


def _load_model(name: str, config: ModelConfig, *, canaries: Path | None) -> Scorer:
    if config.source == SOURCE:
        return DeterministicScorer(name, config)
    from worker.engine.loader import load_model  # noqa: PLC0415  # see above

    return load_model(name, config, canaries)
