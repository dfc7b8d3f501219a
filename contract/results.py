"""What a worker records of a job's result beside its tensors: the only place for that format."""

import msgspec

from contract.scores import ItemError, TokenCounts

__all__ = ["StoredResult"]


class StoredResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON in a job row's ``result``.

    Row ``i`` of the tensor ``scores`` counts ``label_counts[i]`` columns, and none where ``errors``
    names the item.
    """

    labels: list[str | int | list[int]] = []
    label_counts: list[int] = []
    tokens: list[TokenCounts] = []
    warnings: list[str] = []
    errors: list[ItemError] = []
