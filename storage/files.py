"""Uploaded and made files: a row each, and bytes in parts of one size in the blob store.

The bytes of part ``n`` are the blob ``files/{id}/{n}``. A file is there once its row is ready.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, select

from contract.errors import NotFoundError
from storage.bulk_tables import files
from storage.database import Transaction
from storage.ids import create_id
from storage.statements import execute
from storage.tenancy import check_owner

__all__ = [
    "FileRow",
    "delete_file",
    "drop_file",
    "finish_file",
    "get_file",
    "list_files",
    "part_key",
    "part_keys",
    "purge_files",
    "start_file",
]


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file as stored."""

    id: str
    tenant: str
    filename: str
    purpose: str
    state: str
    part_bytes: int
    size_bytes: int
    sha256: str
    created_at: float
    expires_at: float | None
    deleted_at: float | None

    @property
    def part_keys(self) -> list[str]:
        """The blobs that hold its bytes, in order."""
        return part_keys(self.id, self.size_bytes, self.part_bytes)


def part_key(file_id: str, number: int) -> str:
    """Return the blob of one part."""
    return f"files/{file_id}/{number:06d}"


def part_keys(file_id: str, size_bytes: int, part_bytes: int) -> list[str]:
    """Return the blobs that hold a file's bytes, in order."""
    return [part_key(file_id, number) for number in range(-(-size_bytes // part_bytes))]


async def start_file(
    tx: Transaction, tenant: str, *, filename: str, purpose: str, part_bytes: int
) -> str:
    """Record that bytes of a file are about to arrive; return its id."""
    file_id = create_id("fil")
    parameters = {
        "id": file_id,
        "tenant": tenant,
        "filename": filename,
        "purpose": purpose,
        "part_bytes": part_bytes,
    }
    await execute(tx, _START, parameters)
    return file_id


async def finish_file(
    tx: Transaction,
    file_id: str,
    *,
    purpose: str,
    size_bytes: int,
    sha256: str,
    expires_after_s: float | None = None,
) -> FileRow:
    """Make a file visible: all its parts are durable."""
    parameters = {
        "id": file_id,
        "purpose": purpose,
        "size_bytes": size_bytes,
        "sha256": sha256,
        "expires_after_s": expires_after_s,
    }
    await execute(tx, _FINISH, parameters)
    return _parse((await tx.execute(select(files).where(files.c.id == file_id))).one())


async def get_file(tx: Transaction, tenant: str, file_id: str) -> FileRow:
    """Return one file. Raises ``NotFoundError``, also for one that was deleted or has expired."""
    parameters = {"id": file_id, "tenant": tenant}
    row = (await execute(tx, _GET, parameters)).one_or_none()
    if row is None:
        message = f"there is no file {file_id}"
        raise NotFoundError(message)
    return _parse(row)


async def list_files(
    tx: Transaction, tenant: str, *, purpose: str | None, after: str | None, limit: int
) -> list[FileRow]:
    """Return files, newest first; ``after`` is the last id seen."""
    query = select(files).where(
        files.c.tenant == tenant, files.c.state == "ready", files.c.deleted_at.is_(None)
    )
    if purpose is not None:
        query = query.where(files.c.purpose == purpose)
    if after is not None:
        query = query.where(files.c.id < after)
    rows = await tx.execute(query.order_by(files.c.id.desc()).limit(limit))
    return [_parse(row) for row in rows]


async def delete_file(tx: Transaction, tenant: str, file_id: str) -> FileRow:
    """Take a file out of sight; its bytes go with the next ``purge_files``."""
    row = await get_file(tx, tenant, file_id)
    await execute(tx, "UPDATE files SET deleted_at = {now} WHERE id = :id", {"id": file_id})
    return row


async def purge_files(tx: Transaction, *, abandoned_after_s: float, limit: int) -> list[str]:
    """Return the ids of files whose bytes may go; ``drop_file`` forgets each afterwards.

    Those were deleted, have expired, or are uploads that never ended.
    """
    parameters = {"abandoned_after_s": abandoned_after_s, "limit": limit}
    return list((await execute(tx, _PURGE, parameters)).scalars())


async def drop_file(tx: Transaction, file_id: str) -> None:
    """Forget a file whose bytes are gone."""
    await execute(tx, "DELETE FROM files WHERE id = :id", {"id": file_id})


def _parse(row: Row[Any]) -> FileRow:
    check_owner(row.tenant)
    return FileRow(*(getattr(row, name) for name in FileRow.__dataclass_fields__))


_START = """
INSERT INTO files (id, tenant, filename, purpose, state, part_bytes, size_bytes, sha256, created_at)
VALUES (:id, :tenant, :filename, :purpose, 'uploading', :part_bytes, 0, '', {now})
"""

_FINISH = """
UPDATE files SET state = 'ready', purpose = :purpose, size_bytes = :size_bytes, sha256 = :sha256,
    expires_at = {now} + :expires_after_s
WHERE id = :id
"""

_GET = """
SELECT * FROM files WHERE id = :id AND tenant = :tenant AND state = 'ready'
  AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > {now})
"""

_PURGE = """
UPDATE files SET deleted_at = coalesce(deleted_at, {now})
WHERE id IN (
    SELECT id FROM files
    WHERE deleted_at IS NOT NULL OR expires_at <= {now}
       OR (state = 'uploading' AND created_at < {now} - :abandoned_after_s)
    ORDER BY id LIMIT :limit)
RETURNING id
"""
