"""A request whose items have queries of their own: prepared query by query, put together again.

Nothing here loads torch.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import msgspec

from contract.scores import ScoreRequest
from worker.engine.seam import Budget, PreparedItem, PreparedJob

__all__ = ["prepare_each_query"]


def prepare_each_query(
    request: ScoreRequest,
    prepare: Callable[[ScoreRequest], PreparedJob],
    *,
    within_s: float = math.inf,
) -> PreparedJob:
    """Return ``request`` prepared; ``prepare`` does it for the items of one query at a time.

    Items with equal queries share their prefix as they would in a request of their own.
    """
    budget = Budget(within_s)
    places: dict[str, list[int]] = {}
    for index, query in enumerate(request.queries or []):
        places.setdefault(query, []).append(index)
    items: dict[int, PreparedItem] = {}
    parts: list[PreparedJob] = []
    for query, indexes in places.items():
        budget.check()
        parts.append(prepare(_with_query(request, query, indexes)))
        for index, item in zip(indexes, parts[-1].items, strict=True):
            items[index] = _move(item, index)
    first = parts[0] if parts else prepare(_with_query(request, "", []))
    ids = request.label_token_ids or []
    nested = any(isinstance(entry, list) for entry in ids)
    return PreparedJob(
        request=first.request,
        items=[items[index] for index in range(len(items))],
        warnings=list(dict.fromkeys(each for part in parts for each in part.warnings)),
        labels=[*ids] if nested else first.labels,
    )


def _with_query(request: ScoreRequest, query: str, indexes: list[int]) -> ScoreRequest:
    return msgspec.structs.replace(request.take(indexes), query=query, queries=None)


def _move(item: PreparedItem, index: int) -> PreparedItem:
    error = item.error
    if error is not None:
        error = msgspec.structs.replace(error, index=index)
    return replace(item, index=index, error=error)
