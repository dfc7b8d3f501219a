"""``/v1/bulks/{id}/hidden_states``: the index, the shards, and the ids of their rows."""

import re

import msgspec
from aiohttp import web

from api.bodies import json_response
from api.bulk.access import find_bulk
from api.bulk.vectors import ShardFile, describe_vectors, shard_name
from api.state import BLOBS, DATABASE, DIGESTS
from api.tensor_files import serve_file
from contract.bulks import ENDED_BULKS
from contract.errors import NotFoundError, ResultNotReadyError
from storage.bulk_chunks import read_chunks
from storage.bulks import BulkRow

__all__ = ["add_routes"]

_SHARD = re.compile(r"hidden_states-([0-9]{5})-of-([0-9]{5})\.safetensors")
_CHUNKS_A_PAGE = 16


def add_routes(app: web.Application) -> None:
    """Add the routes to the application."""
    app.router.add_get("/v1/bulks/{id}/hidden_states", get_index)
    app.router.add_get("/v1/bulks/{id}/hidden_states/ids.jsonl", get_ids)
    app.router.add_get("/v1/bulks/{id}/hidden_states/{file}", get_shard)


async def get_index(request: web.Request) -> web.StreamResponse:
    """Show which shards there are, and what is in them."""
    vectors = await describe_vectors(request.app[DATABASE], await _find_ended(request))
    return json_response(vectors.render_index())


async def get_shard(request: web.Request) -> web.StreamResponse:
    """Serve one shard, or the range of it that is asked for."""
    bulk = await _find_ended(request)
    vectors = await describe_vectors(request.app[DATABASE], bulk)
    name = request.match_info["file"]
    match = _SHARD.fullmatch(name)
    number = int(match.group(1)) - 1 if match else -1
    if not 0 <= number < vectors.shards or name != shard_name(number, vectors.shards):
        message = f"bulk {bulk.id} has no file {name[:100]!r}"
        raise NotFoundError(message)
    file = ShardFile(request.app[DATABASE], request.app[BLOBS], vectors, number)
    identity = (bulk.id, bulk.finished_at, number)
    digest = await request.app[DIGESTS].digest_of(identity, file)
    return await serve_file(request, file, digest, name=name)


async def get_ids(request: web.Request) -> web.StreamResponse:
    """Stream which line and item each row is of."""
    bulk = await _find_ended(request)
    response = web.StreamResponse()
    response.content_type = "application/jsonl"
    await response.prepare(request)
    position = 0
    while position < bulk.ingested_lines:
        async with request.app[DATABASE].snapshot() as tx:
            chunks = await read_chunks(tx, bulk.id, from_line=position, limit=_CHUNKS_A_PAGE)
        if not chunks:
            break
        for chunk in chunks:
            rows = [
                {"line": chunk.first_line + offset + 1, "custom_id": line.custom_id, "item": item}
                for offset, line in enumerate(chunk.lines)
                for item in range(line.item_count)
            ]
            await response.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        position = chunks[-1].first_line + chunks[-1].line_count
    await response.write_eof()
    return response


async def _find_ended(request: web.Request) -> BulkRow:
    bulk = await find_bulk(request)
    if bulk.state not in ENDED_BULKS:
        message = f"bulk {bulk.id} is {bulk.state.value}; its hidden states come when it has ended"
        raise ResultNotReadyError(message, retry_after_s=5)
    return bulk
