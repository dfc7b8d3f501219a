"""Large bodies are parsed in slices, to the same values and the same refusals."""

from typing import Any

import msgspec
import pytest

from contract import parsing
from contract.errors import InvalidRequestError, MalformedRequestError, RequestError
from contract.parsing import parse_in_slices, parse_json
from contract.scores import JobRequest

GOOD: list[dict[str, Any]] = [
    {"items": [[1, 2, 3] * 20, [], [4]], "query": list(range(100)), "metadata": {"a": "b"}},
    {"items": ['a, ["b"]', "ü" * 60, ""], "query": "x" * 100, "label_token_ids": [[1, 2]] * 30},
    {"items": ["a"] * 50, "label_token_ids": list(range(60)), "apply_softmax": True},
    {"items": "one text" * 20, "labels": [f" label, {n}" for n in range(40)]},
    {"items": [list(range(200))], "priority": "bulk", "webhook": None},
    {"items": []},
]
BAD: list[bytes] = [
    b'{"items":[[1,2,3,4,5,6,7,8,9,10,11,12,-1]]}',
    b'{"items":[[1,2],[1,2,3,4,5,6,7,8,9,10,2147483648,12]]}',
    b'{"items":["aaaaaaaaaaaaaaaaaaaaaaaaaaa",3]}',
    b'{"items":[["a,b","c"],["aaaaaaaaaaaaaaaa"]]}',
    b'{"items":[[1,2,3,4,5,6,7,8,9,10,11,{"a":1}]]}',
    b'{"items":[[1,2,3,4,5,6,7,8,9,10,11,[1,2]]]}',
    b'{"items":[[1,2,3,4,5,6,7,8,9,10,11,true]]}',
    b'{"items":[],"query":[1,2,3,4,5,6,7,8,9,10,11,12,-1]}',
    b'{"items":[],"label_token_ids":[1,2,3,4,5,6,7,8,9,10,11,12,-1]}',
    b'{"items":[],"label_token_ids":[[1],[2,3,4,5,6,7,8,9,10,11,12,-1]]}',
    b'{"items":[],"labels":["aaaaaaaaaaaaaaa","bbbbbbbbbb",3]}',
    b'{"items":{"a":"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"}}',
    b'{"items":["a"],"itens":1}',
    b'{"query":"a"}',
    b"[1]",
    b'{"items":[[1,2,3,4,5,6,7,8,9 10,11,12,13]]}',
    b'{"items":["\xff aaaaaaaaaaaaaaaaaaaaaaaaaaaaa","b"]}',
    b"",
]


@pytest.fixture(autouse=True)
def _short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "_SLICE_BYTES", 10)


@pytest.mark.parametrize("body", GOOD)
@pytest.mark.parametrize("indent", [0, 2])
def test_slices_make_the_same_request(body: dict[str, Any], indent: int) -> None:
    """Slicing is not to be seen in the result, whatever white space the client sends."""
    raw = msgspec.json.format(msgspec.json.encode(body), indent=indent)

    assert parse_in_slices(raw, JobRequest) == parse_json(raw, JobRequest)


@pytest.mark.parametrize("raw", BAD, ids=range(len(BAD)))
def test_slices_refuse_the_same(raw: bytes) -> None:
    """The error, its sentence and its path are those of the whole body."""
    with pytest.raises(RequestError) as whole:
        parse_json(raw, JobRequest)
    with pytest.raises(RequestError) as sliced:
        parse_in_slices(raw, JobRequest)

    assert type(sliced.value) is type(whole.value)
    assert sliced.value.param == whole.value.param
    if isinstance(whole.value, InvalidRequestError):
        assert sliced.value.message == whole.value.message
    else:
        assert isinstance(sliced.value, MalformedRequestError)


def test_deep_nesting_is_refused() -> None:
    """No depth of brackets reaches the stack's end."""
    with pytest.raises(RequestError):
        parse_in_slices(b'{"items":' + b"[" * 100_000, JobRequest)
