"""Tensor bytes made into Python numbers without numpy: little-endian, as safetensors keeps them."""

import array
import math
import struct
import sys
from collections.abc import Sequence

from contract.errors import ScoreError

__all__ = ["decode_floats", "finite_row", "rows_of"]


def decode_floats(data: bytes, dtype: str) -> list[float]:
    """Return the numbers in ``data`` of a floating ``dtype`` (F64, F32, F16, BF16)."""
    if dtype == "F16":
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    if dtype == "BF16":
        widened = bytearray(2 * len(data))
        widened[2::4], widened[3::4] = data[0::2], data[1::2]
        data, dtype = bytes(widened), "F32"
    if dtype not in {"F32", "F64"}:
        message = f"tensors of dtype {dtype} have no numbers to show"
        raise ScoreError(message)
    values = array.array("f" if dtype == "F32" else "d", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def rows_of(values: Sequence[float], width: int) -> list[list[float]]:
    """Cut ``values`` into rows of ``width``."""
    return [list(values[begin : begin + width]) for begin in range(0, len(values), width)]


def finite_row(row: Sequence[float]) -> list[float] | None:
    """Return the row, or None where a number in it is not finite: JSON has no NaN."""
    return list(row) if all(map(math.isfinite, row)) else None
