"""Idempotency keys: which job a key of a tenant stands for, for a day."""

from sqlalchemy import select

from contract.errors import IdempotencyConflictError
from storage.database import Transaction
from storage.statements import execute
from storage.tables import idempotency_keys

__all__ = ["KEPT_S", "bind", "drop_expired_keys", "find", "find_or_claim", "is_bound"]

#: How long a key is remembered.
KEPT_S = 86400.0


async def find_or_claim(
    tx: Transaction, tenant: str, route: str, key: str, body_hash: str
) -> str | None:
    """Return the job that ``key`` stands for, or none: then the key is this transaction's.

    A second transaction with the same key waits for the first, and then sees its job. Raises
    ``IdempotencyConflictError`` where the key came with another body.
    """
    names = {"tenant": tenant, "route": route, "key": key}
    values = names | {"body_hash": body_hash, "kept_s": KEPT_S}
    if (await execute(tx, _CLAIM, values)).one_or_none() is not None:
        return None
    query = select(idempotency_keys.c.body_hash, idempotency_keys.c.job_id).filter_by(**names)
    row = (await tx.execute(query)).one()
    return _check(row.body_hash, row.job_id, body_hash)


async def find(tx: Transaction, tenant: str, route: str, key: str, body_hash: str) -> str | None:
    """Return what ``key`` stands for, or None; claim nothing. Raises as ``find_or_claim`` does."""
    names = {"tenant": tenant, "route": route, "key": key}
    row = (await execute(tx, _FIND, names | {"kept_s": KEPT_S})).one_or_none()
    return None if row is None else _check(row.body_hash, row.job_id, body_hash)


def _check(first_hash: str, made: str | None, body_hash: str) -> str | None:
    if first_hash != body_hash:
        message = "this idempotency key was used with another body; use a new key"
        raise IdempotencyConflictError(message, param="Idempotency-Key")
    return made


async def is_bound(tx: Transaction, tenant: str, route: str, key: str) -> bool:
    """Tell whether ``key`` stands for something already."""
    names = {"tenant": tenant, "route": route, "key": key}
    return (await execute(tx, _FIND, names | {"kept_s": KEPT_S})).one_or_none() is not None


async def bind(tx: Transaction, tenant: str, route: str, key: str, job_id: str) -> None:
    """Let ``key`` stand for ``job_id``, in the transaction that claimed it and added the job."""
    values = {"tenant": tenant, "route": route, "key": key, "job_id": job_id}
    await execute(tx, _BIND, values)


async def drop_expired_keys(tx: Transaction, *, limit: int) -> int:
    """Forget keys older than ``KEPT_S``; return how many."""
    return (await execute(tx, _DROP, {"kept_s": KEPT_S, "limit": limit})).rowcount


_CLAIM = """
INSERT INTO idempotency_keys (tenant, route, key, body_hash, job_id, created_at)
VALUES (:tenant, :route, :key, :body_hash, NULL, {now})
ON CONFLICT (tenant, route, key) DO UPDATE
SET body_hash = excluded.body_hash, job_id = NULL, created_at = excluded.created_at
WHERE idempotency_keys.created_at < {now} - :kept_s
RETURNING key
"""

_FIND = """
SELECT body_hash, job_id FROM idempotency_keys
WHERE tenant = :tenant AND route = :route AND key = :key AND job_id IS NOT NULL
  AND created_at >= {now} - :kept_s
"""

_BIND = """
UPDATE idempotency_keys SET job_id = :job_id
WHERE tenant = :tenant AND route = :route AND key = :key
"""

_DROP = """
DELETE FROM idempotency_keys WHERE (tenant, route, key) IN (
    SELECT tenant, route, key FROM idempotency_keys
    WHERE created_at < {now} - :kept_s ORDER BY created_at LIMIT :limit)
"""
