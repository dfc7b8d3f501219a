"""Media types in and out."""

import pytest

from api.negotiation import JSON, SAFETENSORS, check_json_body, choose_type
from contract.errors import NotAcceptableError, UnsupportedMediaTypeError


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, JSON),
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        (SAFETENSORS, SAFETENSORS),
        (f"{SAFETENSORS};q=0.5, */*;q=0.1", SAFETENSORS),
        (f"{SAFETENSORS};q=0, */*", JSON),
        (f"{JSON};q=0.2, {SAFETENSORS}; Q=0.9", SAFETENSORS),
        ("Application/JSON", JSON),
        ("text/html, */*;q=0.8", JSON),
        (f"{JSON};q=nonsense", JSON),
    ],
)
def test_the_best_type_is_chosen(accept: str | None, expected: str) -> None:
    """Quality decides, then the specific mention, then our own order."""
    assert choose_type(accept, (JSON, SAFETENSORS)) == expected


@pytest.mark.parametrize("accept", ["text/html", "*/*;q=0", "image/*"])
def test_nothing_acceptable_is_an_error(accept: str) -> None:
    """406 names what there is."""
    with pytest.raises(NotAcceptableError, match="safetensors"):
        choose_type(accept, (JSON, SAFETENSORS))


@pytest.mark.parametrize(
    ("content_type", "charset"),
    [(JSON, None), ("application/json; charset=UTF-8", "UTF-8"), ("application/x+json", None)],
)
def test_json_bodies_are_taken(content_type: str, charset: str | None) -> None:
    """JSON and its relatives in UTF-8 are read."""
    check_json_body(content_type, charset)


@pytest.mark.parametrize(
    ("content_type", "charset"),
    [(None, None), ("text/plain", None), ("application/x-www-form-urlencoded", None),
     ("application/json", "utf-16"), ("application/jsonp", None)],
)  # fmt: skip
def test_other_bodies_are_refused(content_type: str | None, charset: str | None) -> None:
    """415 for another type or another charset."""
    with pytest.raises(UnsupportedMediaTypeError):
        check_json_body(content_type, charset)
