"""The one door to the engine's heavy half, opened in the loading thread.

torch takes seconds to import. Imported here inside the functions, it neither delays the start of
a worker nor is loaded at all by a process that only delivers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contract.models import ModelConfig
from worker.engine.seam import JobScores, Scorer

if TYPE_CHECKING:
    from worker.engine.encoding import EncodedBatch

__all__ = ["Engine", "create_engine"]


@dataclass(frozen=True, slots=True)
class Engine:
    """What a worker uses of the engine besides its scorers."""

    load_model: Callable[[str, ModelConfig], Scorer]
    encode: "Callable[[Mapping[str, JobScores]], EncodedBatch]"


def create_engine() -> Engine:
    """Return the engine; nothing of it is imported before the first call."""
    return Engine(_load_model, _encode)


def _load_model(name: str, config: ModelConfig) -> Scorer:
    from worker.engine.loader import load_model  # noqa: PLC0415  # see above

    return load_model(name, config)


def _encode(scores: Mapping[str, JobScores]) -> "EncodedBatch":
    from worker.engine.encoding import encode  # noqa: PLC0415  # see above

    return encode(scores)
