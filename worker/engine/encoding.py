"""Many jobs' tensors in one safetensors file, and where in it each of them lies.

The only place that writes results as bytes. Any safetensors reader opens the file; tensors are
named ``{job id}/{tensor}``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from safetensors import TensorSpec, serialize

from worker.engine.seam import Floats, JobScores

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EncodedBatch", "EncodedTensor", "encode"]

#: the file's first bytes: the header's length, little-endian
_LENGTH_BYTES = 8


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
    kept = {
        f"{job}/{name}": _make_contiguous(tensor)
        for job, result in scores.items()
        for name, tensor in result.tensors.items()
    }
    # the library reads the memory by address: ``kept`` holds it until it is done
    data = serialize({name: _describe(tensor) for name, tensor in kept.items()}, {"format": "pt"})
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = json.loads(data[_LENGTH_BYTES:begin])
    found: dict[str, list[EncodedTensor]] = {job: [] for job in scores}
    for job, result in scores.items():
        for name in result.tensors:
            entry = header[f"{job}/{name}"]
            low, high = entry["data_offsets"]
            found[job].append(
                EncodedTensor(
                    name, entry["dtype"], tuple(entry["shape"]), begin + low, begin + high
                )
            )
    return EncodedBatch(data, found)


def _make_contiguous(tensor: "Floats | Tensor") -> "Floats | Tensor":
    return np.ascontiguousarray(tensor) if isinstance(tensor, np.ndarray) else tensor.contiguous()


def _describe(tensor: "Floats | Tensor") -> TensorSpec:
    return TensorSpec(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        data_ptr=tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr(),
        data_len=tensor.nbytes,
    )
