"""Moments at the edge."""

from contract.moments import render_moment


def test_moments_are_rfc_3339_in_utc() -> None:
    """With milliseconds always, so that they sort as text; none stays none."""
    assert render_moment(1796030100.1234) == "2026-11-30T09:15:00.123Z"
    assert render_moment(0) == "1970-01-01T00:00:00.000Z"
    assert render_moment(None) is None
