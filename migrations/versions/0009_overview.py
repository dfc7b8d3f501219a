"""What the overview shows: workers' memory, throughput of the last hour; dead deliveries.

Revision 0009, after 0008. Works with the code before it: new columns may be null, nothing is moved.
"""

import sqlalchemy as sa
from alembic import op

from storage.indexing import build_index, is_postgresql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_MEMORY = ("memory_bytes", "device_memory_bytes", "device_memory_total_bytes")


def upgrade() -> None:
    again = is_postgresql()  # it may have been interrupted; SQLite does all or nothing
    for name in _MEMORY:
        column = sa.Column(name, sa.BigInteger(), nullable=True)
        op.add_column("workers", column, if_not_exists=again)
    op.create_table(
        "throughput",
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("slot", "name", name=op.f("pk_throughput")),
        if_not_exists=True,
    )
    build_index("deliveries", "ix_deliveries_dead", ["id"], where="state = 'dead'")


def downgrade() -> None:
    op.drop_index("ix_deliveries_dead", "deliveries")
    op.drop_table("throughput")
    for name in _MEMORY:
        op.drop_column("workers", name)
