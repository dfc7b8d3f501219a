"""What finds the tombstones of jobs that are old enough to be purged.

Only an index. Revision 0012, after 0011.
"""

from alembic import op

from storage.indexing import build_index

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    build_index(
        "jobs",
        "ix_jobs_tombstones",
        ["deleted_at"],
        where="deleted_at IS NOT NULL AND blob_key IS NULL",
    )


def downgrade() -> None:
    op.drop_index("ix_jobs_tombstones", "jobs")
