"""What finds old events that are about no job, and the cached scores of a job.

Only indexes. Revision 0010, after 0009.
"""

from alembic import op

from storage.indexing import build_index

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    build_index("events", "ix_events_no_job", ["job_id", "created_at"], where="job_id IS NULL")
    build_index("score_cache", "ix_score_cache_job_id", ["job_id"])


def downgrade() -> None:
    op.drop_index("ix_score_cache_job_id", "score_cache")
    op.drop_index("ix_events_no_job", "events")
