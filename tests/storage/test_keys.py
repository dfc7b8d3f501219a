"""Keys as rows: what is stored, until when they are valid, who replaced whom."""

import pytest

from contract.errors import ConflictError, NotFoundError
from contract.keys import Scope, hash_key
from contract.limits import TenantLimits, parse_limits
from storage import keys
from storage.database import Database
from storage.limits import put_limits, read_limits
from tests.storage.factories import run_sql

SCOPES = [Scope.SUBMIT, Scope.READ]


async def test_a_key_is_found_by_its_prefix_and_its_secret_is_nowhere(database: Database) -> None:
    """The row has the SHA-256; no column holds the key or its random part."""
    async with database.transaction() as tx:
        row, key = await keys.add_key(tx, "t", SCOPES)
    async with database.snapshot() as tx:
        found = await keys.find_key(tx, row.prefix)
        missing = await keys.find_key(tx, "sk_0000000000000000")

    assert found == row
    assert missing is None
    assert (row.tenant, row.scopes, row.hash) == ("t", SCOPES, hash_key(key))
    assert row.is_valid
    stored = " ".join(str(value) for value in (await run_sql(database, "SELECT * FROM keys"))[0])
    assert key.removeprefix(f"{row.prefix}_") not in stored


async def test_expired_and_revoked_keys_are_not_valid(database: Database) -> None:
    """By the database's clock; revoking twice keeps the first moment."""
    async with database.transaction() as tx:
        brief, _ = await keys.add_key(tx, "t", SCOPES, expires_in_s=60)
        other, _ = await keys.add_key(tx, "t", SCOPES)
        assert await keys.has_valid_key(tx)
        revoked = await keys.revoke_key(tx, other.id)
    await run_sql(database, "UPDATE keys SET expires_at = expires_at - 61")

    async with database.transaction() as tx:
        again = await keys.revoke_key(tx, other.id)
        expired = await keys.find_key(tx, brief.prefix)
        assert not await keys.has_valid_key(tx)
    assert brief.is_valid
    assert expired is not None
    assert not expired.is_valid
    assert not revoked.is_valid
    assert again.revoked_at == revoked.revoked_at


async def test_a_rotated_key_is_valid_for_a_while_yet(database: Database) -> None:
    """The new one has its tenant and scopes; the old one never lives longer than it would have."""
    async with database.transaction() as tx:
        old, _ = await keys.add_key(tx, "t", SCOPES)
        brief, _ = await keys.add_key(tx, "t", SCOPES, expires_in_s=5)
        new, key = await keys.rotate_key(tx, old.id, overlap_s=100)
        await keys.rotate_key(tx, brief.id, overlap_s=100)
        rows = {row.id: row for row in await keys.list_keys(tx, "t")}

    assert (new.tenant, new.scopes, new.hash) == ("t", SCOPES, hash_key(key))
    assert 90 < (rows[old.id].left_s or 0) <= 100
    assert (rows[brief.id].left_s or 0) <= 5
    assert rows[new.id].left_s is None
    assert len(rows) == 4


async def test_only_a_valid_key_can_be_rotated(database: Database) -> None:
    """A revoked one would live again; one that is not there is said to be missing."""
    async with database.transaction() as tx:
        row, _ = await keys.add_key(tx, "t", SCOPES)
        await keys.revoke_key(tx, row.id)
        with pytest.raises(ConflictError):
            await keys.rotate_key(tx, row.id)
        with pytest.raises(NotFoundError):
            await keys.rotate_key(tx, "key_1")
        with pytest.raises(NotFoundError):
            await keys.revoke_key(tx, "key_1")


async def test_the_last_use_only_moves_on(database: Database) -> None:
    """Several processes write it, each what it saw; the latest stands."""
    async with database.transaction() as tx:
        row, _ = await keys.add_key(tx, "t", SCOPES)
        await keys.mark_used(tx, {})
        await keys.mark_used(tx, {row.id: 5.0})
        first = await keys.find_key(tx, row.prefix)
        await keys.mark_used(tx, {row.id: 50.0})
        second = await keys.find_key(tx, row.prefix)
        await keys.mark_used(tx, {row.id: 0.0})
        third = await keys.find_key(tx, row.prefix)

    assert first is not None
    assert second is not None
    assert third is not None
    assert first.last_used_at is not None
    assert second.last_used_at == first.last_used_at
    assert third.last_used_at is not None
    assert third.last_used_at > first.last_used_at


async def test_keys_of_one_tenant_or_of_all(database: Database) -> None:
    """Oldest first."""
    async with database.transaction() as tx:
        for tenant in ("a", "b", "a"):
            await keys.add_key(tx, tenant, SCOPES)
        of_a, of_all = await keys.list_keys(tx, "a"), await keys.list_keys(tx)

    assert [row.tenant for row in of_a] == ["a", "a"]
    assert [row.tenant for row in of_all] == ["a", "b", "a"]


async def test_limits_are_kept_by_tenant(database: Database) -> None:
    """Set, replaced, and forgotten where nothing is left."""
    async with database.transaction() as tx:
        await put_limits(tx, "a", parse_limits(["queued_jobs=3"]))
        await put_limits(tx, "b", parse_limits(["items=9"]))
        both = await read_limits(tx)
        await put_limits(tx, "a", TenantLimits())
        left = await read_limits(tx)

    assert both == {"a": TenantLimits(queued_jobs=3), "b": TenantLimits(items=9)}
    assert left == {"b": TenantLimits(items=9)}
