"""Endpoints a batch line may name: how its body becomes a score request, and scores its answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from contract.scores import ItemError, Items, ScoreRequest, ScoreResponse, Usage, parse_json

__all__ = ["ENDPOINTS", "Answered", "Endpoint"]

_Parsed = tuple[ScoreRequest, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Answered:
    """A line's scores, as an endpoint renders them. ``form`` is what its body asked for."""

    id: str
    model: str
    labels: list[Any]
    scores: list[list[float] | None]
    errors: list[ItemError]
    created: int
    form: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How one endpoint reads a body and writes an answer."""

    parse: Callable[[bytes], _Parsed]
    render: Callable[[Answered], Any]


class _RerankBody(msgspec.Struct, forbid_unknown_fields=True):
    query: str
    documents: list[str]
    model: str | None = None
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _ClassifyBody(msgspec.Struct, forbid_unknown_fields=True):
    input: str | list[str]
    model: str | None = None


def _parse_score(body: bytes) -> _Parsed:
    return parse_json(body, ScoreRequest), {}


def _render_score(answered: Answered) -> ScoreResponse:
    return ScoreResponse(
        scores=answered.scores, model=answered.model, usage=Usage(), errors=answered.errors
    )


def _parse_rerank(body: bytes) -> _Parsed:
    parsed = parse_json(body, _RerankBody)
    request = ScoreRequest(items=list(parsed.documents), query=parsed.query, model=parsed.model)
    return request, {} if parsed.top_n is None else {"top_n": parsed.top_n}


def _render_rerank(answered: Answered) -> dict[str, Any]:
    """A model of one label ranks by it, one of several by its last."""
    results = [
        {"index": index, "relevance_score": row[-1]}
        for index, row in enumerate(answered.scores)
        if row
    ]
    results.sort(key=lambda each: (-each["relevance_score"], each["index"]))
    return {
        "id": answered.id,
        "model": answered.model,
        "results": results[: answered.form.get("top_n")],
        "errors": answered.errors,
    }


def _parse_classify(body: bytes) -> _Parsed:
    parsed = parse_json(body, _ClassifyBody)
    items: Items = parsed.input if isinstance(parsed.input, str) else list(parsed.input)
    return ScoreRequest(items=items, model=parsed.model, apply_softmax=True), {}


def _render_classify(answered: Answered) -> dict[str, Any]:
    data = []
    for index, row in enumerate(answered.scores):
        if not row:
            continue
        best = max(range(len(row)), key=row.__getitem__)
        label = answered.labels[best] if best < len(answered.labels) else best
        data.append({"index": index, "label": label, "probs": row, "num_classes": len(row)})
    return {
        "id": answered.id,
        "object": "list",
        "created": answered.created,
        "model": answered.model,
        "data": data,
        "errors": answered.errors,
    }


#: By path. The Users engineer adds one by adding a line.
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/score": Endpoint(_parse_score, _render_score),
    "/v1/rerank": Endpoint(_parse_rerank, _render_rerank),
    "/v1/classify": Endpoint(_parse_classify, _render_classify),
}
