"""``Range``, ``If-Range`` and entity tags."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.ranges import ByteRange, is_match, parse_range, select_range
from contract.errors import RangeNotSatisfiableError


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=0-9", (0, 10)),
        ("bytes=5-", (5, 100)),
        ("bytes=90-1000", (90, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=-1000", (0, 100)),
        ("Bytes = 1 - 2", (1, 3)),
        ("bytes=", None),
        ("bytes=-", None),
        ("bytes=5-4", None),
        ("bytes=0-1,3-4", None),
        ("items=0-1", None),
        ("bytes=a-b", None),
        ("bytes=0x1-2", None),
        ("bytes=\u0661-2", None),
        ("", None),
    ],
)
def test_ranges_are_read(header: str, expected: tuple[int, int] | None) -> None:
    """A single range in bytes counts; everything else means the whole file."""
    found = parse_range(header, 100)

    assert found == (None if expected is None else ByteRange(*expected, 100))


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_a_range_without_a_byte_is_refused(header: str) -> None:
    """416 knows the size of the file."""
    with pytest.raises(RangeNotSatisfiableError) as caught:
        parse_range(header, 100)

    assert caught.value.size_bytes == 100
    assert caught.value.param == "Range"


def test_content_range_counts_inclusively() -> None:
    """The header's last byte is in the part."""
    assert ByteRange(0, 10, 100).render() == "bytes 0-9/100"


@pytest.mark.parametrize(
    ("if_range", "is_partial"),
    [
        (None, True),
        ('"abc"', True),
        (' "abc" ', True),
        ('W/"abc"', False),
        ('"abd"', False),
        ("Wed, 21 Oct 2015 07:28:00 GMT", False),
        ("", False),
    ],
)
def test_if_range_needs_the_exact_tag(if_range: str | None, is_partial: bool) -> None:
    """Anything but our strong tag asks for the whole file."""
    found = select_range("bytes=1-2", if_range, etag='"abc"', size_bytes=10)

    assert (found is not None) == is_partial
    assert select_range(None, None, etag='"abc"', size_bytes=10) is None


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, False),
        ("*", True),
        ('"abc"', True),
        ('W/"abc"', True),
        ('"x", "abc"', True),
        ('"x"', False),
        ("abc", False),
        ("", False),
    ],
)
def test_if_none_match_is_weak(header: str | None, expected: bool) -> None:
    """A tag matches weak or strong, alone or in a list."""
    assert is_match(header, '"abc"') is expected


@given(st.text(max_size=30), st.integers(1, 1000))
def test_a_range_lies_inside_the_file(header: str, size: int) -> None:
    """Whatever the header says, the part is not empty and lies in the file."""
    try:
        found = parse_range(header, size)
    except RangeNotSatisfiableError:
        return

    assert found is None or 0 <= found.begin < found.end <= size
