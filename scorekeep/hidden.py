"""Hidden states of a bulk on disk: a folder of safetensors files, read lazily, memory-mapped.

A million rows open in milliseconds; only what is touched is read.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from contract.errors import ScoreError
from scorekeep.tensors import Framework

if TYPE_CHECKING:
    import numpy as np

__all__ = ["INDEX_FILE", "HiddenStates", "Index", "Shard"]

INDEX_FILE = "hidden_states.index.json"
_NUMPY_NAMES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class Shard(msgspec.Struct, frozen=True):
    """One file of the set."""

    file: str
    rows: int


class Metadata(msgspec.Struct, frozen=True):
    """What all rows have in common."""

    bulk: str
    rows: int
    hidden: int
    dtype: str
    rows_per_shard: int
    total_size: int


class Index(msgspec.Struct, frozen=True):
    """``hidden_states.index.json``."""

    metadata: Metadata
    tensor: str
    ids: str
    shards: list[Shard]


class HiddenStates:
    """Rows by number: ``states[5]``, ``states[10:20]``, ``for row in states``, ``len(states)``.

    ``numpy`` gives arrays, bfloat16 widened to float32; ``torch`` tensors in the model's dtype.
    Rows of items without a score are NaN. A row is a copy: it outlives ``close``.
    """

    def __init__(self, folder: str | Path, *, framework: Framework = "numpy") -> None:
        self._folder = Path(folder)
        self._framework = framework
        try:
            self.index = msgspec.json.decode((self._folder / INDEX_FILE).read_bytes(), type=Index)
        except (OSError, msgspec.MsgspecError) as error:
            message = f"{folder} is no set of hidden states: {error}"
            raise ScoreError(message) from error
        self._open: dict[int, tuple[mmap.mmap, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files."""
        for mapped, _ in self._open.values():
            mapped.close()
        self._open.clear()

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""
        return self.index.metadata.rows, self.index.metadata.hidden

    def __len__(self) -> int:
        return self.index.metadata.rows

    def __getitem__(self, rows: int | slice) -> Any:  # noqa: ANN401  # an array or a tensor, as asked
        if isinstance(rows, int):
            number = rows + len(self) if rows < 0 else rows
            if not 0 <= number < len(self):
                message = f"there is no row {rows}, there are {len(self)}"
                raise IndexError(message)
            return self._make(self._read(number, number + 1)).reshape(-1)
        start, stop, step = rows.indices(len(self))
        if step != 1:
            message = "rows are read in steps of one"
            raise ValueError(message)
        return self._make(self._read(start, max(start, stop)))

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def ids(self) -> Iterator[tuple[str, int]]:
        """Yield custom id and item of each row, in order."""
        with (self._folder / self.index.ids).open("rb") as file:
            for line in file:
                row = msgspec.json.decode(line, type=_Id)
                yield row.custom_id, row.item

    def _read(self, start: int, stop: int) -> bytes:
        """Return the bytes of rows, from as many shards as they lie in."""
        size = self.index.metadata.total_size // max(1, len(self))
        per_shard = self.index.metadata.rows_per_shard
        parts: list[bytes] = []
        while start < stop:
            shard, offset = divmod(start, per_shard)
            count = min(stop - start, per_shard - offset)
            mapped, begin = self._map(shard)
            parts.append(mapped[begin + offset * size : begin + (offset + count) * size])
            start += count
        return b"".join(parts)

    def _map(self, shard: int) -> tuple[mmap.mmap, int]:
        if shard not in self._open:
            path = self._folder / self.index.shards[shard].file
            try:
                with path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                message = f"{path} cannot be read: {error}"
                raise ScoreError(message) from error
            header = int.from_bytes(mapped[:8], "little")
            table = msgspec.json.decode(mapped[8 : 8 + header])
            begin = 8 + header + table[self.index.tensor]["data_offsets"][0]
            self._open[shard] = (mapped, begin)
        return self._open[shard]

    def _make(self, data: bytes) -> Any:  # noqa: ANN401  # an array or a tensor, as asked
        shape = (-1, self.index.metadata.hidden)
        if self._framework == "torch":
            return _make_tensor(data, self.index.metadata.dtype).reshape(shape)
        return _make_array(data, self.index.metadata.dtype).reshape(shape)


class _Id(msgspec.Struct):
    custom_id: str
    item: int


def _make_array(data: bytes, dtype: str) -> "np.ndarray[Any, Any]":
    import numpy as np  # noqa: PLC0415  # an optional dependency

    raw = np.frombuffer(data, _NUMPY_NAMES[dtype])
    if dtype == "BF16":  # numpy has none: its bits are the upper half of a float32
        return (raw.astype("<u4") << 16).view("<f4")
    return raw.copy()


def _make_tensor(data: bytes, dtype: str) -> Any:  # noqa: ANN401  # torch.Tensor
    """Through safetensors, which knows torch's dtypes: the client itself never imports torch."""
    from safetensors.torch import load  # noqa: PLC0415  # imports torch

    table = {"row": {"dtype": dtype, "shape": [-1], "data_offsets": [0, len(data)]}}
    width = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}[dtype]
    table["row"]["shape"] = [len(data) // width]
    header = msgspec.json.encode(table)
    return load(len(header).to_bytes(8, "little") + header + data)["row"]
