"""The tables of bulks, their files and the score cache, in the metadata of ``storage.tables``."""

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from storage.tables import JSON_DOCUMENT, SEQUENCE, metadata, partial_index

__all__ = ["bulk_chunks", "bulk_events", "bulks", "files", "score_cache"]

files = Table(
    "files",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("state", Text, nullable=False),  # uploading, ready; its bytes are files/{id}/{part}
    Column("part_bytes", BigInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53)),
    Column("deleted_at", Float(53)),
    Index("ix_files_tenant_id", "tenant", "id"),
)

bulks = Table(
    "bulks",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("kind", Text, nullable=False),  # bulk, or batch: made by the OpenAI routes
    Column("state", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("options", Text, nullable=False),
    Column("metadata", JSON_DOCUMENT, nullable=False),
    Column("key", Text),
    Column("body_hash", Text),
    Column("errors", Text),
    Column("total_lines", BigInteger, nullable=False),
    Column("refused_lines", BigInteger, nullable=False),
    Column("ingested_lines", BigInteger, nullable=False),
    Column("ingested_items", BigInteger, nullable=False),
    Column("indexed_lines", BigInteger, nullable=False),  # of which the score cache knows
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    Column("attempt", Integer, nullable=False),  # the fencing number of whoever ingests it
    Column("generation", Integer, nullable=False, server_default=text("0")),  # one end per run
    Column("progress_step", Integer, nullable=False, server_default=text("0")),  # last announced
    Column("webhook_url", Text),
    Column("webhook_events", Text),
    Column("lease_until_at", Float(53)),
    Column("paused_at", Float(53)),
    Column("final_state", Text),  # what it becomes once it is let go
    Column("created_at", Float(53), nullable=False),
    Column("started_at", Float(53)),
    Column("finalizing_at", Float(53)),
    Column("cancelling_at", Float(53)),
    Column("finished_at", Float(53)),
    Column("deadline_at", Float(53)),
    Column("deleted_at", Float(53)),
    UniqueConstraint("tenant", "key"),
    Index("ix_bulks_tenant_id", "tenant", "id"),
    partial_index("ix_bulks_open", "lease_until_at", where="finished_at IS NULL"),
)

#: Some hundred consecutive lines of a bulk, and what became of them: the counters' rows.
bulk_chunks = Table(
    "bulk_chunks",
    metadata,
    Column("bulk_id", Text, ForeignKey("bulks.id", ondelete="CASCADE"), primary_key=True),
    Column("first_line", BigInteger, primary_key=True),  # from 0
    Column("line_count", Integer, nullable=False),
    Column("first_item", BigInteger, nullable=False),
    Column("item_count", Integer, nullable=False),
    Column("lines", LargeBinary, nullable=False),  # compressed: ids, items, refusals, input hashes
    Column("sources", LargeBinary, nullable=False),  # compressed: which items of which jobs
    Column("open_jobs", Integer, nullable=False),
    Column("lines_completed", Integer, nullable=False),
    Column("lines_failed", Integer, nullable=False),
    Column("lines_cancelled", Integer, nullable=False),
    Column("scored", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("cancelled", Integer, nullable=False),
    Column("from_cache", Integer, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("estimated_tokens", BigInteger, nullable=False),
    partial_index("ix_bulk_chunks_open", "bulk_id", "first_line", where="open_jobs > 0"),
)

bulk_events = Table(
    "bulk_events",
    metadata,
    Column("sequence", SEQUENCE, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("bulk_id", Text, ForeignKey("bulks.id", ondelete="CASCADE"), nullable=False),
    Column("type", Text, nullable=False),
    Column("data", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Index("ix_bulk_events_bulk_id", "bulk_id", "sequence"),
    sqlite_autoincrement=True,
)

score_cache = Table(
    "score_cache",
    metadata,
    Column("key", Text, primary_key=True),  # hash of what the model is and of the input
    Column("job_id", Text, nullable=False),
    Column("first_item", Integer, nullable=False),
    Column("item_count", Integer, nullable=False),
    Column("has_hidden", Integer, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Index("ix_score_cache_job_id", "job_id"),
)
