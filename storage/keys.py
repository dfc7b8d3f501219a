"""API keys as stored: made, found by their prefix, rotated, revoked. The secret is never here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from contract.errors import ConflictError, NotFoundError
from contract.keys import Scope, create_key, hash_key
from storage.database import Transaction
from storage.ids import create_id
from storage.statements import execute, pack

__all__ = [
    "OVERLAP_S",
    "KeyRow",
    "add_key",
    "find_key",
    "has_valid_key",
    "list_keys",
    "mark_used",
    "revoke_key",
    "rotate_key",
]

#: How long a key that was rotated is still valid.
OVERLAP_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """A key. ``left_s`` is how long it is valid yet; None: without an end."""

    id: str
    tenant: str
    prefix: str
    hash: str
    scopes: list[Scope]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    left_s: float | None

    @property
    def is_valid(self) -> bool:
        """Whether it opens anything at the moment that it was read."""
        return self.revoked_at is None and (self.left_s is None or self.left_s > 0)


async def add_key(
    tx: Transaction, tenant: str, scopes: Sequence[Scope], *, expires_in_s: float | None = None
) -> tuple[KeyRow, str]:
    """Make a key; return its row and, this once, the key itself."""
    key, prefix = create_key()
    parameters = {
        "id": create_id("key"),
        "tenant": tenant,
        "prefix": prefix,
        "hash": hash_key(key),
        "scopes": ",".join(scopes),
        "expires_in_s": expires_in_s,
    }
    await execute(tx, _ADD, parameters)
    return await _get(tx, "prefix", prefix), key


async def find_key(tx: Transaction, prefix: str) -> KeyRow | None:
    """Return the key with that prefix, valid or not."""
    row = (await execute(tx, _FIND, {"prefix": prefix})).one_or_none()
    return None if row is None else _parse(row)


async def list_keys(tx: Transaction, tenant: str | None = None) -> list[KeyRow]:
    """Return the keys of a tenant, or all, oldest first."""
    rows = await execute(tx, _LIST, {"tenant": tenant, "all": int(tenant is None)})
    return [_parse(row) for row in rows]


async def has_valid_key(tx: Transaction) -> bool:
    """Whether any key opens anything."""
    return (await execute(tx, _ANY, {})).one_or_none() is not None


async def revoke_key(tx: Transaction, key_id: str) -> KeyRow:
    """End a key now; a second time keeps the first moment. Raises ``NotFoundError``."""
    await execute(tx, _REVOKE, {"id": key_id})
    return await _get(tx, "id", key_id)


async def rotate_key(
    tx: Transaction, key_id: str, *, overlap_s: float = OVERLAP_S
) -> tuple[KeyRow, str]:
    """Make a key with the tenant and scopes of another, which is valid for ``overlap_s`` more.

    Raises ``NotFoundError``, and ``ConflictError`` for a key that is not valid any more.
    """
    old = await _get(tx, "id", key_id)
    if not old.is_valid:
        message = f"key {key_id} was revoked or has expired; create a new one"
        raise ConflictError(message)
    await execute(tx, _END, {"id": key_id, "overlap_s": overlap_s})
    return await add_key(tx, old.tenant, old.scopes)


async def mark_used(tx: Transaction, ages_s: Mapping[str, float]) -> None:
    """Record how long ago, in seconds, keys were used last, by their ids."""
    rows = [{"id": key_id, "age_s": ages_s[key_id]} for key_id in sorted(ages_s)]
    if rows:
        await execute(tx, _MARK_USED, {"rows": pack(rows)})


async def _get(tx: Transaction, column: str, value: str) -> KeyRow:
    row = (await execute(tx, _GET[column], {"value": value})).one_or_none()
    if row is None:
        message = f"there is no key {value[:100]!r}"
        raise NotFoundError(message)
    return _parse(row)


def _parse(row: Row[Any]) -> KeyRow:
    values = {name: getattr(row, name) for name in KeyRow.__dataclass_fields__}
    values["scopes"] = [Scope(word) for word in row.scopes.split(",")]
    values["left_s"] = None if row.left_s is None else float(row.left_s)
    return KeyRow(**values)


_SELECT = "SELECT k.*, k.expires_at - {now} AS left_s FROM keys k"

_ADD = """
INSERT INTO keys (id, tenant, prefix, hash, scopes, created_at, expires_at)
VALUES (:id, :tenant, :prefix, :hash, :scopes, {now}, {now} + :expires_in_s)
"""

_FIND = f"{_SELECT} WHERE k.prefix = :prefix"

_GET = {"id": f"{_SELECT} WHERE k.id = :value", "prefix": f"{_SELECT} WHERE k.prefix = :value"}

_LIST = f"{_SELECT} WHERE k.tenant = :tenant OR :all = 1 ORDER BY k.id"

_ANY = """
SELECT 1 FROM keys WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > {now}) LIMIT 1
"""

_REVOKE = "UPDATE keys SET revoked_at = {now} WHERE id = :id AND revoked_at IS NULL"

_END = """
UPDATE keys SET expires_at = CASE WHEN expires_at < {now} + :overlap_s THEN expires_at
                                  ELSE {now} + :overlap_s END
WHERE id = :id
"""

_MARK_USED = """
UPDATE keys SET last_used_at = {now} - r.age_s
FROM {rows(id text, age_s real)} r
WHERE keys.id = r.id AND (last_used_at IS NULL OR last_used_at < {now} - r.age_s)
"""
