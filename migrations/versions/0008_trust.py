"""API keys, limits of single tenants, and what a job occupies.

New tables and a nullable column: code that does not know them goes on beside it.
Revision 0008, after 0006.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("expires_at", sa.Float(precision=53), nullable=True),
        sa.Column("revoked_at", sa.Float(precision=53), nullable=True),
        sa.Column("last_used_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.UniqueConstraint("prefix", name=op.f("uq_keys_prefix")),
    )
    op.create_table(
        "tenant_limits",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("limits", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_tenant_limits")),
    )
    op.add_column("jobs", sa.Column("stored_bytes", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("jobs") as batch:
        batch.drop_column("stored_bytes")
    op.drop_table("tenant_limits")
    op.drop_table("keys")
