"""Which endpoint answers under which path, alone and on a batch's lines: the only such table."""

from typing import Any

import msgspec

from api.compatible.classify import parse_classify, parse_predict, render_classify, render_predict
from api.compatible.forms import COHERE, TEI, Answered, Endpoint, Parsed
from api.compatible.pairs import parse_score, render_score
from api.compatible.rerank import (
    has_texts,
    parse_rerank,
    parse_rerank_v2,
    parse_texts,
    render_rerank,
    render_texts,
)
from contract.errors import InvalidRequestError

__all__ = ["BATCH_ENDPOINTS", "PATHS", "find_endpoint", "parse_line", "render_line"]

_SCORE = Endpoint(parse_score, render_score)
_RERANK = Endpoint(parse_rerank, render_rerank)
_RERANK_V2 = Endpoint(parse_rerank_v2, render_rerank, COHERE)
_TEXTS = Endpoint(parse_texts, render_texts, TEI, whole=True)
_CLASSIFY = Endpoint(parse_classify, render_classify)
_PREDICT = Endpoint(parse_predict, render_predict, TEI, whole=True)

#: By path. Where a path has two endpoints, ``find_endpoint`` looks at the body.
PATHS: dict[str, Endpoint] = {
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK_V2,
    "/classify": _CLASSIFY,
    "/v1/classify": _CLASSIFY,
    "/predict": _PREDICT,
}
#: What a line of a batch may name.
BATCH_ENDPOINTS = ("/v1/score", "/v1/rerank", "/v1/classify")


def find_endpoint(path: str, body: bytes) -> Endpoint:
    """Return the endpoint that a body under ``path`` is meant for."""
    endpoint = PATHS[path]
    return _TEXTS if endpoint.render is render_rerank and has_texts(body) else endpoint


def parse_line(path: str, body: bytes) -> Parsed:
    """Read the body of a batch's line.

    Raises ``InvalidRequestError`` for what its answer could not hold: the texts are not read again
    when results are written.
    """
    parsed = PATHS[path].parse(body)
    if parsed.form.get("documents"):
        message = "return_documents has no place in a batch: its input file has the documents"
        raise InvalidRequestError(message, param="return_documents")
    return parsed


def render_line(path: str, answered: Answered) -> Any:  # noqa: ANN401  # whatever msgspec encodes
    """Return the body of a line's answer, without the counts that a line has not of its own."""
    body = msgspec.to_builtins(PATHS[path].render(answered))
    for name in ("usage", "meta"):
        body.pop(name, None)
    return body
