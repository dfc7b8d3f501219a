"""Requests are parsed strictly, and refused with the path of the field at fault."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidRequestError, MalformedRequestError, RequestError
from contract.scores import JobRequest, ScoreRequest, parse_json

MAX_ITEMS = 5


def _request(**fields: Any) -> ScoreRequest:
    return parse_json(msgspec.json.encode(fields), ScoreRequest).check(max_items=MAX_ITEMS)


@pytest.mark.parametrize(
    "fields",
    [
        {"items": "one text"},
        {"items": []},
        {"items": ["a", ""]},
        {"items": [[1, 2], []], "query": [3]},
        {"items": [[1]], "query": None},
        {"items": ["a"], "query": ""},
        {"items": ["a", "b"], "label_token_ids": [[1, 2], [3]]},
        {"items": ["a"], "label_token_ids": [1, 2], "apply_softmax": True, "temperature": 0.5},
        {"items": ["a"], "labels": [" yes", " no"]},
        {"items": ["a"], "labels": [" very good", " bad"], "multi_token": True},
        {"items": ["a"], "query": "q", "mode": "loglikelihood"},
        {"items": ["a"], "mode": "labels", "labels": ["x"]},
        {"items": ["a"], "determinism": "strict"},
        {"items": ["a"], "determinism": None},
        {"items": ["a"], "label_token_ids": [1], "return_label_mass": False},
    ],
)
def test_good_requests_pass(fields: dict[str, Any]) -> None:
    """Whatever the table of scoring.md allows is accepted as it stands."""
    request = _request(**fields)

    assert request.items == fields["items"]
    assert isinstance(request.item_list, list)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, None, "missing required field `items`"),
        ({"items": 3}, "items", "got `int`"),
        ({"items": ["a", 3]}, "items[1]", "got `int`"),
        ({"items": [[1, "x"]]}, "items[0][1]", "got `str`"),
        ({"items": [[True]]}, "items[0][0]", "got `bool`"),
        ({"items": [[-1]]}, "items[0][0]", "negative"),
        ({"items": [[2**31]]}, "items[0][0]", "vocabulary"),
        ({"items": ["a", [1]]}, "items", "mix"),
        ({"items": [[1]], "query": "abc"}, "query", "mix"),
        ({"items": "abc", "query": [1]}, "query", "mix"),
        ({"items": [[1]], "query": [-2]}, "query[0]", "negative"),
        ({"items": ["a"] * 6}, "items", "6 items exceed the limit of 5"),
        ({"items": ["a"], "itens": 1}, "itens", "unknown field"),
        ({"items": ["a"], "label_token_ids": []}, "label_token_ids", "empty"),
        ({"items": ["a"], "label_token_ids": [1, 1]}, "label_token_ids[1]", "twice"),
        ({"items": ["a"], "label_token_ids": [-4]}, "label_token_ids[0]", "negative"),
        ({"items": ["a"], "label_token_ids": [True]}, "label_token_ids[0]", "got `bool`"),
        ({"items": ["a"], "label_token_ids": [1, [2]]}, "label_token_ids", "either one list"),
        ({"items": ["a"], "label_token_ids": [[1], [2]]}, "label_token_ids", "2 label lists"),
        ({"items": ["a"], "label_token_ids": [[]]}, "label_token_ids[0]", "empty"),
        ({"items": ["a"], "label_token_ids": [[2, 2]]}, "label_token_ids[0][1]", "twice"),
        ({"items": ["a"], "labels": []}, "labels", "empty"),
        ({"items": ["a"], "labels": ["x", "x"]}, "labels[1]", "twice"),
        ({"items": ["a"], "labels": ["x"], "label_token_ids": [1]}, "labels", "not both"),
        ({"items": ["a"], "apply_softmax": True, "temperature": 0}, "temperature", "> 0"),
        ({"items": ["a"], "temperature": 2.0}, "temperature", "without apply_softmax"),
        ({"items": ["a"], "activation": "tanh"}, "activation", "tanh"),
        ({"items": ["a"], "truncation": "left"}, "truncation", "left"),
        ({"items": ["a"], "multi_token": 1}, "multi_token", "got `int`"),
        ({"items": ["a"], "multi_token": None}, "multi_token", "got `null`"),
        ({"items": ["a"], "mode": "generate"}, "mode", "generate"),
        ({"items": ["a"], "mode": None}, "mode", "got `null`"),
        ({"items": ["a"], "determinism": "loose"}, "determinism", "loose"),
        ({"items": ["a"], "determinism": True}, "determinism", "got `bool`"),
        ({"items": ["a"], "return_label_mass": "no"}, "return_label_mass", "got `str`"),
    ],
)
def test_bad_requests_name_the_field(
    fields: dict[str, Any], param: str | None, message: str
) -> None:
    """A refusal carries the path and a sentence."""
    with pytest.raises(InvalidRequestError) as caught:
        _request(**fields)

    assert caught.value.param == param
    assert message in str(caught.value)


def test_an_infinite_temperature_is_refused() -> None:
    """JSON has no infinity, but 1e999 reads as one."""
    raw = b'{"items": ["a"], "apply_softmax": true, "temperature": 1e999}'

    with pytest.raises((InvalidRequestError, MalformedRequestError)):
        parse_json(raw, ScoreRequest).check(max_items=1)
    with pytest.raises(InvalidRequestError, match="finite"):
        ScoreRequest(items="a", apply_softmax=True, temperature=float("inf")).check(max_items=1)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b'{"items": "\xff"}'])
def test_what_is_not_json_is_malformed(raw: bytes) -> None:
    """Malformed is told apart from invalid."""
    with pytest.raises(MalformedRequestError, match="not valid JSON"):
        parse_json(raw, ScoreRequest)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"x":' * 100_000, b'{"items":' * 9_000])
def test_deep_nesting_is_refused(raw: bytes) -> None:
    """No depth of brackets reaches the stack's end."""
    with pytest.raises(RequestError):
        parse_json(raw, ScoreRequest)


@given(st.binary(max_size=200) | st.text(max_size=80).map(str.encode))
def test_no_body_raises_anything_else(raw: bytes) -> None:
    """Whatever bytes arrive, the answer is a request or one of the two errors."""
    with contextlib.suppress(InvalidRequestError, MalformedRequestError):
        assert parse_json(raw, JobRequest).check(max_items=MAX_ITEMS).item_list is not None


def test_a_job_request_has_the_score_fields_and_its_own() -> None:
    """A job is a score request with a webhook, a lane, metadata and three durations."""
    raw = b'{"items":["a"],"webhook":"https://x","priority":"bulk","metadata":{"k":"v"}}'

    request = parse_json(raw, JobRequest)

    assert (request.webhook, request.priority, request.metadata) == (
        "https://x",
        "bulk",
        {"k": "v"},
    )
    with pytest.raises(InvalidRequestError) as caught:
        parse_json(b'{"items":["a"],"run_timeout_s":0}', JobRequest)
    assert caught.value.param == "run_timeout_s"


def test_the_new_fields_have_sglang_s_behaviour_by_default() -> None:
    """A body of SGLang's means what it means there: labels, one token each, no determinism."""
    request = _request(items=["a"], label_token_ids=[1])

    assert (request.mode, request.multi_token, request.determinism) == ("labels", False, None)
    assert request.return_label_mass is True
    given = {"mode": "loglikelihood", "determinism": "strict", "return_label_mass": False}
    read = _request(items=["a"], **given)
    assert msgspec.json.decode(msgspec.json.encode(read)) == {"items": ["a"], **given}
