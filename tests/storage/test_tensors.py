"""Our safetensors files are the library's safetensors files."""

import pytest
from safetensors import deserialize

from storage.refs import TensorRef, decode_tensors, encode_tensors
from storage.tensors import Tensor, parse_header, render_safetensors

TENSORS = [
    Tensor("job_1/half", "BF16", [3], b"\x01\x02" * 3),
    Tensor("job_1/scores", "F32", [2, 2], bytes(range(16))),
    Tensor("job_2/none", "F32", [0, 4], b""),
    Tensor("job_2/wide", "I64", [], bytes(8)),
]


def test_the_library_reads_what_we_write() -> None:
    """Names, types, shapes and bytes, from a buffer that starts aligned."""
    data = render_safetensors(TENSORS, {"made_by": "test"})

    read = dict(deserialize(data))  # type: ignore[no-untyped-call]
    assert set(read) == {tensor.name for tensor in TENSORS}
    for tensor in TENSORS:
        entry = read[tensor.name]
        assert (entry["dtype"], entry["shape"]) == (tensor.dtype, list(tensor.shape))
        assert bytes(entry["data"]) == tensor.data


def test_the_header_says_where_the_bytes_are() -> None:
    """Absolute ranges, aligned to the type, whatever follows the header."""
    data = render_safetensors([(*tensor,) for tensor in TENSORS])
    by_name = {tensor.name: tensor for tensor in TENSORS}

    entries = parse_header(data[: len(data) - 30])

    assert next(entry.name for entry in entries) == "job_2/wide"
    for entry in entries:
        assert data[entry.begin : entry.end] == by_name[entry.name].data
        assert (entry.dtype, entry.shape) == by_name[entry.name][1:3]
    assert all(entry.begin % 8 == 0 for entry in entries if entry.dtype == "I64")


@pytest.mark.parametrize(
    "tensors",
    [[("a", "F32", [2], b"1234")], [("a", "U8", [1], b"1"), ("a", "U8", [1], b"2")]],
)
def test_what_cannot_be_a_file_is_refused(
    tensors: list[tuple[str, str, list[int], bytes]],
) -> None:
    """Bytes that do not fit the shape, and two tensors of one name."""
    with pytest.raises(ValueError, match="a"):
        render_safetensors(tensors)


@pytest.mark.parametrize(
    "data", [b"", b"\x05", (2**40).to_bytes(8, "little"), b"\x02" + bytes(7) + b"[]", b"\x09"]
)
def test_what_is_no_header_is_refused(data: bytes) -> None:
    """Too short, too long, or not the JSON of a header."""
    with pytest.raises(ValueError, match="header"):
        parse_header(data)


def test_a_header_without_its_fields_is_refused() -> None:
    """Every tensor needs a type, a shape and two offsets."""
    raw = b'{"a":{"dtype":"F32"}}'
    with pytest.raises(ValueError, match="header"):
        parse_header(len(raw).to_bytes(8, "little") + raw)


def test_references_survive_the_row() -> None:
    """And no tensors are no document."""
    refs = [TensorRef("scores", "F32", [2, 1], 8, 16)]

    assert decode_tensors(encode_tensors(refs)) == refs
    assert encode_tensors([]) is None
    assert decode_tensors(None) == []
