"""The score cache: what the same model gave the same input before, by reference to a job's items.

A key hashes the tenant, what the receipt says of the model, and the input with its parameters: no
tenant puts another's entry away, or learns from its own that another scored the same. Scores go
with their job: an entry whose job was deleted is not found any more.
"""

import hashlib
from collections.abc import Collection, Sequence

import msgspec

from storage.database import Transaction
from storage.statements import execute, pack

__all__ = ["CacheEntry", "cache_key", "find_cached", "put_cached"]

_KEYS_A_STATEMENT = 5000


class CacheEntry(msgspec.Struct, frozen=True, gc=False):
    """Where the scores of one input are: ``item_count`` items of a job from ``first_item`` on."""

    key: str
    job_id: str
    first_item: int
    item_count: int
    has_hidden: bool


def cache_key(tenant: str, fingerprint: str, input_hash: str) -> str:
    """Return a tenant's key for a model's fingerprint and an input's hash."""
    told = f"{fingerprint}|{input_hash}|{tenant}"
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


async def find_cached(
    tx: Transaction, tenant: str, keys: Collection[str], *, hidden: bool
) -> dict[str, CacheEntry]:
    """Return what is known of ``keys``; with ``hidden`` only where hidden states were kept."""
    found: dict[str, CacheEntry] = {}
    wanted = sorted(set(keys))
    for start in range(0, len(wanted), _KEYS_A_STATEMENT):
        rows = pack({"key": key} for key in wanted[start : start + _KEYS_A_STATEMENT])
        parameters = {"rows": rows, "tenant": tenant, "hidden": int(hidden)}
        for row in await execute(tx, _FIND, parameters):
            found[row.key] = CacheEntry(
                row.key, row.job_id, row.first_item, row.item_count, bool(row.has_hidden)
            )
    return found


async def put_cached(tx: Transaction, entries: Sequence[CacheEntry]) -> None:
    """Keep entries; one with hidden states replaces one without, and what is newer what is older.

    Keys are written in their order, so that two writers cannot deadlock.
    """
    ordered = sorted({entry.key: entry for entry in entries}.values(), key=lambda each: each.key)
    for start in range(0, len(ordered), _KEYS_A_STATEMENT):
        some = ordered[start : start + _KEYS_A_STATEMENT]
        rows = msgspec.json.encode(some).decode()
        await execute(tx, _PUT, {"rows": rows})


# CROSS JOIN: SQLite keeps that order, and would else read all of a tenant's jobs first.
_FIND = """
SELECT c.key, c.job_id, c.first_item, c.item_count, c.has_hidden
FROM {rows(key text)} r CROSS JOIN score_cache c CROSS JOIN jobs j
WHERE c.key = r.key AND j.id = c.job_id
  AND j.tenant = :tenant AND j.deleted_at IS NULL AND c.has_hidden >= :hidden
  AND j.state IN ('succeeded', 'partial')
  AND (j.expires_at IS NULL OR j.expires_at > {now})
"""

_PUT = """
INSERT INTO score_cache (key, job_id, first_item, item_count, has_hidden, created_at)
SELECT key, job_id, first_item, item_count, CAST(has_hidden AS integer), {now}
FROM {rows(key text, job_id text, first_item integer, item_count integer, has_hidden boolean)} r
WHERE EXISTS (SELECT 1 FROM jobs j WHERE j.id = r.job_id AND j.state IN ('succeeded', 'partial'))
ORDER BY key
ON CONFLICT (key) DO UPDATE SET job_id = excluded.job_id, first_item = excluded.first_item,
    item_count = excluded.item_count, has_hidden = excluded.has_hidden,
    created_at = excluded.created_at
WHERE excluded.has_hidden >= score_cache.has_hidden
   OR NOT EXISTS (SELECT 1 FROM jobs j WHERE j.id = score_cache.job_id AND j.deleted_at IS NULL
                   AND j.state IN ('succeeded', 'partial'))
"""
