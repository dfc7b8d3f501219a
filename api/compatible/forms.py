"""What a compatible endpoint is: a body made into a score request, scores made into its answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from api.bodies import is_large
from contract.compatible import TokenUsage
from contract.jobs import Lane
from contract.scores import (
    Activation,
    ItemError,
    ScoreRequest,
    Truncation,
    TruncationSide,
    Usage,
    parse_in_slices,
    parse_json,
)

__all__ = [
    "COHERE",
    "OPENAI",
    "TEI",
    "Answered",
    "Endpoint",
    "Parsed",
    "choose_activation",
    "choose_lane",
    "choose_truncation",
    "choose_user",
    "count_tokens",
    "parse_form",
    "pick_column",
]

_T = TypeVar("_T")

#: Whose form an error takes.
OPENAI = "openai"
COHERE = "cohere"
TEI = "tei"

_POSITIVE = ("yes", "true", "1", "relevant", "positive")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A body as understood. ``form`` is what the answer needs to know of it, as plain JSON."""

    request: ScoreRequest
    form: dict[str, Any] = field(default_factory=dict)
    lane: Lane | None = None
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answered:
    """What was scored, as an endpoint renders it. ``form`` is what its body asked for.

    A line of a batch has no usage of its own, and its texts are not at hand.
    """

    id: str
    model: str
    labels: list[Any]
    scores: list[list[float] | None]
    errors: list[ItemError]
    created: int
    form: Mapping[str, Any]
    usage: Usage = Usage()  # noqa: RUF009  # frozen
    texts: Sequence[str] = ()
    hidden: list[list[float] | None] | None = None
    token_logprobs: list[list[float] | None] | None = None
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How one endpoint reads a body and writes an answer.

    ``whole``: the answer has no place for items that failed, so that one fails the request.
    """

    parse: Callable[[bytes], Parsed]
    render: Callable[[Answered], Any]
    family: str = OPENAI
    whole: bool = False


def parse_form(body: bytes, kind: type[_T]) -> _T:
    """Decode a body; one that is large in many short calls, for others to run between them."""
    return parse_in_slices(body, kind) if is_large(body) else parse_json(body, kind)


def choose_activation(wanted: bool | None) -> Activation:  # noqa: FBT001  # a field's value
    """Return what vLLM's ``use_activation`` means: the checkpoint's own, unless it is false."""
    return Activation.NONE if wanted is False else Activation.MODEL


def choose_truncation(tokens: int | None, side: str | None, *, cut: bool = False) -> dict[str, Any]:
    """Return the fields of a score request for vLLM's ``truncate_prompt_tokens`` (-1: the model's).

    ``cut``: the family cuts what is too long unless told otherwise. Only items are ever cut.
    """
    fields: dict[str, Any] = {}
    if tokens is not None or cut:
        fields["truncation"] = Truncation.ITEM
    if tokens is not None and tokens > 0:
        fields["max_tokens"] = tokens
    if side is not None:
        fields["truncation_side"] = TruncationSide(side.lower())
    return fields


def choose_lane(priority: int | None) -> Lane | None:
    """Return the lane of vLLM's and Cohere's numbers, of which the lower is the more urgent."""
    if not priority:
        return None
    return Lane.INTERACTIVE if priority < 0 else Lane.NORMAL


def choose_user(user: str | None) -> dict[str, str]:
    """Return the metadata that keeps OpenAI's ``user``."""
    return {} if user is None else {"user": user}


def pick_column(labels: Sequence[Any]) -> int:
    """Return which column says how relevant an item is.

    The one whose label is a word for yes (presets of causal rerankers, some classifiers), else the
    last: of one label the only one, of two usually the positive.
    """
    words = [str(label).strip().lower() for label in labels]
    for word in _POSITIVE:
        if word in words:
            return words.index(word)
    return -1


def count_tokens(usage: Usage) -> TokenUsage:
    """Return the counts that the other services report."""
    return TokenUsage(usage.prompt_tokens, usage.total_tokens, usage.completion_tokens)
