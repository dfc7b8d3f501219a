"""Cursors and links of lists."""

import pytest

from api.pages import parse_cursor, parse_limit, render_cursor, render_next_link
from contract.errors import InvalidRequestError

ID = "job_" + "0" * 31 + "a"


def test_cursors_lead_back() -> None:
    """A cursor of ours is read as the id it was made of; none is none."""
    assert parse_cursor(render_cursor(ID)) == ID
    assert parse_cursor(None) is None


@pytest.mark.parametrize("text", ["", "x", "é", "a b", render_cursor("'; drop table"), ID, "==="])
def test_foreign_cursors_are_refused(text: str) -> None:
    """Nothing but an id of ours comes out of a cursor."""
    with pytest.raises(InvalidRequestError) as caught:
        parse_cursor(text)

    assert caught.value.param == "cursor"


@pytest.mark.parametrize(("text", "expected"), [(None, 50), ("1", 1), ("1000", 1000)])
def test_limits_are_read(text: str | None, expected: int) -> None:
    """1 to 1000, by default 50."""
    assert parse_limit(text) == expected


@pytest.mark.parametrize("text", ["0", "-1", "1001", "x", "", "1.0", "\u0661"])
def test_bad_limits_are_refused(text: str) -> None:
    """Every other limit is refused by name."""
    with pytest.raises(InvalidRequestError) as caught:
        parse_limit(text)

    assert caught.value.param == "limit"


def test_the_link_keeps_the_filters() -> None:
    """The next page has the same filters and another cursor."""
    link = render_next_link("/v1/jobs", [("state", "queued"), ("cursor", "old"), ("q", "a&b")], "n")

    assert link == '</v1/jobs?state=queued&q=a%26b&cursor=n>; rel="next"'
