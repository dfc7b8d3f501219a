"""Which bytes of which blob are whose.

The structures only; ``storage.forgetting`` rewrites and drops blobs by them.
"""

from dataclasses import dataclass

import msgspec

__all__ = ["BlobRef", "TensorRef", "decode_tensors", "encode_tensors"]


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a job: ``begin`` up to ``end`` are bytes of the blob, counted from its start.

    ``dtype`` is safetensors' own name: ``F32``, ``BF16``. ``name`` is without the job's prefix.
    """

    name: str
    dtype: str
    shape: list[int]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class BlobRef:
    """The blob that still holds bytes of a job that is gone."""

    job_id: str
    key: str


_decoder = msgspec.json.Decoder(list[TensorRef])


def encode_tensors(tensors: list[TensorRef]) -> str | None:
    """Render for the job row; none for no tensors."""
    return msgspec.json.encode(tensors).decode() if tensors else None


def decode_tensors(raw: str | None) -> list[TensorRef]:
    """Read what ``encode_tensors`` wrote."""
    return _decoder.decode(raw) if raw else []
