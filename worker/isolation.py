"""One bad item fails alone: how a forward that raised is taken apart.

An exception says nothing about which sequence caused it, so the batch is halved until the culprit
is alone, within a budget of forwards; running out of memory halves too, and is remembered for
that model and shape. A lost device is not taken apart: it ends the process.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from contract.errors import DeviceLostError, ForwardError, OutOfMemoryError, ScoringError
from worker.engine.seam import Reading, Scorer
from worker.engine.seam import Sequence as TokenSequence

__all__ = ["Failure", "MemoryLimits", "forward_isolated"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sequence has no reading.

    ``proven`` is False where the budget ended before the sequence ran alone: it may be innocent,
    and its job is due another attempt.
    """

    error: ScoringError
    proven: bool = True


class MemoryLimits:
    """The token budget per model and shape: the longest sequence, to the power of two."""

    def __init__(self, budget_tokens: int) -> None:
        self._budget_tokens = budget_tokens
        self._lock = threading.Lock()
        self._limits: dict[tuple[str, int], int] = {}

    def limit(self, model: str, longest: int) -> int:
        """Return how many tokens a batch may hold whose longest sequence has ``longest``."""
        return self._limits.get((model, longest.bit_length()), self._budget_tokens)

    def halve(self, model: str, sequences: Sequence[TokenSequence]) -> None:
        """Remember that these did not fit together."""
        costs = [sequence.cost_tokens for sequence in sequences]
        key = (model, max(costs).bit_length())
        with self._lock:
            tokens = max(1, min(sum(costs), self._limits.get(key, self._budget_tokens)) // 2)
            self._limits[key] = tokens
        _LOG.warning(
            "out of memory: smaller batches from now on",
            extra={"model": model, "longest_tokens": max(costs), "limit_tokens": tokens},
        )


def forward_isolated(
    scorer: Scorer, sequences: Sequence[TokenSequence], limits: MemoryLimits
) -> list[Reading | Failure]:
    """Return one answer per sequence, in order, whatever the forward raises.

    A batch of n costs at most 16 + 8·log2(n) forwards more than one. Raises ``DeviceLostError``.
    """
    budget = 16 + 8 * len(sequences).bit_length()
    answers: list[Reading | Failure | None] = [None] * len(sequences)
    parts = [range(len(sequences))]
    while parts:
        part = parts.pop()
        chosen = [sequences[index] for index in part]
        try:
            readings = _forward(scorer, chosen)
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001  # the batch runner: each waiter gets its answer
            failure = _judge(scorer, chosen, error, limits)
            if len(part) > 1 and budget >= 2:
                budget -= 2
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
                continue
            lone = Failure(failure, proven=len(part) == 1)
            for index in part:
                answers[index] = lone
        else:
            for index, reading in zip(part, readings, strict=True):
                answers[index] = reading
    return [answer for answer in answers if answer is not None]


def _forward(scorer: Scorer, sequences: list[TokenSequence]) -> list[Reading]:
    readings = scorer.forward(sequences)
    if len(readings) != len(sequences):
        message = f"the model gave {len(readings)} readings for {len(sequences)} sequences"
        raise ForwardError(message)
    return readings


def _judge(
    scorer: Scorer, sequences: list[TokenSequence], error: Exception, limits: MemoryLimits
) -> ScoringError:
    name = scorer.description.name
    if isinstance(error, OutOfMemoryError | MemoryError):
        if len(sequences) > 1:
            limits.halve(name, sequences)
        return OutOfMemoryError("the device has too little memory for this item")
    _LOG.warning(
        "forward raised",
        extra={"model": name, "sequences": len(sequences), "error": type(error).__name__},
    )
    if isinstance(error, ScoringError):
        return error
    return ForwardError(f"the model raised {type(error).__name__}")
