"""Tensor bytes as numbers."""

import math
import struct

import pytest

from api.numbers import decode_floats, finite_row, rows_of
from contract.errors import ScoreError

VALUES = [0.0, 1.5, -2.25, 65504.0, 2.0**-14]


@pytest.mark.parametrize(("dtype", "form"), [("F32", "f"), ("F64", "d"), ("F16", "e")])
def test_floats_are_decoded(dtype: str, form: str) -> None:
    """Every floating dtype gives back the numbers that went in."""
    data = struct.pack(f"<{len(VALUES)}{form}", *VALUES)

    assert decode_floats(data, dtype) == VALUES


def test_bf16_is_the_upper_half_of_f32() -> None:
    """A bf16 number widens to the float32 with the same upper two bytes."""
    numbers = [1.0, -0.5, 3.140625, 2.0**100]
    data = b"".join(struct.pack("<f", number)[2:] for number in numbers)

    assert decode_floats(data, "BF16") == numbers


def test_other_dtypes_are_refused() -> None:
    """Integers are no scores."""
    with pytest.raises(ScoreError):
        decode_floats(b"\0" * 8, "I64")


def test_rows_and_finiteness() -> None:
    """Rows have the width asked for; a row with NaN or infinity becomes null."""
    assert rows_of([1.0, 2.0, 3.0, 4.0], 2) == [[1.0, 2.0], [3.0, 4.0]]
    assert finite_row([1.0, 2.0]) == [1.0, 2.0]
    assert finite_row([1.0, math.nan]) is None
    assert finite_row([math.inf]) is None
