"""Files, bulks, their chunks and events, and the score cache; jobs know their bulk.

New tables and nullable columns: code that does not know them goes on beside it.
Revision 0004, after 0001.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "bulks",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column(
            "metadata", sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False
        ),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("body_hash", sa.Text(), nullable=True),
        sa.Column("errors", sa.Text(), nullable=True),
        sa.Column("total_lines", sa.BigInteger(), nullable=False),
        sa.Column("refused_lines", sa.BigInteger(), nullable=False),
        sa.Column("ingested_lines", sa.BigInteger(), nullable=False),
        sa.Column("ingested_items", sa.BigInteger(), nullable=False),
        sa.Column("indexed_lines", sa.BigInteger(), nullable=False),
        sa.Column("output_file_id", sa.Text(), nullable=True),
        sa.Column("error_file_id", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("lease_until_at", sa.Float(precision=53), nullable=True),
        sa.Column("paused_at", sa.Float(precision=53), nullable=True),
        sa.Column("final_state", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("started_at", sa.Float(precision=53), nullable=True),
        sa.Column("finalizing_at", sa.Float(precision=53), nullable=True),
        sa.Column("cancelling_at", sa.Float(precision=53), nullable=True),
        sa.Column("finished_at", sa.Float(precision=53), nullable=True),
        sa.Column("deadline_at", sa.Float(precision=53), nullable=True),
        sa.Column("deleted_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bulks")),
        sa.UniqueConstraint("tenant", "key", name=op.f("uq_bulks_tenant_key")),
    )
    op.create_index(
        "ix_bulks_open",
        "bulks",
        ["lease_until_at"],
        unique=False,
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_index("ix_bulks_tenant_id", "bulks", ["tenant", "id"], unique=False)
    op.create_table(
        "files",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("part_bytes", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("expires_at", sa.Float(precision=53), nullable=True),
        sa.Column("deleted_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index("ix_files_tenant_id", "files", ["tenant", "id"], unique=False)
    op.create_table(
        "score_cache",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("first_item", sa.Integer(), nullable=False),
        sa.Column("item_count", sa.Integer(), nullable=False),
        sa.Column("has_hidden", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_score_cache")),
    )
    op.create_table(
        "bulk_chunks",
        sa.Column("bulk_id", sa.Text(), nullable=False),
        sa.Column("first_line", sa.BigInteger(), nullable=False),
        sa.Column("line_count", sa.Integer(), nullable=False),
        sa.Column("first_item", sa.BigInteger(), nullable=False),
        sa.Column("item_count", sa.Integer(), nullable=False),
        sa.Column("lines", sa.LargeBinary(), nullable=False),
        sa.Column("sources", sa.LargeBinary(), nullable=False),
        sa.Column("open_jobs", sa.Integer(), nullable=False),
        sa.Column("lines_completed", sa.Integer(), nullable=False),
        sa.Column("lines_failed", sa.Integer(), nullable=False),
        sa.Column("lines_cancelled", sa.Integer(), nullable=False),
        sa.Column("scored", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Integer(), nullable=False),
        sa.Column("cancelled", sa.Integer(), nullable=False),
        sa.Column("from_cache", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("estimated_tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["bulk_id"], ["bulks.id"], name=op.f("fk_bulk_chunks_bulk_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("bulk_id", "first_line", name=op.f("pk_bulk_chunks")),
    )
    op.create_index(
        "ix_bulk_chunks_open",
        "bulk_chunks",
        ["bulk_id", "first_line"],
        unique=False,
        sqlite_where=sa.text("open_jobs > 0"),
        postgresql_where=sa.text("open_jobs > 0"),
    )
    op.create_table(
        "bulk_events",
        sa.Column(
            "sequence",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("bulk_id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(
            ["bulk_id"], ["bulks.id"], name=op.f("fk_bulk_events_bulk_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_bulk_events")),
        sa.UniqueConstraint("id", name=op.f("uq_bulk_events_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_bulk_events_bulk_id", "bulk_events", ["bulk_id", "sequence"], unique=False)
    op.add_column("jobs", sa.Column("bulk_id", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("bulk_chunk", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("bulk_lines", sa.Integer(), nullable=True))
    op.create_index(
        "ix_jobs_bulk",
        "jobs",
        ["bulk_id", "id"],
        unique=False,
        sqlite_where=sa.text("bulk_id IS NOT NULL"),
        postgresql_where=sa.text("bulk_id IS NOT NULL"),
    )


def downgrade() -> None:
    with op.batch_alter_table("jobs") as batch:
        batch.drop_index("ix_jobs_bulk")
        for name in ("bulk_id", "bulk_chunk", "bulk_lines"):
            batch.drop_column(name)
    for name in ("score_cache", "bulk_events", "bulk_chunks", "bulks", "files"):
        op.drop_table(name)
