"""A job's recorded tensors, read from its blob and made into rows."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

from api.numbers import decode_floats, finite_row, rows_of
from api.rendering import (
    HIDDEN_STATES,
    find_tensor,
    parse_result,
    recorded_error,
    recorded_usage,
)
from api.state import BLOBS, DATABASE
from contract.errors import (
    ConflictError,
    GoneError,
    NotFoundError,
    ResultNotReadyError,
    TooLargeError,
)
from contract.jobs import TERMINAL, JobState
from contract.results import StoredResult
from contract.scores import Scores, Usage
from storage import jobs
from storage.jobs import JobRow
from storage.refs import TensorRef
from storage.tensors import ITEM_BYTES

__all__ = [
    "MAX_JSON_BYTES",
    "check_has_result",
    "check_json_size",
    "failed_items",
    "read_hidden_rows",
    "read_scores",
    "read_tensor",
    "require_hidden_states",
    "row_bytes",
    "with_fresh_row",
]

_T = TypeVar("_T")
#: The largest tensor that is shown as JSON.
MAX_JSON_BYTES = 64 * 1024 * 1024
_ATTEMPTS = 3


async def with_fresh_row(
    request: web.Request, row: JobRow, read: Callable[[JobRow], Awaitable[_T]]
) -> _T:
    """Return what ``read`` returns; a blob that is gone is looked for again in a fresh row.

    Deleting a neighbour rewrites the blob that both lie in, under another name.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return await read(row)
        except NotFoundError:
            async with request.app[DATABASE].snapshot() as tx:
                row = await jobs.get_job(tx, row.tenant, row.id)
    try:
        return await read(row)
    except NotFoundError as error:
        message = f"the bytes of job {row.id} are gone from the blob store"
        raise GoneError(message) from error


def check_has_result(row: JobRow) -> None:
    """Raise ``ResultNotReadyError`` or ``ConflictError`` for a job without a result."""
    if row.state not in TERMINAL:
        message = f"job {row.id} is {row.state.value}; it has no result yet"
        raise ResultNotReadyError(message, retry_after_s=1)
    if row.state not in {JobState.SUCCEEDED, JobState.PARTIAL}:
        problem = recorded_error(row)
        because = "" if problem is None else f": {problem.code}, {problem.message}"
        message = f"job {row.id} is {row.state.value}; it has no scores{because}"
        raise ConflictError(message)


def require_hidden_states(row: JobRow) -> TensorRef:
    """Return the hidden states' place. Raises also where the job did not ask for them."""
    check_has_result(row)
    tensor = find_tensor(row, HIDDEN_STATES)
    if tensor is None:
        message = (
            f"job {row.id} has no hidden states: it was submitted without "
            "return_pooled_hidden_states, or without items"
        )
        raise NotFoundError(message)
    return tensor


def failed_items(result: StoredResult) -> set[int]:
    """Return the items without scores."""
    return {error.index for error in result.errors}


async def read_tensor(request: web.Request, row: JobRow, name: str) -> bytes | None:
    """Return the bytes of one of the job's tensors, or None where it has none of that name."""
    tensor = find_tensor(row, name)
    if tensor is None or row.blob_key is None:
        return None
    return await request.app[BLOBS].get_range(row.blob_key, tensor.begin, tensor.end)


async def read_scores(request: web.Request, row: JobRow) -> Scores:
    """Return the job's scores as JSON shows them: null where an item failed."""
    check_has_result(row)
    for tensor in row.tensors:
        if tensor.name != HIDDEN_STATES:
            check_json_size(tensor)
    return await with_fresh_row(request, row, lambda fresh: _read_scores(request, fresh))


async def read_hidden_rows(request: web.Request, row: JobRow) -> list[list[float] | None]:
    """Return the hidden states as numbers. Raises ``TooLargeError`` where JSON is no way to."""
    tensor = require_hidden_states(row)
    check_json_size(tensor)
    failed = failed_items(parse_result(row))

    async def read(fresh: JobRow) -> list[list[float] | None]:
        data = await read_tensor(request, fresh, HIDDEN_STATES) or b""
        return await asyncio.to_thread(render, data)

    def render(data: bytes) -> list[list[float] | None]:
        rows = rows_of(decode_floats(data, tensor.dtype), tensor.shape[-1])
        return [None if index in failed else finite_row(one) for index, one in enumerate(rows)]

    return await with_fresh_row(request, row, read)


def check_json_size(tensor: TensorRef) -> None:
    """Raise ``TooLargeError`` for a tensor that should be fetched as safetensors."""
    if tensor.end - tensor.begin > MAX_JSON_BYTES:
        message = (
            f"the {tensor.name} have {tensor.end - tensor.begin} bytes, JSON carries up to "
            f"{MAX_JSON_BYTES}; fetch them as safetensors, without encoding_format"
        )
        hidden = tensor.name == HIDDEN_STATES
        raise TooLargeError(message, param="encoding_format" if hidden else None)


def row_bytes(tensor: TensorRef) -> int:
    """Return the bytes of one item's row."""
    return int(tensor.shape[-1]) * ITEM_BYTES[tensor.dtype]


async def _read_scores(request: web.Request, row: JobRow) -> Scores:
    result = parse_result(row)
    rows = await _read_ragged(request, row, "scores", result)
    mass = await read_tensor(request, row, "label_mass")
    return Scores(
        job=row.id,
        model=row.model,
        labels=result.labels,
        scores=rows or [],
        label_mass=None if mass is None else _column(decode_floats(mass, "F32"), result),
        token_logprobs=await _read_ragged(request, row, "token_logprobs", result),
        tokens=result.tokens,
        errors=result.errors,
        usage=recorded_usage(row) or Usage(),
        warnings=result.warnings,
    )


async def _read_ragged(
    request: web.Request, row: JobRow, name: str, result: StoredResult
) -> list[list[float] | None] | None:
    """Return a tensor's rows, each cut to its item's number of labels."""
    tensor = find_tensor(row, name)
    data = await read_tensor(request, row, name)
    if tensor is None or data is None:
        return None
    return await asyncio.to_thread(_cut_rows, tensor, data, result)


def _cut_rows(tensor: TensorRef, data: bytes, result: StoredResult) -> list[list[float] | None]:
    failed = failed_items(result)
    rows = rows_of(decode_floats(data, tensor.dtype), max(1, tensor.shape[-1]))
    counts = result.label_counts or [tensor.shape[-1]] * len(rows)
    return [
        None if index in failed else finite_row(one[:count])
        for index, (one, count) in enumerate(zip(rows, counts, strict=True))
    ]


def _column(values: list[float], result: StoredResult) -> list[float | None]:
    failed = failed_items(result)
    return [
        None if index in failed or finite_row([value]) is None else value
        for index, value in enumerate(values)
    ]
