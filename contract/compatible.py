"""Bodies and answers of the compatible routes: vLLM's score and classify, rerank, TEI's.

The only place for these wire forms; ``api.compatible`` maps them to score requests.
"""

from typing import Annotated, Any, Literal

import msgspec

from contract.scores import Instruction, ItemError

__all__ = [
    "Classification",
    "ClassifyAnswer",
    "ClassifyRequest",
    "Document",
    "PairRequest",
    "PairScore",
    "PairsAnswer",
    "PredictRequest",
    "Prediction",
    "RankedDocument",
    "RankedText",
    "RerankAnswer",
    "RerankRequest",
    "RerankTextsRequest",
    "TokenUsage",
]

_Texts = str | list[str]
_Limit = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
#: 0 is none, as vLLM's own default says
_LimitOrNone = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
#: -1 is the model's own limit
_Truncate = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_Side = Literal["left", "right"]
_Direction = Literal["Left", "Right", "left", "right"]


class _Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What vLLM's requests have in common. ``user`` is kept in the job's metadata."""

    model: str | None = None
    user: str | None = None
    priority: _Priority | None = None
    truncate_prompt_tokens: _Truncate | None = None
    truncation_side: _Side | None = None
    use_activation: bool | None = None


class PairRequest(_Request, kw_only=True):
    """vLLM's score request: two sides, in one of four spellings; 1:1, 1:N or N:N."""

    max_tokens_per_doc: _LimitOrNone | None = None
    instruction: Instruction | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
    items: _Texts | None = None
    text_1: _Texts | None = None
    text_2: _Texts | None = None
    data_1: _Texts | None = None
    data_2: _Texts | None = None


class TokenUsage(msgspec.Struct, frozen=True):
    """Token counts as vLLM reports them."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0


class PairScore(msgspec.Struct, frozen=True):
    """One pair's score; null where ``errors`` says why."""

    index: int
    score: float | None
    object: str = "score"


class PairsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's answer to a score request, with ``errors`` where pairs failed."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: TokenUsage = TokenUsage()
    errors: list[ItemError] = []


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document as Cohere's and Jina's clients may send it, and as it comes back."""

    text: str


class RerankRequest(_Request, kw_only=True):
    """Rerank as Cohere (v1 and v2), Jina and vLLM spell it. ``top_n`` 0 means all.

    ``instruct`` is SGLang's word for the task, ``instruction`` vLLM's.
    """

    query: str
    documents: list[str | Document]
    top_n: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: _LimitOrNone | None = None
    truncation: bool | None = None
    instruct: Instruction | None = None
    instruction: Instruction | None = None


class RankedDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document's place in the input, and how relevant it is."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Documents by relevance, the best first. Those that failed are in ``errors`` alone."""

    id: str
    object: str = "list"
    model: str
    results: list[RankedDocument]
    usage: TokenUsage = TokenUsage()
    meta: dict[str, Any] = {}
    errors: list[ItemError] = []


class RerankTextsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """TEI's rerank request. ``model`` is ours: TEI serves one."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = None
    truncation_direction: _Direction | None = None
    model: str | None = None


class RankedText(msgspec.Struct, frozen=True, omit_defaults=True):
    """One text of TEI's answer to rerank, which is a bare list of them."""

    index: int
    score: float
    text: str | None = None


class ClassifyRequest(_Request, kw_only=True):
    """vLLM's classify request."""

    input: _Texts


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """One input's classes; ``label`` and ``probs`` are null where ``errors`` says why."""

    index: int
    label: str | int | list[int] | None
    probs: list[float] | None
    num_classes: int


class ClassifyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's answer to a classify request, with ``errors`` where inputs failed."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: TokenUsage = TokenUsage()
    errors: list[ItemError] = []


class _Parameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What Hugging Face's client sends beside ``inputs``."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    top_k: _Limit | None = None


class PredictRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """TEI's predict request: a text, a pair, or a list of ``[text]`` and ``[text, text]``.

    With ``parameters``, as Hugging Face's ``InferenceClient`` sends them, the answer has a list
    for every input, also for a single one. ``model`` is ours.
    """

    inputs: str | list[str | list[str]]
    raw_scores: bool = False
    truncate: bool | None = None
    truncation_direction: _Direction | None = None
    parameters: _Parameters | None = None
    model: str | None = None


class Prediction(msgspec.Struct, frozen=True):
    """One class of TEI's answer to predict: the likeliest comes first."""

    score: float
    label: str
