"""Webhooks of bulks, places of receivers counted for the fleet, and where jobs come from.

New columns that may be null or have a default, and indexes: code that does not know them goes on.
Revision 0006, after 0005.
"""

import sqlalchemy as sa
from alembic import op

from storage.indexing import build_index, is_postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_BULK_COLUMNS = ("generation", "progress_step", "webhook_url", "webhook_events")


def upgrade() -> None:
    again = is_postgresql()  # it may have been interrupted; SQLite does all or nothing
    for table, name in (("jobs", "origin"), ("events", "bulk_id")):
        op.add_column(table, sa.Column(name, sa.Text(), nullable=True), if_not_exists=again)
    for name in _BULK_COLUMNS[:2]:
        column = sa.Column(name, sa.Integer(), nullable=False, server_default=sa.text("0"))
        op.add_column("bulks", column, if_not_exists=again)
    for name in _BULK_COLUMNS[2:]:
        op.add_column("bulks", sa.Column(name, sa.Text(), nullable=True), if_not_exists=again)
    build_index("events", "ix_events_bulk", ["bulk_id", "sequence"], where="bulk_id IS NOT NULL")
    build_index(
        "events",
        "uq_events_bulk_end",
        ["bulk_id", "generation"],
        where="bulk_id IS NOT NULL AND type <> 'batch.progress'",
        unique=True,
    )
    build_index(
        "deliveries",
        "ix_deliveries_in_flight",
        ["receiver"],
        where="state = 'pending' AND worker IS NOT NULL",
    )


def downgrade() -> None:
    op.drop_index("ix_deliveries_in_flight", "deliveries")
    op.drop_index("uq_events_bulk_end", "events")
    op.drop_index("ix_events_bulk", "events")
    for table, names in (("bulks", _BULK_COLUMNS), ("events", ("bulk_id",)), ("jobs", ("origin",))):
        for name in names:
            op.drop_column(table, name)
