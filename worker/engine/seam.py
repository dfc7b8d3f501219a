"""What the engine promises to the rest of the worker: the only place for that boundary.

``prepare`` turns a request into sequences, ``forward`` reads a batch of sequences (of any jobs),
``finish`` turns a job's readings into scores. Importing this module does not load torch.
"""

import math
import time
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from contract.errors import DeadlineExceededError
from contract.models import CANARY_DRIFT, ModelDescription
from contract.scores import ItemError, ScoreRequest, TokenCounts, Usage

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Budget",
    "CanaryResult",
    "Floats",
    "Ids",
    "JobScores",
    "Padding",
    "PreparedItem",
    "PreparedJob",
    "Reading",
    "Scorer",
    "SelfChecking",
    "Sequence",
    "count_computed_tokens",
]

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


class Budget:
    """The time that the preparation of one job may take."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._end = time.monotonic() + within_s

    def check(self) -> None:
        """Raise ``DeadlineExceededError`` where it has passed."""
        if time.monotonic() > self._end:
            message = (
                f"the job's texts were not tokenised within {self._within_s:g} s; split it into "
                "several jobs"
            )
            raise DeadlineExceededError(message)


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """What one item puts through the model; opaque to the batcher but for the first four fields.

    Sequences with one non-empty ``group`` begin with the same ``prefix_length`` tokens, which a
    batch that holds several of them computes once. ``cost_tokens`` counts all its tokens.
    """

    ids: Ids
    cost_tokens: int
    group: bytes = b""
    prefix_length: int = 0
    token_types: Ids | None = None
    #: causal: token ids whose logits are read at the last position
    labels: Ids | None = None
    #: causal: continuations whose own log-probabilities are read (longer labels, likelihoods)
    branches: tuple[Ids, ...] = ()
    #: causal: whether the whole vocabulary must be reduced at the last position
    wants_mass: bool = False
    wants_hidden: bool = False
    #: whether it must go through the model alone, so that its bits depend on nothing else
    alone: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PreparedItem:
    """One item, ready for the device, or why it cannot go there."""

    index: int
    tokens: TokenCounts
    sequence: Sequence | None = None
    error: ItemError | None = None
    #: the item's own labels where a causal job gives one list per item
    labels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PreparedJob:
    """A request whose items are tokenised, checked and laid out one by one."""

    request: ScoreRequest
    items: list[PreparedItem]
    warnings: list[str] = field(default_factory=list)
    labels: list[str | int | list[int]] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        """What has to go through the model, in item order; items that failed have none."""
        return [item.sequence for item in self.items if item.sequence is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What the model yields for one sequence, on the host.

    ``values`` float32: the head's raw logits, or the logits of the sequence's labels, or the
    summed log-probability of each of its branches. ``logsumexp`` is over the whole vocabulary
    and NaN where it was not asked for. ``hidden`` is one row in the model's dtype.
    """

    values: Floats
    logsumexp: float = float("nan")
    hidden: "Tensor | Floats | None" = None
    greedy: tuple[bool, ...] = ()
    computed_tokens: int = 0
    shared: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class JobScores:
    """What a job yields. A row of an item that failed is NaN in every tensor.

    ``tensors``: ``scores`` float32 [items, columns], after activation; ``logits`` float32 of the
    same shape, raw; for causal models ``label_mass`` float32 [items] and ``token_logprobs``
    float32 [items, columns] where asked for; for longer labels and likelihoods ``scores`` are
    summed log-probabilities, beside ``normalized_logprobs`` (per token), ``token_counts`` and
    ``is_greedy`` (0 or 1), all float32 [items, columns]; ``hidden_states`` [items, hidden] in
    the model's dtype where asked for (a CPU torch tensor, the others are numpy arrays). Rows with
    fewer labels than the widest end in NaN: ``label_counts`` says how many columns count.
    """

    tensors: dict[str, "Floats | Tensor"]
    labels: list[str | int | list[int]]
    label_counts: list[int]
    errors: list[ItemError]
    tokens: list[TokenCounts]
    usage: Usage
    receipt: dict[str, Any]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """``difference`` from the expected logits, as a share of the largest of them."""

    difference: float
    tolerance: float
    #: the file that holds what is expected, empty where there is none
    record: str = ""

    @property
    def passed(self) -> bool:
        """Whether the model may go on taking jobs."""
        return self.difference <= self.tolerance

    def explain(self) -> str:
        """Return the sentence for whoever finds the model out of service."""
        kept = f", which {self.record} holds" if self.record else ""
        return (
            f"{CANARY_DRIFT}: the fixed inputs' logits differ from those of the first load{kept}, "
            f"by {self.difference:.3g} of the largest; {self.tolerance:.3g} is tolerated"
        )


class Scorer(Protocol):
    """A loaded model."""

    @property
    def description(self) -> ModelDescription:
        """What the model is, can do, and cannot do."""
        ...

    def prepare(self, request: ScoreRequest, *, within_s: float = math.inf) -> PreparedJob:
        """Tokenise and check; any thread, no device.

        Raises ``InvalidRequestError`` where the whole request cannot be scored by this model, and
        ``DeadlineExceededError`` soon after ``within_s`` have passed.
        """
        ...

    def forward(self, sequences: Rows[Sequence]) -> list[Reading]:
        """Put one batch through the model: one reading per sequence, in order; device thread only.

        Raises ``OutOfMemoryError``, ``DeviceLostError``, or whatever the model raises: then no
        sequence of the batch has a reading.
        """
        ...

    def finish(self, prepared: PreparedJob, readings: Rows[Reading | ItemError]) -> JobScores:
        """Turn readings, one for each of ``prepared.sequences``, into the job's scores."""
        ...


@runtime_checkable
class SelfChecking(Protocol):
    """A scorer that knows what a few fixed inputs must give."""

    def check_canary(self) -> CanaryResult:
        """Score them and compare; device thread only, raises as ``forward`` does."""
        ...


@runtime_checkable
class Padding(Protocol):
    """A scorer that knows how much of what it computed was padding, since it was loaded."""

    @property
    def padding_tokens(self) -> int:
        """Tokens; any thread."""
        ...


def count_computed_tokens(sequences: Iterable[Sequence]) -> int:
    """Return how many tokens one batch of these costs, a shared prefix counted once."""
    seen: set[bytes] = set()
    total = 0
    for sequence in sequences:
        total += sequence.cost_tokens
        if sequence.group:
            total -= sequence.prefix_length if sequence.group in seen else 0
            seen.add(sequence.group)
    return total
