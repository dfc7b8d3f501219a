"""The tables of who may do what, and how much: beside ``storage.tables``, in the same metadata."""

from sqlalchemy import Column, Float, Table, Text

from storage.tables import metadata

__all__ = ["keys", "tenant_limits"]

keys = Table(
    "keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("prefix", Text, nullable=False, unique=True),  # the part that is no secret
    Column("hash", Text, nullable=False),  # SHA-256 of the whole key
    Column("scopes", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53)),
    Column("revoked_at", Float(53)),
    Column("last_used_at", Float(53)),
)

#: Tenants whose limits are not those of the settings.
tenant_limits = Table(
    "tenant_limits",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("limits", Text, nullable=False),
)
