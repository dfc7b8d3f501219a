"""Whatever comes in: an answer or an error of ours, never another exception, and never for long."""

import asyncio
import gzip
import io
import resource
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from api.bulk.lines import LineParser
from api.bulk.parquet import RefusedError, run
from api.bulk.reading import read_lines
from api.idempotency import parse_key
from api.preferences import parse_preferences
from api.ranges import is_match, select_range
from contract.config import Settings
from contract.errors import (
    MalformedRequestError,
    RangeNotSatisfiableError,
    ScoreError,
    SignatureError,
    UnsupportedMediaTypeError,
)
from contract.models import ModelState, ModelStatus
from contract.webhooks import create_secret, sign, verify
from storage.tensors import ITEM_BYTES, Tensor, parse_header, render_safetensors

pytestmark = pytest.mark.timeout(120)
#: Inputs a test.
_COUNT = 1000
_headers = st.text(st.characters(max_codepoint=0x2FF, blacklist_categories=["Cs"]), max_size=80)
_words = st.sampled_from(
    [
        "bytes=",
        "-",
        ",",
        "0",
        "1",
        "99",
        "18446744073709551616",
        '"',
        "\\",
        ";",
        "=",
        "*",
        "wait",
        "respond-async",
        "W/",
        "é",
        "\x00",
    ]
)
_near = st.lists(_words, max_size=12).map("".join)
_any_header = st.one_of(_headers, _near)


@settings(max_examples=_COUNT)
@given(st.lists(_any_header, max_size=4))
def test_prefer(headers: list[str]) -> None:
    """Any header is read; what it asks for is a time that is not negative, or none."""
    found = parse_preferences(headers)

    assert found.wait_s is None or 0 <= found.wait_s <= 999_999_999


@settings(max_examples=_COUNT)
@given(_any_header, st.integers(0, 2**40), st.none() | _any_header)
def test_ranges(header: str, size: int, condition: str | None) -> None:
    """A part lies within the file and holds a byte, or there is none, or 416 names the size."""
    etag = '"abc"'
    is_match(condition, etag)
    try:
        part = select_range(header, condition, etag=etag, size_bytes=size)
    except RangeNotSatisfiableError as error:
        refused = error.size_bytes
        part = None
    else:
        refused = size

    assert refused == size
    assert part is None or 0 <= part.begin < part.end <= size


@settings(max_examples=_COUNT)
@given(st.lists(_any_header, max_size=3))
def test_idempotency_keys(headers: list[str]) -> None:
    """A key of printable ASCII, none without a header, or a refusal that names the header."""
    try:
        key = parse_key(headers)
    except MalformedRequestError:
        assert headers
        return

    assert (key is None) == (not headers)
    assert key is None or (1 <= len(key) <= 255 and key.isascii() and key.isprintable())


@settings(max_examples=_COUNT)
@given(
    st.binary(max_size=200),
    st.dictionaries(
        st.sampled_from(["webhook-id", "Webhook-Timestamp", "webhook-signature", "x"]),
        st.one_of(_any_header, st.just("1700000000"), st.just("v1,AAAA")),
    ),
)
def test_webhooks_that_nobody_signed(body: bytes, headers: dict[str, str]) -> None:
    """Refused with one error, whatever is in them."""
    with pytest.raises(SignatureError):
        verify(body, headers, create_secret(), now=1_700_000_000)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 199), st.integers(1, 255))
def test_webhooks_with_a_byte_changed(body: bytes, place: int, change: int) -> None:
    """One bit of the body or of the signature is enough."""
    secret = create_secret()
    moment = 1_700_000_000
    signature = sign([secret], event_id="evt_1", timestamp=moment, body=body)
    headers = {
        "webhook-id": "evt_1",
        "webhook-timestamp": str(moment),
        "webhook-signature": signature,
    }
    changed = bytearray(body or b"x")
    changed[place % len(changed)] ^= change
    with pytest.raises(SignatureError):
        verify(bytes(changed), headers, secret, now=1_700_000_000)


_shapes = st.lists(st.integers(0, 3), max_size=3)
_entries = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        st.none(),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from([*ITEM_BYTES, "F4", ""]),
                "shape": st.lists(st.integers(-1, 2**62), max_size=3),
                "data_offsets": st.lists(st.integers(-1, 2**63), max_size=3),
            }
        ),
        st.recursive(st.integers() | st.text(max_size=3), lambda x: st.lists(x, max_size=2)),
    ),
    max_size=3,
)


@settings(max_examples=_COUNT)
@given(st.one_of(st.binary(max_size=64), _entries), st.integers(-9, 9), st.binary(max_size=16))
@example({"__metadata__": None}, 0, b"")
def test_safetensors_headers(header: Any, off: int, data: bytes) -> None:
    """Whole and consistent, or refused: no tensor lies outside the bytes there are."""
    raw = header if isinstance(header, bytes) else msgspec.json.encode(header)
    file = max(0, len(raw) + off).to_bytes(8, "little") + raw + data
    try:
        entries = parse_header(file, size_bytes=len(file))
    except ValueError:
        return

    for entry in entries:
        assert 8 <= entry.begin <= entry.end <= len(file)


@settings(max_examples=300)
@given(st.dictionaries(st.text(max_size=8), st.tuples(st.sampled_from(list(ITEM_BYTES)), _shapes)))
def test_safetensors_files_of_ours_are_read_back(named: dict[str, tuple[str, list[int]]]) -> None:
    """Names, types, shapes and bytes come back; the file is full of them."""
    named.pop("__metadata__", None)
    tensors = []
    for name, (dtype, shape) in named.items():
        size = ITEM_BYTES[dtype]
        for length in shape:
            size *= length
        tensors.append(Tensor(name, dtype, shape, b"x" * size))
    file = render_safetensors(tensors)

    entries = parse_header(file, size_bytes=len(file))

    assert {entry.name: (entry.dtype, entry.shape) for entry in entries} == named
    assert sum(entry.end - entry.begin for entry in entries) == sum(len(t.data) for t in tensors)


_pieces = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([b"\n", b"\r\n", b"\n\n\n", b"\x1f\x8b", b'{"item":"x"}\n']),
        st.sampled_from([gzip.compress(b'{"item":"x"}\n'), gzip.compress(b"")]),
    ),
    max_size=8,
)


@settings(max_examples=500, deadline=None)
@given(_pieces, st.integers(1, 60))
def test_lines(pieces: list[bytes], most: int) -> None:
    """Numbered without a gap, none longer than the limit; or the whole input is refused."""
    assume(not b"".join(pieces).startswith(b"PAR1"))  # a process each; below, and tests/bulk
    try:
        lines = asyncio.run(_read(pieces, most))
    except (MalformedRequestError, UnsupportedMediaTypeError):
        return

    assert [number for number, _, _ in lines] == list(range(1, len(lines) + 1))
    assert all(raw is None or len(raw) <= most for _, raw, _ in lines)
    assert all(reason for _, raw, reason in lines if raw is None)


@settings(max_examples=300)
@given(st.binary(max_size=40), st.integers(0, 2**32 - 1), st.sampled_from([b"PAR1", b"PAR2", b""]))
def test_parquet_of_noise(data: bytes, length: int, magic: bytes) -> None:
    """Whatever stands before, and however long the footer says it is: refused with a reason.

    In this process, which must keep its memory; tests/bulk/test_parquet.py has real bombs.
    """
    file = io.BytesIO(b"PAR1" + data + length.to_bytes(4, "little") + magic)
    unlimited = resource.RLIM_INFINITY
    with pytest.raises(RefusedError):
        run(file, io.BytesIO(), memory_bytes=unlimited, unpacked_bytes=2**30)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["item", "items", "query", "custom_id", "id", "body", "url", "method"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=_COUNT, deadline=None)
@given(
    st.one_of(st.binary(max_size=60), _json.map(msgspec.json.encode)),
    st.sampled_from([None, "/v1/score", "/v1/rerank", "/v1/classify"]),
    st.sampled_from([{}, {"item": "item"}, {"item": "items", "query": "query", "id": "id"}]),
)
def test_lines_of_bulks(raw: bytes, endpoint: str | None, columns: dict[str, str]) -> None:
    """A request, or why there is none, with the line's number: no line stops the others."""
    parser = LineParser(
        {"m": ModelStatus(name="m", state=ModelState.READY)},
        endpoint=endpoint,
        model="m",
        parameters={},
        columns=columns,
        hidden_states=None,
        limits=Settings(max_items=10),
    )

    line = parser.parse(7, raw)

    asked = line.request is not None or line.family is not None
    assert asked != (line.error is not None)
    assert line.error is None or line.error.line == 7
    assert not isinstance(line.error, ScoreError)


async def _read(pieces: list[bytes], most: int) -> list[tuple[int, bytes | None, str]]:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            if piece:
                yield piece

    return [line async for block in read_lines(stream(), max_line_bytes=most) for line in block]
