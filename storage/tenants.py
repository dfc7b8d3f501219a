"""Tenants and their webhook secrets."""

from contract.webhooks import create_secret
from storage.database import Transaction
from storage.statements import execute

__all__ = ["webhook_secrets"]


async def webhook_secrets(tx: Transaction, tenant: str) -> list[str]:
    """Return the secrets that sign the tenant's webhooks; the first use makes one.

    ``tx`` must be able to write. Several at once agree on one secret.
    """
    found = (await execute(tx, _FIND, {"name": tenant})).scalar_one_or_none()
    if found is None:
        await execute(tx, _ADD, {"name": tenant, "secret": create_secret()})
        found = (await execute(tx, _FIND, {"name": tenant})).scalar_one()
    return [found]


_FIND = "SELECT webhook_secret FROM tenants WHERE name = :name"

_ADD = """
INSERT INTO tenants (name, webhook_secret, created_at) VALUES (:name, :secret, {now})
ON CONFLICT (name) DO NOTHING
"""
