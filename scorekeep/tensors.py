"""Safetensors bytes into arrays: numpy, or torch for those who ask for it.

The client depends on neither; each is imported when its arrays are asked for.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError, deserialize

from contract.errors import ScoreError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Framework", "parse_tensor"]

#: ``numpy`` widens bfloat16 to float32, which is exact; ``torch`` keeps the model's dtype.
Framework = Literal["numpy", "torch"]

_NUMPY_NAMES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}


def parse_tensor(data: bytes, name: str, framework: Framework = "numpy") -> Any:  # noqa: ANN401  # an array or a tensor, as asked
    """Return the tensor ``name`` of the safetensors file ``data``.

    Raises ``ScoreError`` where the file is damaged or lacks it.
    """
    try:
        found = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        message = f"the file is not safetensors: {error}"
        raise ScoreError(message) from error
    if name not in found:
        message = f"the file has no tensor {name!r}, only {sorted(found)}"
        raise ScoreError(message)
    readers: dict[str, Callable[[bytes, str, dict[str, Any]], Any]] = {
        "numpy": _read_numpy,
        "torch": _read_torch,
    }
    return readers[framework](data, name, found[name])


def _read_numpy(_data: bytes, _name: str, tensor: dict[str, Any]) -> "np.ndarray[Any, Any]":
    try:
        import numpy as np  # noqa: PLC0415  # an optional dependency
    except ModuleNotFoundError as error:
        message = "arrays need numpy: pip install numpy; hidden_states_file gives the plain bytes"
        raise ScoreError(message) from error

    raw, shape = bytes(tensor["data"]), tensor["shape"]
    if tensor["dtype"] == "BF16":  # numpy has none: its bits are the upper half of a float32
        upper = np.frombuffer(raw, dtype="<u2").astype("<u4") << 16
        return upper.view("<f4").reshape(shape)
    return np.frombuffer(raw, dtype=_NUMPY_NAMES[tensor["dtype"]]).reshape(shape).copy()


def _read_torch(data: bytes, name: str, _tensor: dict[str, Any]) -> Any:  # noqa: ANN401  # torch.Tensor
    from safetensors.torch import load  # noqa: PLC0415  # imports torch

    return load(data)[name]
