"""How attempts ended that did not end their job, and indexes for lists of what is rare.

A new table, and indexes that hold no row of a job that succeeds. On PostgreSQL they are built while
others write, outside of any transaction: after an interruption they are built anew.
Revision 0005, after 0001.
"""

import sqlalchemy as sa
from alembic import op

from storage.indexing import build_index

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_INDEXES = {
    "ix_jobs_ended": (
        ["tenant", "state", "id"],
        "state IN ('partial', 'failed', 'cancelled', 'expired')",
    ),
    "ix_jobs_error": (["tenant", "id"], "error IS NOT NULL"),
}


def upgrade() -> None:
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Float(precision=53), nullable=True),
        sa.Column("ended_at", sa.Float(precision=53), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "attempt", name=op.f("pk_attempts")),
        if_not_exists=True,
    )
    for name, (columns, where) in _INDEXES.items():
        build_index("jobs", name, columns, where=where)


def downgrade() -> None:
    for name in _INDEXES:
        op.drop_index(name, "jobs")
    op.drop_table("attempts")
