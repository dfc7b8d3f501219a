"""Tenants and the secrets that sign the webhooks of their jobs' own URLs."""

from contract.webhooks import create_secret
from storage.database import Transaction
from storage.statements import execute

__all__ = ["OVERLAP_S", "rotate_secret", "webhook_secrets"]

#: How long a replaced secret still signs.
OVERLAP_S = 86400.0


async def webhook_secrets(tx: Transaction, tenant: str) -> list[str]:
    """Return the secrets that sign the tenant's webhooks, newest first; the first use makes one.

    Two while one replaces the other. ``tx`` must be able to write. Several at once agree.
    """
    row = (await execute(tx, _FIND, {"name": tenant})).one_or_none()
    if row is None:
        await execute(tx, _ADD, {"name": tenant, "secret": create_secret()})
        row = (await execute(tx, _FIND, {"name": tenant})).one()
    return [row.secret] if row.old is None else [row.secret, row.old]


async def rotate_secret(tx: Transaction, tenant: str) -> list[str]:
    """Replace the secret; the old one signs beside the new one for ``OVERLAP_S``."""
    await webhook_secrets(tx, tenant)
    parameters = {"name": tenant, "secret": create_secret(), "overlap_s": OVERLAP_S}
    await execute(tx, _ROTATE, parameters)
    return await webhook_secrets(tx, tenant)


_FIND = """
SELECT webhook_secret AS secret,
    CASE WHEN old_webhook_secret_until_at > {now} THEN old_webhook_secret END AS old
FROM tenants WHERE name = :name
"""

_ADD = """
INSERT INTO tenants (name, webhook_secret, created_at) VALUES (:name, :secret, {now})
ON CONFLICT (name) DO NOTHING
"""

_ROTATE = """
UPDATE tenants SET old_webhook_secret = webhook_secret, webhook_secret = :secret,
    old_webhook_secret_until_at = {now} + :overlap_s
WHERE name = :name
"""
