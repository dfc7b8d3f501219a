"""The forms of ``Idempotency-Key``."""

import pytest

from api.idempotency import hash_body, parse_key
from contract.errors import MalformedRequestError


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], None),
        (['"abc"'], "abc"),
        (["abc"], "abc"),
        (["  abc "], "abc"),
        (['"abc"; v=1'], "abc"),
        (['"a \\"b\\" \\\\c"'], 'a "b" \\c'),
        (["8e03978e-40d5-43dd-bc93-6894a57f9324"], "8e03978e-40d5-43dd-bc93-6894a57f9324"),
        (["a" * 255], "a" * 255),
    ],
)
def test_keys_are_read(headers: list[str], expected: str | None) -> None:
    """A structured-field string and a bare word name the same key."""
    assert parse_key(headers) == expected


@pytest.mark.parametrize(
    "headers",
    [["a", "b"], [""], ['""'], ['"abc'], ['a"b'], ["é"], ["a\x00b"], ["a" * 256], ['"a\\b"']],
)
def test_bad_keys_are_refused(headers: list[str]) -> None:
    """What is neither form, or several, is malformed and says where."""
    with pytest.raises(MalformedRequestError) as caught:
        parse_key(headers)

    assert caught.value.param == "Idempotency-Key"


def test_bodies_differ_by_their_bytes() -> None:
    """The same bytes are the same body, others are not."""
    assert hash_body(b"{}") == hash_body(b"{}") != hash_body(b"{ }")
