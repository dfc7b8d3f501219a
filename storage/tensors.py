"""safetensors files without torch: written from bytes, and their header read.

The format: eight bytes with the header's length, a JSON header, the tensors' bytes. The library's
own ``serialize`` wants raw pointers since 0.8; the tests hold these files against the library.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

__all__ = ["ITEM_BYTES", "Tensor", "TensorEntry", "parse_header", "render_safetensors"]

_MAX_HEADER_BYTES = 100_000_000

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


def parse_header(data: bytes) -> list[TensorEntry]:
    """Return the tensors of a file that starts with ``data``, in the order of their bytes.

    ``data`` must hold at least the header. Raises ``ValueError`` where it does not.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > _MAX_HEADER_BYTES or len(data) < 8 + length:
        message = "the data does not hold a whole safetensors header"
        raise ValueError(message)
    try:
        header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, dict[str, Any]])
        entries = [
            TensorEntry(
                name,
                entry["dtype"],
                entry["shape"],
                8 + length + entry["data_offsets"][0],
                8 + length + entry["data_offsets"][1],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        message = "the data does not start with a safetensors header"
        raise ValueError(message) from error
    return sorted(entries, key=lambda entry: entry.begin)
