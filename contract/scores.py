"""What can be asked to be scored, and what comes back: request and result types, their checks.

The request is SGLang's Score API request with additions; ``docs/http_api.md`` has every field.
What depends on the model (label range, softmax of one label) is checked in ``contract.models``.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Self

import msgspec

from contract.errors import InvalidRequestError
from contract.jobs import JobState, Lane
from contract.parsing import MAX_TOKEN_ID, TokenId, parse_in_slices, parse_json

__all__ = [
    "Activation",
    "AttemptEnd",
    "CacheUse",
    "Determinism",
    "Instruction",
    "ItemError",
    "Items",
    "Job",
    "JobCounts",
    "JobRequest",
    "LabelTokenIds",
    "Limit",
    "Mode",
    "Problem",
    "ScoreRequest",
    "ScoreResponse",
    "Scores",
    "TokenCounts",
    "Truncation",
    "TruncationSide",
    "Usage",
    "parse_in_slices",
    "parse_json",
]

#: One text, or texts, or token ids. msgspec allows one array type in a union; check() tells apart.
Items = str | list[str | list[TokenId]]
#: One list for all items, or one list per item.
LabelTokenIds = list[TokenId | list[TokenId]]
Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKEN_ID)]
#: A sentence or some: it stands before every item.
Instruction = Annotated[str, msgspec.Meta(max_length=4096)]


class Activation(StrEnum):
    """What is applied to the logits of a classification head."""

    NONE = "none"  #: raw logits
    SOFTMAX = "softmax"  #: over the classes
    SIGMOID = "sigmoid"  #: of each class alone
    MODEL = "model"  #: what the checkpoint itself says


class Truncation(StrEnum):
    """What happens to an input beyond the model's limit."""

    ERROR = "error"  #: the item fails alone, with both numbers
    ITEM = "item"  #: only the item is cut
    QUERY = "query"  #: only the query is cut


class TruncationSide(StrEnum):
    """Which end of what is too long is cut away."""

    LEFT = "left"  #: the beginning goes, the end is kept
    RIGHT = "right"  #: the end goes


class Mode(StrEnum):
    """What a causal model reads."""

    LABELS = "labels"  #: the labels' probabilities after the prompt
    LOGLIKELIHOOD = "loglikelihood"  #: each item's own log-probability given the query


class CacheUse(StrEnum):
    """What a bulk does with scores that the same model gave the same input before."""

    READ = "read"  #: takes them, and keeps its own for others
    REFRESH = "refresh"  #: runs everything, and keeps its own for others
    OFF = "off"  #: runs everything and keeps nothing for others


class Determinism(StrEnum):
    """How equal two runs of one input are."""

    STRICT = "strict"  #: the same bits, whatever else is in the batch; slower


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One query, many items: the body of ``POST /v1/score``.

    ``queries`` gives every item its own in place of ``query``. ``instruction`` is the task, where
    the model's template has a place for it; null leaves the model's own, ``""`` leaves none.
    ``max_tokens`` lowers the model's limit for this request; beyond ``max_item_tokens`` an item is
    cut whatever ``truncation`` says.
    """

    items: Items
    model: str | None = None
    query: str | list[TokenId] | None = None
    queries: list[str] | None = None
    instruction: Instruction | None = None
    label_token_ids: LabelTokenIds | None = None
    labels: list[str] | None = None
    apply_softmax: bool = False
    temperature: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    item_first: bool = False
    return_token_logprobs: bool = False
    return_label_mass: bool = True
    return_pooled_hidden_states: bool = False
    activation: Activation | None = None
    truncation: Truncation = Truncation.ERROR
    truncation_side: TruncationSide | None = None
    max_tokens: Limit | None = None
    max_item_tokens: Limit | None = None
    multi_token: bool = False
    mode: Mode = Mode.LABELS
    determinism: Determinism | None = None

    @property
    def item_list(self) -> list[str] | list[list[int]]:
        """The items as a list of one kind; one bare string is one item."""
        if isinstance(self.items, str):
            return [self.items]
        return self.items  # type: ignore[return-value]  # check() refuses a mixture

    def take(self, indexes: Sequence[int]) -> Self:
        """Return the request with some of its items and, where each has its own, what is theirs."""
        items, queries, labels = self.item_list, self.queries, self.label_token_ids
        if labels and isinstance(labels[0], list):
            labels = [labels[index] for index in indexes]
        return msgspec.structs.replace(
            self,
            items=[items[index] for index in indexes],
            queries=None if queries is None else [queries[index] for index in indexes],
            label_token_ids=labels,
        )

    def check(self, *, max_items: int) -> Self:
        """Raise ``InvalidRequestError`` for what no model could do; return ``self``."""
        _check_items(self, max_items)
        _check_labels(self)
        if not math.isfinite(self.temperature):
            message = "temperature must be finite"
            raise InvalidRequestError(message, param="temperature")
        if self.temperature != 1.0 and not self.apply_softmax:
            message = "temperature has no effect without apply_softmax; set it or leave it out"
            raise InvalidRequestError(message, param="temperature")
        return self


class JobRequest(ScoreRequest, kw_only=True):
    """The body of ``POST /v1/jobs``: what to score, and how to treat the job.

    ``queue_deadline_s`` bounds the wait before a worker takes it (then ``expired``),
    ``run_timeout_s`` one attempt, ``expires_after_s`` how long a result is kept after its end.
    """

    webhook: str | None = None
    webhook_events: list[str] | None = None
    priority: Lane | None = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None
    queue_deadline_s: Annotated[float, msgspec.Meta(gt=0, le=30 * 86400)] | None = None
    run_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    expires_after_s: Annotated[float, msgspec.Meta(gt=0, le=10 * 365 * 86400)] | None = None
    cache: CacheUse = CacheUse.OFF


class ItemError(msgspec.Struct, frozen=True):
    """Why one item has no score; ``scores[index]`` is null."""

    index: int
    code: str
    message: str


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a job as a whole ended without scores. ``status`` is what a waiting route answers."""

    code: str
    message: str
    status: int = 500
    param: str | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts. ``prompt_tokens`` counts every item's full sequence, however it was computed.

    ``computed_tokens`` says what the device did: less when items shared a prefix. ``from_cache``
    counts items whose scores were known; left out where none were.
    """

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0
    computed_tokens: int = 0
    from_cache: int | msgspec.UnsetType = msgspec.UNSET


class TokenCounts(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one item: in the input as given, used, and cut away by ``truncation``."""

    given: int
    used: int
    cut: int


class JobCounts(msgspec.Struct, frozen=True):
    """How many items a job has, and what became of them so far."""

    total: int
    succeeded: int = 0
    failed: int = 0


class AttemptEnd(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt after which its job was tried again, or that was its last.

    ``outcome``: ``lost`` (its worker stopped answering), ``failed``, or ``released`` (given back).
    """

    attempt: int
    outcome: str
    ended_at: str
    started_at: str | None = None
    worker: str | None = None
    error: Problem | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as ``GET /v1/jobs/{id}`` shows it. Moments are RFC 3339 in UTC."""

    id: str
    object: str = "job"
    state: JobState
    model: str
    priority: Lane
    counts: JobCounts
    attempt: int
    bulk: str | None = None
    created_at: str
    started_at: str | None = None
    finished_at: str | None = None
    expires_at: str | None = None
    cancel_requested_at: str | None = None
    metadata: dict[str, str] = {}
    usage: Usage | None = None
    error: Problem | None = None
    history: list[AttemptEnd] = []
    warnings: list[str] = []
    receipt: dict[str, Any] | None = None
    links: dict[str, str] = {}


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/jobs/{id}/scores``: one row per item in input order, null where an item failed.

    ``labels`` names the columns (classification) or repeats the label tokens (causal).
    """

    job: str
    object: str = "scores"
    model: str
    labels: list[str | int | list[int]]
    scores: list[list[float] | None]
    label_mass: list[float | None] | None = None
    token_logprobs: list[list[float] | None] | None = None
    tokens: list[TokenCounts] = []
    errors: list[ItemError] = []
    usage: Usage = Usage()
    warnings: list[str] = []


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's answer to ``POST /v1/score``, with ``errors`` where items failed."""

    scores: list[list[float] | None]
    model: str
    usage: Usage
    object: str = "scoring"
    pooled_hidden_states: list[list[float] | None] | None = None
    token_logprobs: list[list[float] | None] | None = None
    errors: list[ItemError] = []
    warnings: list[str] = []


def _check_items(request: ScoreRequest, max_items: int) -> None:
    items: list[Any] = [request.items] if isinstance(request.items, str) else list(request.items)
    if len(items) > max_items:
        message = (
            f"{len(items)} items exceed the limit of {max_items}; split them over several jobs"
        )
        raise InvalidRequestError(message, param="items")
    kinds = {type(item) for item in items}
    if len(kinds) > 1:
        message = "items mix text and token ids; use one kind for all of them"
        raise InvalidRequestError(message, param="items")
    if request.query is not None and kinds and type(request.query) not in kinds:
        message = "query and items mix text and token ids; use one kind for both"
        raise InvalidRequestError(message, param="query")
    if request.queries is not None:
        _check_queries(request, request.queries, kinds)


def _check_queries(request: ScoreRequest, queries: list[str], kinds: set[type]) -> None:
    count = len(request.item_list)
    if request.query is not None:
        message = "give either query, for all items, or queries, one for each; not both"
        raise InvalidRequestError(message, param="queries")
    if list in kinds:
        message = "queries are texts; items of token ids have one query"
        raise InvalidRequestError(message, param="queries")
    if len(queries) != count:
        message = f"{len(queries)} queries for {count} items"
        raise InvalidRequestError(message, param="queries")


def _check_labels(request: ScoreRequest) -> None:
    ids = request.label_token_ids
    if ids is not None and request.labels is not None:
        message = "give either label_token_ids or labels, not both"
        raise InvalidRequestError(message, param="labels")
    if request.labels is not None:
        _check_distinct(request.labels, "labels")
    if ids is None:
        return
    nested = {isinstance(entry, list) for entry in ids}
    if len(nested) > 1:
        message = "label_token_ids is either one list of ids or one list of ids per item"
        raise InvalidRequestError(message, param="label_token_ids")
    if nested == {True}:
        count = len(request.item_list)
        if len(ids) != count:
            message = f"{len(ids)} label lists for {count} items"
            raise InvalidRequestError(message, param="label_token_ids")
        for index, entry in enumerate(ids):
            if isinstance(entry, list):
                _check_distinct(entry, f"label_token_ids[{index}]")
    else:
        _check_distinct(ids, "label_token_ids")


def _check_distinct(values: list[Any], path: str) -> None:
    if not values:
        message = f"{path} is empty; name at least one label"
        raise InvalidRequestError(message, param=path)
    seen: dict[Any, int] = {}
    for index, value in enumerate(values):
        if value in seen:
            message = f"label {value!r} appears twice, at {seen[value]} and {index}"
            raise InvalidRequestError(message, param=f"{path}[{index}]")
        seen[value] = index
