"""``/score`` and ``/v1/score``: SGLang's request or vLLM's, told apart by their keys."""

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
from contract.compatible import PairRequest, PairsAnswer, PairScore
from contract.errors import InvalidRequestError, MalformedRequestError
from contract.scores import ScoreRequest, ScoreResponse, parse_json

__all__ = ["parse_score", "render_score"]

#: vLLM's spellings of the two sides.
_SPELLINGS = (
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)
_PAIRS = "pairs"

_Absent = msgspec.Raw | msgspec.UnsetType


class _Probe(msgspec.Struct):
    """The keys that only vLLM's requests have, and ``items``, undecoded."""

    queries: _Absent = msgspec.UNSET
    documents: _Absent = msgspec.UNSET
    items: _Absent = msgspec.UNSET
    text_1: _Absent = msgspec.UNSET
    text_2: _Absent = msgspec.UNSET
    data_1: _Absent = msgspec.UNSET
    data_2: _Absent = msgspec.UNSET


_OWN = frozenset(_Probe.__struct_fields__) - {"items"}
_COMMON = {"items", "instruction", "model", "truncation_side"}
_SGLANG = frozenset(ScoreRequest.__struct_fields__) - _OWN - _COMMON


def parse_score(body: bytes) -> Parsed:
    """Read SGLang's body, or vLLM's. Raises ``InvalidRequestError`` for a mixture of the two."""
    try:
        probe = parse_json(body, _Probe)
    except MalformedRequestError:  # the whole type says better what is wrong
        return Parsed(parse_form(body, ScoreRequest))
    found = {name for name in probe.__struct_fields__ if getattr(probe, name) is not msgspec.UNSET}
    if not found & _OWN:
        return Parsed(parse_form(body, ScoreRequest))
    _refuse_mixture(body)
    wanted = parse_form(body, PairRequest)
    queries, items = _pick_sides(wanted, found)
    request: dict[str, Any] = {"query": queries[0] if queries else None}
    if len(queries) > 1:
        request = {"queries": queries}
    return Parsed(
        ScoreRequest(
            items=list(items),
            instruction=wanted.instruction,
            max_item_tokens=wanted.max_tokens_per_doc or None,
            model=wanted.model,
            activation=choose_activation(wanted.use_activation),
            **request,
            **choose_truncation(wanted.truncate_prompt_tokens, wanted.truncation_side),
        ),
        {"kind": _PAIRS},
        choose_lane(wanted.priority),
        choose_user(wanted.user),
    )


def render_score(answered: Answered) -> ScoreResponse | PairsAnswer:
    """Answer in the form of the request."""
    if answered.form.get("kind") == _PAIRS:
        return _render_pairs(answered)
    return ScoreResponse(
        scores=answered.scores,
        model=answered.model,
        usage=answered.usage,
        pooled_hidden_states=answered.hidden,
        token_logprobs=answered.token_logprobs,
        errors=answered.errors,
        warnings=list(answered.warnings),
    )


def _render_pairs(answered: Answered) -> PairsAnswer:
    column = pick_column(answered.labels)
    return PairsAnswer(
        id=answered.id,
        created=answered.created,
        model=answered.model,
        data=[
            PairScore(index, row[column] if row else None)
            for index, row in enumerate(answered.scores)
        ],
        usage=count_tokens(answered.usage),
        errors=answered.errors,
    )


def _refuse_mixture(body: bytes) -> None:
    """Look for SGLang's own keys in a body that has vLLM's."""
    mixed = sorted(_SGLANG & set(parse_json(body, dict[str, msgspec.Raw])))
    if mixed:
        message = (
            f"the body mixes vLLM's score request with SGLang's: {mixed[0]} has no place beside "
            "queries, documents, text_1, text_2, data_1 or data_2"
        )
        raise InvalidRequestError(message, param=mixed[0])


def _pick_sides(wanted: PairRequest, found: set[str]) -> tuple[list[str], list[str]]:
    for left, right in _SPELLINGS:
        if found == {left, right}:
            break
    else:
        told = ", ".join(sorted(found))
        spellings = "; ".join(f"{left} and {right}" for left, right in _SPELLINGS)
        message = f"the two sides are spelled as one of: {spellings}; not as {told}"
        raise InvalidRequestError(message, param=min(found))
    sides = []
    for name in (left, right):
        value = getattr(wanted, name)
        if value is None:
            message = f"{name} is null; give a text or a list of texts"
            raise InvalidRequestError(message, param=name)
        sides.append([value] if isinstance(value, str) else value)
    queries, items = sides
    if not queries and items:
        message = f"{left} is empty, {right} is not"
        raise InvalidRequestError(message, param=left)
    if len(queries) > 1 and len(queries) != len(items):
        message = f"{len(queries)} {left} for {len(items)} {right}: pair them 1:1, 1:N or N:N"
        raise InvalidRequestError(message, param=left)
    return queries, items
