"""Webhooks of bulks, places of receivers counted for the fleet, and where jobs come from.

New columns that may be null or have a default, and indexes: code that does not know them goes on.
Revision 0006, after 0005.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_BULK = sa.text("bulk_id IS NOT NULL")
_END = sa.text("bulk_id IS NOT NULL AND type <> 'batch.progress'")
_IN_FLIGHT = sa.text("state = 'pending' AND worker IS NOT NULL")
_BULK_COLUMNS = ("generation", "progress_step", "webhook_url", "webhook_events")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("origin", sa.Text(), nullable=True))
    op.add_column("events", sa.Column("bulk_id", sa.Text(), nullable=True))
    for name in _BULK_COLUMNS[:2]:
        column = sa.Column(name, sa.Integer(), nullable=False, server_default=sa.text("0"))
        op.add_column("bulks", column)
    for name in _BULK_COLUMNS[2:]:
        op.add_column("bulks", sa.Column(name, sa.Text(), nullable=True))
    op.create_index(
        "ix_events_bulk",
        "events",
        ["bulk_id", "sequence"],
        unique=False,
        sqlite_where=_BULK,
        postgresql_where=_BULK,
    )
    op.create_index(
        "uq_events_bulk_end",
        "events",
        ["bulk_id", "generation"],
        unique=True,
        sqlite_where=_END,
        postgresql_where=_END,
    )
    op.create_index(
        "ix_deliveries_in_flight",
        "deliveries",
        ["receiver"],
        unique=False,
        sqlite_where=_IN_FLIGHT,
        postgresql_where=_IN_FLIGHT,
    )


def downgrade() -> None:
    op.drop_index("ix_deliveries_in_flight", "deliveries")
    op.drop_index("uq_events_bulk_end", "events")
    op.drop_index("ix_events_bulk", "events")
    for table, names in (("bulks", _BULK_COLUMNS), ("events", ("bulk_id",)), ("jobs", ("origin",))):
        for name in names:
            op.drop_column(table, name)
