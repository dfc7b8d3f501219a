"""Deleting a job for good: the row becomes a tombstone, then its bytes leave the blob.

Rows first, bytes second, and every step may be repeated: ``sweeps.unforgotten_refs`` finds what
was interrupted.
"""

import asyncio

from sqlalchemy import select

from contract.errors import IllegalTransitionError, NotFoundError
from storage.blobs import BlobInfo, BlobStore
from storage.database import Database, Transaction
from storage.ids import create_id
from storage.jobs import get_job
from storage.refs import BlobRef, TensorRef, decode_tensors, encode_tensors
from storage.statements import execute, pack
from storage.tables import jobs
from storage.tensors import Tensor, parse_header, render_safetensors

__all__ = ["delete_job", "drop_orphans", "forget", "rewrite"]

_PAGE = 500


async def delete_job(tx: Transaction, tenant: str, job_id: str) -> BlobRef | None:
    """Turn a terminal job into a tombstone; return the blob whose bytes ``forget`` must remove.

    Deliveries that are still due are dropped with it. Raises ``IllegalTransitionError`` for a job
    that has not ended, and as ``get_job`` does.
    """
    row = (await execute(tx, _DELETE, {"id": job_id, "tenant": tenant})).one_or_none()
    if row is None:
        found = await get_job(tx, tenant, job_id)
        raise IllegalTransitionError(current=found.state, wanted="deleted")
    for table in ("deliveries", "attempts"):
        await execute(tx, f"DELETE FROM {table} WHERE job_id = :id", {"id": job_id})  # noqa: S608
    return None if row.blob_key is None else BlobRef(job_id, row.blob_key)


async def forget(database: Database, store: BlobStore, ref: BlobRef) -> None:
    """Remove the bytes of a deleted job: drop its blob, or write it anew without them.

    Readers of a neighbour in the same blob may find the old key gone: they read the row again.
    """
    while (key := await _key_of(database, ref.job_id)) is not None:
        await rewrite(database, store, key)


async def drop_orphans(database: Database, store: BlobStore, *, older_than_s: float) -> int:
    """Delete bytes that no row names and rows that no job names; return how many blobs went.

    ``older_than_s`` must exceed the time between a blob's write and its row's commit.
    """
    async with database.snapshot() as tx:
        parameters = {"older_than_s": older_than_s, "limit": _PAGE}
        unused = list((await execute(tx, _UNUSED, parameters)).scalars())
    await _drop(database, store, unused)
    dropped = len(unused)
    page: list[str] = []
    async for entry in store.list():
        if entry.age_s >= older_than_s:
            page.append(entry.key)
        if len(page) >= _PAGE:
            dropped += await _drop_unknown(database, store, page)
            page = []
    return dropped + await _drop_unknown(database, store, page)


async def _key_of(database: Database, job_id: str) -> str | None:
    query = select(jobs.c.blob_key).where(jobs.c.id == job_id, jobs.c.deleted_at.is_not(None))
    async with database.snapshot() as tx:
        key: str | None = (await tx.execute(query)).scalar_one_or_none()
    return key


async def rewrite(database: Database, store: BlobStore, old: str) -> None:
    """Write a blob anew with the live jobs whose rows name it and nothing else, or drop it."""
    query = select(jobs.c.id, jobs.c.tensors).where(
        jobs.c.blob_key == old, jobs.c.deleted_at.is_(None)
    )
    async with database.snapshot() as tx:
        alive = {row.id: decode_tensors(row.tensors) for row in await tx.execute(query)}
    blob: BlobInfo | None = None
    moved: dict[str, list[TensorRef]] = {}
    if any(alive.values()):
        try:
            whole = await store.get(old)
        except NotFoundError:
            await _release_dead(database, old)
            return
        data, moved = await asyncio.to_thread(_without_dead, whole, alive)
        blob = await store.put(f"{create_id('btc')}.safetensors", data)
    unnamed = not alive and await _is_unnamed(database, old)
    if unnamed or await _move(
        database, old, blob, {job_id: moved.get(job_id, []) for job_id in alive}
    ):
        await _drop(database, store, [old])
        await _release_dead(database, old)
    elif blob is not None:  # another process was first
        await store.delete([blob.key])


async def _is_unnamed(database: Database, key: str) -> bool:
    async with database.snapshot() as tx:
        found = await tx.execute(select(jobs.c.id).where(jobs.c.blob_key == key).limit(1))
        return found.first() is None


async def _release_dead(database: Database, old: str) -> None:
    """The bytes are gone: tombstones need not remember them. Until then they do, to be found."""
    async with database.transaction() as tx:
        await execute(tx, _RELEASE_DEAD, {"old": old})


def _without_dead(
    data: bytes, alive: dict[str, list[TensorRef]]
) -> tuple[bytes, dict[str, list[TensorRef]]]:
    """Return the file without the dead jobs' tensors, and where those of the others lie now."""
    kept = [
        Tensor(f"{job_id}/{ref.name}", ref.dtype, ref.shape, data[ref.begin : ref.end])
        for job_id, refs in alive.items()
        for ref in refs
    ]
    fresh = render_safetensors(kept)
    moved: dict[str, list[TensorRef]] = {}
    for entry in parse_header(fresh):
        job_id, _, name = entry.name.partition("/")
        ref = TensorRef(name, entry.dtype, entry.shape, entry.begin, entry.end)
        moved.setdefault(job_id, []).append(ref)
    return fresh, moved


async def _move(
    database: Database, old: str, blob: BlobInfo | None, moved: dict[str, list[TensorRef]]
) -> bool:
    """Point the live rows at the new blob; false if another process was first."""
    rows = [{"id": job_id, "tensors": encode_tensors(refs)} for job_id, refs in moved.items()]
    key = None if blob is None else blob.key
    parameters = {"old": old, "new": key, "rows": pack(rows)}
    async with database.transaction() as tx:
        # All rows of the blob are locked first, so that two rewriters take turns.
        locked = set((await execute(tx, _LOCK, {"old": old})).scalars())
        if not locked or not set(moved) <= locked:
            return False
        if blob is not None:
            values = {"key": key, "size_bytes": blob.size_bytes, "sha256": blob.sha256}
            await execute(tx, _ADD_BLOB, values)
        await execute(tx, _MOVE, parameters)
    return True


async def _drop(database: Database, store: BlobStore, keys: list[str]) -> None:
    """Delete the bytes, then the rows, so that an interruption leaves something to find."""
    if not keys:
        return
    await store.delete(keys)
    async with database.transaction() as tx:
        await execute(tx, _DROP_BLOBS, {"rows": pack({"key": key} for key in keys)})


async def _drop_unknown(database: Database, store: BlobStore, keys: list[str]) -> int:
    if not keys:
        return 0
    async with database.snapshot() as tx:
        rows = await execute(tx, _UNKNOWN, {"rows": pack({"key": key} for key in keys)})
        unknown = list(rows.scalars())
    await store.delete(unknown)
    return len(unknown)


_DELETE = """
UPDATE jobs SET
    deleted_at = {now}, request = NULL, result = NULL, tensors = NULL, usage = NULL, error = NULL,
    metadata = '{}', webhook_url = NULL, origin = NULL, stored_bytes = NULL, version = version + 1
WHERE id = :id AND tenant = :tenant AND deleted_at IS NULL
  AND state NOT IN ('queued', 'running')
RETURNING blob_key
"""

_LOCK = "SELECT j.id FROM jobs j WHERE j.blob_key = :old ORDER BY j.id {lock j}"

_MOVE = """
UPDATE jobs SET blob_key = :new, tensors = CASE WHEN deleted_at IS NULL THEN r.tensors END
FROM {rows(id text, tensors text)} r WHERE jobs.id = r.id AND blob_key = :old
"""

_RELEASE_DEAD = """
UPDATE jobs SET blob_key = NULL WHERE blob_key = :old AND deleted_at IS NOT NULL
"""

_ADD_BLOB = """
INSERT INTO blobs (key, size_bytes, sha256, created_at)
VALUES (:key, :size_bytes, :sha256, {now})
"""

_DROP_BLOBS = "DELETE FROM blobs WHERE key IN (SELECT key FROM {rows(key text)} r)"

_UNUSED = """
SELECT key FROM blobs b WHERE created_at < {now} - :older_than_s
  AND NOT EXISTS (SELECT 1 FROM jobs j WHERE j.blob_key = b.key) LIMIT :limit
"""

_UNKNOWN = """
SELECT key FROM {rows(key text)} r WHERE key NOT IN (SELECT b.key FROM blobs b WHERE b.key = r.key)
  AND NOT EXISTS (SELECT 1 FROM files f WHERE key LIKE 'files/%' AND f.id = substr(r.key, 7, 36))
"""
