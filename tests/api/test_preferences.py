"""``Prefer`` as RFC 7240 writes it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.preferences import Preferences, parse_preferences


@pytest.mark.parametrize(
    ("headers", "respond_async", "wait_s"),
    [
        ([], False, None),
        ([""], False, None),
        (["respond-async"], True, None),
        (["Respond-Async"], True, None),
        (["respond-async; foo=1"], True, None),
        (["wait=10"], False, 10),
        (["wait = 10"], False, 10),
        (['wait="10"'], False, 10),
        (["wait=0"], False, 0),
        (["respond-async, wait=5"], True, 5),
        (["wait=5", "respond-async"], True, 5),
        (["wait=5, wait=6"], False, 5),
        (["wait=-1"], False, None),
        (["wait=1.5"], False, None),
        (["wait=soon"], False, None),
        (["wait=9999999999"], False, None),
        (["wait=\u0663"], False, None),
        (["respond-async=no"], False, None),
        (['other="respond-async, wait=5"'], False, None),
        (['other="a\\", wait=5", wait=7'], False, 7),
        (["return=minimal; wait=5"], False, None),
        (["é=1, wait=2"], False, 2),
    ],
)
def test_preferences_are_read(headers: list[str], respond_async: bool, wait_s: int | None) -> None:
    """Known preferences count, in any spelling; what is malformed is ignored."""
    assert parse_preferences(headers) == Preferences(respond_async, wait_s)


@pytest.mark.parametrize(
    ("preferences", "waited", "expected"),
    [
        (Preferences(), True, None),
        (Preferences(), False, None),
        (Preferences(wait_s=5), True, "wait=5"),
        (Preferences(wait_s=5), False, None),
        (Preferences(wait_s=600), True, "wait=60"),
        (Preferences(respond_async=True), False, "respond-async"),
    ],
)
def test_the_applied_preference_is_named(
    preferences: Preferences, waited: bool, expected: str | None
) -> None:
    """``Preference-Applied`` names what was honoured and nothing else."""
    assert preferences.render_applied(waited=waited, max_wait_s=60.0) == expected


@given(st.lists(st.text(max_size=40), max_size=3))
def test_no_header_is_an_error(headers: list[str]) -> None:
    """Whatever is in the header, there is an answer, and a wait is a natural number."""
    wait_s = parse_preferences(headers).wait_s

    assert wait_s is None or wait_s >= 0
