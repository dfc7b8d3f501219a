"""Limits of single tenants, where they are not those of the settings."""

import msgspec

from contract.limits import TenantLimits
from storage.database import Transaction
from storage.statements import execute

__all__ = ["put_limits", "read_limits"]


async def read_limits(tx: Transaction) -> dict[str, TenantLimits]:
    """Return what was set, by tenant; the tenants without limits of their own are missing."""
    rows = await execute(tx, "SELECT tenant, limits FROM tenant_limits", {})
    return {row.tenant: msgspec.json.decode(row.limits, type=TenantLimits) for row in rows}


async def put_limits(tx: Transaction, tenant: str, limits: TenantLimits) -> None:
    """Put ``limits`` in place of what was set for the tenant; none at all leaves the settings'."""
    await execute(tx, "DELETE FROM tenant_limits WHERE tenant = :tenant", {"tenant": tenant})
    if limits != TenantLimits():
        await execute(tx, _PUT, {"tenant": tenant, "limits": msgspec.json.encode(limits).decode()})


_PUT = "INSERT INTO tenant_limits (tenant, limits) VALUES (:tenant, :limits)"
