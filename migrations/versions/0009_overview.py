"""What the overview shows: workers' memory, throughput of the last hour; dead deliveries.

Revision 0009, after 0008. Works with the code before it: new columns may be null, nothing is moved.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_MEMORY = ("memory_bytes", "device_memory_bytes", "device_memory_total_bytes")
_DEAD = sa.text("state = 'dead'")


def upgrade() -> None:
    for name in _MEMORY:
        op.add_column("workers", sa.Column(name, sa.BigInteger(), nullable=True))
    op.create_table(
        "throughput",
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("slot", "name", name=op.f("pk_throughput")),
    )
    op.create_index(
        "ix_deliveries_dead",
        "deliveries",
        ["id"],
        sqlite_where=_DEAD,
        postgresql_where=_DEAD,
    )


def downgrade() -> None:
    op.drop_index("ix_deliveries_dead", "deliveries")
    op.drop_table("throughput")
    for name in _MEMORY:
        op.drop_column("workers", name)
