"""Rerank: Cohere's, Jina's and vLLM's request, or TEI's, told apart by their keys."""

from typing import Any

import msgspec

from api.compatible.forms import (
    Answered,
    Parsed,
    choose_activation,
    choose_lane,
    choose_truncation,
    choose_user,
    count_tokens,
    parse_form,
    pick_column,
)
from contract.compatible import (
    Document,
    RankedDocument,
    RankedText,
    RerankAnswer,
    RerankRequest,
    RerankTextsRequest,
)
from contract.errors import InvalidRequestError
from contract.scores import ScoreRequest, parse_json

__all__ = ["has_texts", "parse_rerank", "parse_rerank_v2", "parse_texts", "render_rerank"]
__all__ += ["render_texts"]

#: What Cohere counts as one search.
_SEARCH_DOCUMENTS = 100


class _Probe(msgspec.Struct):
    """The two spellings of what is ranked, undecoded."""

    texts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def has_texts(body: bytes) -> bool:
    """Tell whether a body is TEI's. Raises ``InvalidRequestError`` for a mixture."""
    probe = parse_json(body, _Probe)
    if probe.texts is not msgspec.UNSET and probe.documents is not msgspec.UNSET:
        message = "give either documents, as Cohere, Jina and vLLM do, or texts, as TEI does"
        raise InvalidRequestError(message, param="texts")
    return probe.texts is not msgspec.UNSET


def parse_rerank(body: bytes) -> Parsed:
    """Read Cohere's v1, Jina's and vLLM's body; documents come back unless that is refused."""
    return _parse(body, cut=False)


def parse_rerank_v2(body: bytes) -> Parsed:
    """Read Cohere's v2 body: long documents are cut; documents come back only when asked for."""
    return _parse(body, cut=True)


def _parse(body: bytes, *, cut: bool) -> Parsed:
    wanted = parse_form(body, RerankRequest)
    documents = [one if isinstance(one, str) else one.text for one in wanted.documents]
    form: dict[str, Any] = {}
    if wanted.top_n:
        form["top_n"] = wanted.top_n
    if wanted.return_documents is not None or cut:
        form["documents"] = bool(wanted.return_documents)
    if wanted.instruct is not None and wanted.instruction is not None:
        message = "give either instruct, as SGLang spells it, or instruction, as vLLM does"
        raise InvalidRequestError(message, param="instruct")
    cut = cut if wanted.truncation is None else wanted.truncation
    request = ScoreRequest(
        items=list(documents),
        query=wanted.query,
        instruction=wanted.instruction if wanted.instruct is None else wanted.instruct,
        model=wanted.model,
        activation=choose_activation(wanted.use_activation),
        max_item_tokens=wanted.max_tokens_per_doc or None,
        **choose_truncation(wanted.truncate_prompt_tokens, wanted.truncation_side, cut=cut),
    )
    return Parsed(request, form, choose_lane(wanted.priority), choose_user(wanted.user))


def render_rerank(answered: Answered) -> RerankAnswer:
    """Answer with the documents by relevance."""
    with_texts = answered.form.get("documents", True) and bool(answered.texts)
    results = [
        RankedDocument(index, score, Document(answered.texts[index]) if with_texts else None)
        for index, score in _rank(answered)
    ]
    return RerankAnswer(
        id=answered.id,
        model=answered.model,
        results=results[: answered.form.get("top_n")],
        usage=count_tokens(answered.usage),
        meta={
            "api_version": {"version": "2"},
            "billed_units": {"search_units": -(-len(answered.scores) // _SEARCH_DOCUMENTS)},
            "tokens": {"input_tokens": answered.usage.prompt_tokens},
        },
        errors=answered.errors,
    )


def parse_texts(body: bytes) -> Parsed:
    """Read TEI's body."""
    wanted = parse_form(body, RerankTextsRequest)
    request = ScoreRequest(
        items=list(wanted.texts),
        query=wanted.query,
        model=wanted.model,
        activation=choose_activation(not wanted.raw_scores),
        **choose_truncation(None, wanted.truncation_direction, cut=bool(wanted.truncate)),
    )
    return Parsed(request, {"documents": wanted.return_text})


def render_texts(answered: Answered) -> list[RankedText]:
    """Answer with TEI's bare list."""
    with_texts = answered.form["documents"]
    return [
        RankedText(index, score, answered.texts[index] if with_texts else None)
        for index, score in _rank(answered)
    ]


def _rank(answered: Answered) -> list[tuple[int, float]]:
    """Return index and score, the best first; equal ones in the order of the input."""
    column = pick_column(answered.labels)
    found = [(index, row[column]) for index, row in enumerate(answered.scores) if row]
    return sorted(found, key=lambda each: (-each[1], each[0]))
