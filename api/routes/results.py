"""Results: scores and pooled hidden states, as JSON or as safetensors files."""

import base64
import re

from aiohttp import web

from api.bodies import json_response
from api.job_access import find_job
from api.negotiation import JSON, SAFETENSORS, choose_type
from api.numbers import decode_floats, finite_row
from api.rendering import HIDDEN_STATES, parse_result
from api.results import (
    check_has_result,
    check_json_size,
    failed_items,
    read_hidden_rows,
    read_scores,
    read_tensor,
    require_hidden_states,
    row_bytes,
    with_fresh_row,
)
from api.state import BLOBS, DATABASE, DIGESTS
from api.tensor_files import Place, TensorFile, render_header, serve_file
from contract.errors import InvalidRequestError, NotFoundError
from contract.shapes import HiddenStates
from storage import jobs
from storage.jobs import JobRow
from storage.refs import TensorRef
from storage.tensors import Tensor, render_safetensors

__all__ = ["add_routes"]

_INDEX = re.compile(r"[0-9]{1,9}")


def add_routes(app: web.Application) -> None:
    """Add the routes of results to the application."""
    app.router.add_get("/v1/jobs/{id}/scores", get_scores)
    app.router.add_get("/v1/jobs/{id}/hidden_states", get_hidden_states)
    app.router.add_get("/v1/jobs/{id}/items/{index}/hidden_state", get_hidden_state)


async def get_scores(request: web.Request) -> web.StreamResponse:
    """Show the scores as JSON, or send every small tensor of the job as safetensors."""
    kind = choose_type(request.headers.get("Accept"), (JSON, SAFETENSORS))
    row = await find_job(request)
    if kind == JSON:
        return json_response(await read_scores(request, row), headers={"Vary": "Accept"})
    check_has_result(row)
    body = await with_fresh_row(request, row, lambda fresh: _pack_scores(request, fresh))
    headers = {
        "Vary": "Accept",
        "Content-Disposition": f'attachment; filename="{row.id}.scores.safetensors"',
    }
    return web.Response(body=body, content_type=SAFETENSORS, headers=headers)


async def get_hidden_states(request: web.Request) -> web.StreamResponse:
    """Send the hidden states of all items, in the model's dtype."""
    form = _parse_encoding(request)
    row = await find_job(request)
    tensor = require_hidden_states(row)
    if form is not None:
        return await _show_rows(request, row, tensor, form)
    _choose_file(request)
    return await _send(request, row, index=None)


async def get_hidden_state(request: web.Request) -> web.StreamResponse:
    """Send the hidden state of one item."""
    form = _parse_encoding(request)
    row = await find_job(request)
    tensor = require_hidden_states(row)
    index = _parse_index(request, row)
    if form is None:
        _choose_file(request)
        return await _send(request, row, index=index)
    data = await with_fresh_row(request, row, lambda fresh: _read_row(request, fresh, index))
    return _show(row, tensor, form, shape=[tensor.shape[-1]], rows=[_encode(data, tensor, form)])


async def _send(request: web.Request, row: JobRow, *, index: int | None) -> web.StreamResponse:
    file = _open(request, row, index)
    digest = await request.app[DIGESTS].digest_of((row.id, row.attempt, index), file)
    suffix = "hidden_states" if index is None else f"hidden_state.{index}"
    return await serve_file(request, file, digest, name=f"{row.id}.{suffix}.safetensors")


def _open(request: web.Request, row: JobRow, index: int | None) -> TensorFile:
    tensor = require_hidden_states(row)
    size_bytes, shape = tensor.end - tensor.begin, list(tensor.shape)
    metadata = {"job": row.id, "model": row.model}
    if index is not None:
        size_bytes, shape = row_bytes(tensor), [tensor.shape[-1]]
        metadata["index"] = str(index)
    header = render_header(HIDDEN_STATES, tensor.dtype, shape, size_bytes, metadata)

    async def locate() -> Place:
        async with request.app[DATABASE].snapshot() as tx:
            return _place_of(await jobs.get_job(tx, row.tenant, row.id), index)

    place = _place_of(row, index)
    return TensorFile(request.app[BLOBS], place, size_bytes, header=header, locate=locate)


def _place_of(row: JobRow, index: int | None) -> Place:
    tensor = require_hidden_states(row)
    return Place(row.blob_key or "", tensor.begin + (index or 0) * row_bytes(tensor))


async def _read_row(request: web.Request, row: JobRow, index: int) -> bytes:
    tensor = require_hidden_states(row)
    begin = tensor.begin + index * row_bytes(tensor)
    return await request.app[BLOBS].get_range(row.blob_key or "", begin, begin + row_bytes(tensor))


async def _pack_scores(request: web.Request, row: JobRow) -> bytes:
    """Return every tensor but the hidden states as one safetensors file."""
    tensors = []
    for tensor in row.tensors:
        if tensor.name == HIDDEN_STATES:
            continue
        data = await read_tensor(request, row, tensor.name) or b""
        tensors.append(Tensor(tensor.name, tensor.dtype, tensor.shape, data))
    return render_safetensors(tensors, {"job": row.id, "model": row.model})


async def _show_rows(
    request: web.Request, row: JobRow, tensor: TensorRef, form: str
) -> web.Response:
    check_json_size(tensor)
    rows: list[list[float] | str | None] = []
    if form == "float":
        rows.extend(await read_hidden_rows(request, row))
    else:
        read = await with_fresh_row(
            request, row, lambda fresh: read_tensor(request, fresh, HIDDEN_STATES)
        )
        data, width = read or b"", row_bytes(tensor)
        failed = failed_items(parse_result(row))
        rows.extend(
            None if index in failed else _encode(data[index * width :][:width], tensor, form)
            for index in range(row.item_count)
        )
    return _show(row, tensor, form, shape=list(tensor.shape), rows=rows)


def _show(
    row: JobRow,
    tensor: TensorRef,
    form: str,
    *,
    shape: list[int],
    rows: list[list[float] | str | None],
) -> web.Response:
    return json_response(
        HiddenStates(
            job=row.id,
            model=row.model,
            dtype=tensor.dtype,
            shape=shape,
            encoding_format=form,
            hidden_states=rows,
        )
    )


def _encode(data: bytes, tensor: TensorRef, form: str) -> list[float] | str | None:
    if form == "base64":
        return base64.b64encode(data).decode()
    return finite_row(decode_floats(data, tensor.dtype))


def _parse_encoding(request: web.Request) -> str | None:
    form = request.query.get("encoding_format")
    if form is not None and form not in {"float", "base64"}:
        message = "encoding_format is float or base64; leave it out for a safetensors file"
        raise InvalidRequestError(message, param="encoding_format")
    return form


def _choose_file(request: web.Request) -> None:
    """Refuse an ``Accept`` without safetensors, except plain JSON readers' ``*/*``."""
    choose_type(request.headers.get("Accept"), (SAFETENSORS, "application/octet-stream"))


def _parse_index(request: web.Request, row: JobRow) -> int:
    """Return the item's index. Raises ``NotFoundError`` that says why where it has no state."""
    text = request.match_info["index"]
    if not _INDEX.fullmatch(text) or int(text) >= row.item_count:
        message = f"job {row.id} has {row.item_count} items; there is no item {text[:20]!r}"
        raise NotFoundError(message)
    for error in parse_result(row).errors:
        if error.index == int(text):
            message = f"item {text} was not scored: {error.code}, {error.message}"
            raise NotFoundError(message)
    return int(text)
