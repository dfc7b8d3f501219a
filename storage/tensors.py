"""safetensors files without torch: written from bytes, and their header read.

The format: eight bytes with the header's length, a JSON header, the tensors' bytes. The library's
own ``serialize`` wants raw pointers since 0.8; the tests hold these files against the library.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

__all__ = ["ITEM_BYTES", "Tensor", "TensorEntry", "parse_header", "render_safetensors"]

_MAX_HEADER_BYTES = 100_000_000
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]

#: Bytes per element, by safetensors' name of the type.
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


class Tensor(NamedTuple):
    """A tensor as bytes, little-endian and contiguous."""

    name: str
    dtype: str
    shape: Sequence[int]
    data: bytes | memoryview


class TensorEntry(NamedTuple):
    """A tensor in a file: ``begin`` up to ``end`` are counted from the start of the file."""

    name: str
    dtype: str
    shape: list[int]
    begin: int
    end: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0, le=2**62)]]
    data_offsets: tuple[_Offset, _Offset]


def render_safetensors(
    tensors: Sequence[tuple[str, str, Sequence[int], bytes | memoryview]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Return one file with ``tensors`` (plain tuples will do), the widest types first: aligned.

    Raises ``ValueError`` where shape and bytes disagree, or two tensors have one name.
    """
    ordered = sorted(
        map(Tensor._make, tensors), key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name)
    )
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for tensor in ordered:
        size = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if size != len(tensor.data):
            message = f"{tensor.name}: {len(tensor.data)} bytes for a shape of {size}"
            raise ValueError(message)
        if tensor.name in header:
            message = f"two tensors are called {tensor.name}"
            raise ValueError(message)
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    raw = msgspec.json.encode(header)
    raw += b" " * (-len(raw) % 8)
    return b"".join([len(raw).to_bytes(8, "little"), raw, *(tensor.data for tensor in ordered)])


def parse_header(data: bytes, *, size_bytes: int | None = None) -> list[TensorEntry]:
    """Return the tensors of a file that starts with ``data``, in the order of their bytes.

    ``data`` must hold at least the header; ``size_bytes``, where known, is how long the file is.
    Raises ``ValueError`` for a header that is not whole, or that names types, shapes and places
    which do not agree: nothing is read by it then.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > _MAX_HEADER_BYTES or len(data) < 8 + length:
        message = "the data does not hold a whole safetensors header"
        raise ValueError(message)
    try:
        raw = msgspec.json.decode(data[8 : 8 + length], type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        header = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = "the data does not start with a safetensors header"
        raise ValueError(message) from error
    entries = [
        TensorEntry(name, entry.dtype, entry.shape, *(8 + length + at for at in entry.data_offsets))
        for name, entry in header.items()
    ]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_places(entries, 8 + length, size_bytes)
    return entries


def _check_places(entries: Sequence[TensorEntry], begin: int, size_bytes: int | None) -> None:
    """Each tensor as long as its shape, one right after the other, to the end of the file."""
    for entry in entries:
        if entry.dtype not in ITEM_BYTES:
            message = f"{entry.name[:100]!r} has the type {entry.dtype[:20]!r}, which is not known"
            raise ValueError(message)
        if (
            entry.begin != begin
            or entry.end - begin != math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        ):
            message = f"{entry.name[:100]!r} does not lie where its header says"
            raise ValueError(message)
        begin = entry.end
    if size_bytes is not None and begin != size_bytes:
        message = f"the header describes {begin} bytes, the file has {size_bytes}"
        raise ValueError(message)
