"""Moments at the edge."""

import pytest

from contract.moments import parse_moment, render_moment


def test_moments_are_rfc_3339_in_utc() -> None:
    """With milliseconds always, so that they sort as text; none stays none."""
    assert render_moment(1796030100.1234) == "2026-11-30T09:15:00.123Z"
    assert render_moment(0) == "1970-01-01T00:00:00.000Z"
    assert render_moment(None) is None


def test_moments_are_read_back_with_any_zone() -> None:
    """In either spelling of UTC and with an offset; one without a zone is refused."""
    assert parse_moment("2026-11-30T09:15:00.500Z") == 1796030100.5
    assert parse_moment("2026-11-30T10:15:00+01:00") == 1796030100.0
    for text in ("2026-11-30T09:15:00", "yesterday", ""):
        with pytest.raises(ValueError, match=r"zone|Invalid"):
            parse_moment(text)
