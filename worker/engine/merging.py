"""Scores of an earlier generation, kept beside those of a retry: the only place that joins them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from contract.results import StoredResult
from contract.scores import ItemError, TokenCounts, Usage
from worker.engine.seam import Floats, JobScores

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EarlierScores", "EarlierTensor", "fits", "keep_all", "merge"]

_NUMPY = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}


@dataclass(frozen=True, slots=True)
class EarlierTensor:
    """One tensor as it was stored: safetensors' dtype, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class EarlierScores:
    """What an earlier generation left: items that its errors do not name have their scores."""

    result: StoredResult
    usage: Usage
    tensors: Mapping[str, EarlierTensor]

    @property
    def kept(self) -> list[int]:
        """The items that are not scored again."""
        failed = {error.index for error in self.result.errors}
        return [index for index in range(len(self.result.label_counts)) if index not in failed]


def fits(blank: JobScores, earlier: EarlierScores) -> bool:
    """Tell whether the model still yields rows of the earlier form; ``blank`` has no score."""
    return list(blank.label_counts) == list(earlier.result.label_counts) and all(
        tuple(tensor.shape) == earlier.tensors[name].shape
        for name, tensor in blank.tensors.items()
        if name in earlier.tensors
    )


def merge(fresh: JobScores, earlier: EarlierScores) -> JobScores:
    """Return ``fresh`` with the rows that ``earlier`` has, and the usage of both."""
    kept = earlier.kept
    tensors: dict[str, Any] = dict(fresh.tensors)
    for name, stored in earlier.tensors.items():
        before = _load(stored)
        if name in tensors:
            tensors[name][kept] = before[kept]
        else:  # nothing new has one: the old rows of failed items are NaN
            tensors[name] = before
    tokens = list(fresh.tokens)
    for index in kept:
        tokens[index] = earlier.result.tokens[index]
    return replace(
        fresh,
        tensors=tensors,
        errors=[error for error in fresh.errors if error.index not in set(kept)],
        tokens=tokens,
        usage=_add_usage(tokens, fresh.usage.computed_tokens + earlier.usage.computed_tokens),
        receipt=fresh.receipt | _count_cut(fresh, tokens) | {"kept_items": len(kept)},
        warnings=list(dict.fromkeys([*earlier.result.warnings, *fresh.warnings])),
    )


def keep_all(earlier: EarlierScores, code: str, message: str) -> JobScores:
    """Return what ``earlier`` has, where the retry as a whole failed with that error."""
    result = earlier.result
    return JobScores(
        tensors={name: _load(stored) for name, stored in earlier.tensors.items()},
        labels=result.labels,
        label_counts=result.label_counts,
        errors=[ItemError(error.index, code, message) for error in result.errors],
        tokens=result.tokens,
        usage=earlier.usage,
        receipt={"kept_items": len(earlier.kept)},
        warnings=result.warnings,
    )


def _count_cut(fresh: JobScores, tokens: list[TokenCounts]) -> dict[str, int]:
    """Return the receipt's own count of truncated items, where it has one, over all of them."""
    if "truncated_items" not in fresh.receipt:
        return {}
    return {"truncated_items": sum(count.cut > 0 for count in tokens)}


def _add_usage(tokens: list[TokenCounts], computed: int) -> Usage:
    prompt = sum(count.used for count in tokens)
    return msgspec.structs.replace(
        Usage(), prompt_tokens=prompt, total_tokens=prompt, computed_tokens=computed
    )


def _load(stored: EarlierTensor) -> "Floats | Tensor":
    if stored.dtype in _NUMPY:
        array: Any = np.frombuffer(bytearray(stored.data), _NUMPY[stored.dtype])
        return array.reshape(stored.shape)  # type: ignore[no-any-return]
    import torch  # noqa: PLC0415  # numpy has no bfloat16; whoever has these rows has torch

    kinds = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
    return torch.frombuffer(bytearray(stored.data), dtype=kinds[stored.dtype]).reshape(stored.shape)
