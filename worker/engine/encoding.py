"""Many jobs' tensors in one safetensors file, and where in it each of them lies.

The only place that writes results as bytes. Any safetensors reader opens the file; tensors are
named ``{job id}/{tensor}``. Written here and not by the library, which reads memory by address:
asking numpy for one costs more than copying a row, and a batch has hundreds of rows. Importing
this module does not load torch.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from worker.engine.seam import Floats, JobScores

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EncodedBatch", "EncodedTensor", "encode"]

#: the file's first bytes: the header's length, little-endian
_LENGTH_BYTES = 8
_ALIGNMENT = 8
#: safetensors' word and the bytes of an element, by numpy's and torch's names
_WORDS = {
    "<f8": ("F64", 8),
    "<i8": ("I64", 8),
    "<f4": ("F32", 4),
    "<i4": ("I32", 4),
    "<f2": ("F16", 2),
    "|u1": ("U8", 1),
    "|b1": ("BOOL", 1),
    "torch.float64": ("F64", 8),
    "torch.int64": ("I64", 8),
    "torch.float32": ("F32", 4),
    "torch.int32": ("I32", 4),
    "torch.float16": ("F16", 2),
    "torch.bfloat16": ("BF16", 2),
    "torch.uint8": ("U8", 1),
    "torch.bool": ("BOOL", 1),
}


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """One tensor: its bytes are ``data[begin:end]``; ``dtype`` in safetensors' words (``BF16``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A safetensors file, and each job's tensors in it."""

    data: bytes
    tensors: dict[str, list[EncodedTensor]]


def encode(scores: Mapping[str, JobScores]) -> EncodedBatch:
    """Write the tensors of ``scores``, by job id, as one file."""
    entries = [
        (job, name, _WORDS[_name_dtype(tensor)], tensor)
        for job, result in scores.items()
        for name, tensor in result.tensors.items()
    ]
    entries.sort(key=lambda entry: -entry[2][1])  # wide elements first keep all aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks: list[bytes] = []
    end = 0
    for job, name, (word, _), tensor in entries:
        chunk = _copy_bytes(tensor)
        begin, end = end, end + len(chunk)
        chunks.append(chunk)
        header[f"{job}/{name}"] = {
            "dtype": word,
            "shape": tuple(tensor.shape),
            "data_offsets": (begin, end),
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    start = _LENGTH_BYTES + len(text)
    found: dict[str, list[EncodedTensor]] = {job: [] for job in scores}
    for job, name, (word, _), tensor in entries:
        low, high = header[f"{job}/{name}"]["data_offsets"]
        found[job].append(EncodedTensor(name, word, tuple(tensor.shape), start + low, start + high))
    return EncodedBatch(b"".join([len(text).to_bytes(8, "little"), text, *chunks]), found)


def _name_dtype(tensor: "Floats | Tensor") -> str:
    return tensor.dtype.str if isinstance(tensor, np.ndarray) else str(tensor.dtype)


def _copy_bytes(tensor: "Floats | Tensor") -> bytes:
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    held = tensor.contiguous()  # numpy has no bfloat16: read it by address
    return ctypes.string_at(held.data_ptr(), held.nbytes)
