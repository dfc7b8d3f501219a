"""Registered webhook endpoints, receivers that are left alone, and events that are about no job.

Revision 0003, after 0001. Works with code of 0001: what it does not write has a default.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_PENDING = sa.text("state = 'pending'")
_REGISTERED = sa.text("endpoint_id <> ''")


def upgrade() -> None:
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("events", sa.Text(), nullable=True),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("old_secret", sa.Text(), nullable=True),
        sa.Column("old_secret_until_at", sa.Float(precision=53), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("updated_at", sa.Float(precision=53), nullable=False),
        sa.Column("failing_since_at", sa.Float(precision=53), nullable=True),
        sa.Column("disabled_at", sa.Float(precision=53), nullable=True),
        sa.Column("disabled_reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoints")),
    )
    op.create_index("ix_webhook_endpoints_tenant_id", "webhook_endpoints", ["tenant", "id"])
    op.create_table(
        "receivers",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("failing_since_at", sa.Float(precision=53), nullable=False),
        sa.Column("paused_until_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_receivers")),
    )
    with op.batch_alter_table("tenants") as tenants:
        tenants.add_column(sa.Column("old_webhook_secret", sa.Text(), nullable=True))
        tenants.add_column(
            sa.Column("old_webhook_secret_until_at", sa.Float(precision=53), nullable=True)
        )
    with op.batch_alter_table("events", table_kwargs={"sqlite_autoincrement": True}) as events:
        events.alter_column("job_id", existing_type=sa.Text(), nullable=True)
    op.drop_index("ix_deliveries_pending", "deliveries")
    with op.batch_alter_table("deliveries") as deliveries:
        deliveries.add_column(
            sa.Column("endpoint_id", sa.Text(), nullable=False, server_default=sa.text("''"))
        )
        deliveries.add_column(
            sa.Column("receiver", sa.Text(), nullable=False, server_default=sa.text("''"))
        )
        deliveries.add_column(
            sa.Column("failures", sa.Integer(), nullable=False, server_default=sa.text("0"))
        )
        deliveries.add_column(sa.Column("reason", sa.Text(), nullable=True))
        deliveries.alter_column("job_id", existing_type=sa.Text(), nullable=True)
        deliveries.drop_constraint("uq_deliveries_event_id_url", type_="unique")
        deliveries.create_unique_constraint(
            "uq_deliveries_event_id_endpoint_id", ["event_id", "endpoint_id"]
        )
    op.create_index("ix_deliveries_tenant_created_at", "deliveries", ["tenant", "created_at"])
    op.create_index(
        "ix_deliveries_endpoint",
        "deliveries",
        ["endpoint_id", "id"],
        sqlite_where=_REGISTERED,
        postgresql_where=_REGISTERED,
    )
    op.create_index(
        "ix_deliveries_pending",
        "deliveries",
        ["receiver", "due_at"],
        sqlite_where=_PENDING,
        postgresql_where=_PENDING,
    )


def downgrade() -> None:
    op.execute("DELETE FROM deliveries WHERE endpoint_id <> '' OR job_id IS NULL")
    op.execute("DELETE FROM events WHERE job_id IS NULL")
    for name in ("pending", "endpoint", "tenant_created_at"):
        op.drop_index(f"ix_deliveries_{name}", "deliveries")
    with op.batch_alter_table("deliveries") as deliveries:
        deliveries.drop_constraint("uq_deliveries_event_id_endpoint_id", type_="unique")
        deliveries.create_unique_constraint("uq_deliveries_event_id_url", ["event_id", "url"])
        deliveries.alter_column("job_id", existing_type=sa.Text(), nullable=False)
        for name in ("endpoint_id", "receiver", "failures", "reason"):
            deliveries.drop_column(name)
    op.create_index(
        "ix_deliveries_pending",
        "deliveries",
        ["due_at"],
        sqlite_where=_PENDING,
        postgresql_where=_PENDING,
    )
    with op.batch_alter_table("events", table_kwargs={"sqlite_autoincrement": True}) as events:
        events.alter_column("job_id", existing_type=sa.Text(), nullable=False)
    with op.batch_alter_table("tenants") as tenants:
        tenants.drop_column("old_webhook_secret")
        tenants.drop_column("old_webhook_secret_until_at")
    op.drop_table("receivers")
    op.drop_table("webhook_endpoints")
