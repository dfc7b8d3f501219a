"""The tables and their indexes. Moments are epoch seconds of the database's clock.

JSON documents are text; the request is compressed and opaque. The enumerations' values are the
contract's, ``lane`` is the position in ``contract.jobs.LANES``.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

__all__ = [
    "RARE",
    "attempts",
    "blobs",
    "bulk_chunks",
    "bulk_events",
    "bulks",
    "counters",
    "deliveries",
    "delivery_attempts",
    "events",
    "files",
    "idempotency_keys",
    "jobs",
    "metadata",
    "receipts",
    "receivers",
    "score_cache",
    "tenants",
    "throughput",
    "webhook_endpoints",
    "workers",
]

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_Sequence = BigInteger().with_variant(Integer, "sqlite")
_Json = JSON().with_variant(JSONB, "postgresql")


#: Ends that most jobs do not have. SQLite uses an index on it only for a query that says the same.
RARE = "state IN ('partial', 'failed', 'cancelled', 'expired')"
_BULK_END = "bulk_id IS NOT NULL AND type <> 'batch.progress'"
_IN_FLIGHT = "state = 'pending' AND worker IS NOT NULL"


def _partial(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    condition = text(where)
    return Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


jobs = Table(
    "jobs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("lane", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False),  # the fencing number: one per claim
    Column("generation", Integer, nullable=False),  # one terminal event per generation
    Column("version", Integer, nullable=False),
    Column("error_count", Integer, nullable=False),
    Column("crash_count", Integer, nullable=False),
    Column("worker", Text),
    Column("created_at", Float(53), nullable=False),
    Column("available_at", Float(53), nullable=False),  # later after an attempt that failed
    Column("lease_until_at", Float(53)),
    Column("hinted_at", Float(53)),
    Column("started_at", Float(53)),
    Column("finished_at", Float(53)),
    Column("cancel_requested_at", Float(53)),
    Column("queue_deadline_at", Float(53)),
    Column("expires_at", Float(53)),
    Column("deleted_at", Float(53)),  # a tombstone: the payload is gone
    Column("run_timeout_s", Float(53)),
    Column("expires_after_s", Float(53)),
    Column("item_count", Integer, nullable=False),
    Column("scored_count", Integer, nullable=False),
    Column("failed_count", Integer, nullable=False),
    Column("estimated_tokens", Integer, nullable=False),
    Column("metadata", _Json, nullable=False),
    Column("webhook_url", Text),
    Column("webhook_events", Text),
    Column("request", LargeBinary),
    Column("usage", Text),
    Column("result", Text),
    Column("error", Text),
    Column("receipt_hash", Text),
    Column("blob_key", Text),
    Column("tensors", Text),
    Column("bulk_id", Text),
    Column("bulk_chunk", Integer),  # the first line of its chunk
    Column("bulk_lines", Integer),  # how many of the bulk's lines it decides
    Column("origin", Text),  # JSON: the request that submitted it, and its trace
    Column("stored_bytes", BigInteger),  # its request and its tensors
    Index("ix_jobs_tenant_id", "tenant", "id"),
    # The claim's index: only queued rows are in it, so that it stays as small as the backlog.
    # In the order of available_at, which no other index has: PostgreSQL would take that one.
    _partial(
        "ix_jobs_queued", "model", "lane", "tenant", "available_at", "id", where="state = 'queued'"
    ),
    _partial("ix_jobs_running", "lease_until_at", where="state = 'running'"),
    _partial("ix_jobs_unhinted", "created_at", where="state = 'queued' AND hinted_at IS NULL"),
    _partial(
        "ix_jobs_queue_deadline",
        "queue_deadline_at",
        where="state = 'queued' AND queue_deadline_at IS NOT NULL",
    ),
    _partial(
        "ix_jobs_expires", "expires_at", where="expires_at IS NOT NULL AND deleted_at IS NULL"
    ),
    _partial("ix_jobs_bulk", "bulk_id", "id", where="bulk_id IS NOT NULL"),
    _partial("ix_jobs_blob", "blob_key", where="blob_key IS NOT NULL"),
    # Lists of what is rare: no row of a job that succeeds is in them.
    _partial("ix_jobs_ended", "tenant", "state", "id", where=RARE),
    _partial("ix_jobs_error", "tenant", "id", where="error IS NOT NULL"),
    _partial(
        "ix_jobs_forgotten", "deleted_at", where="deleted_at IS NOT NULL AND blob_key IS NOT NULL"
    ),
)

#: Attempts that did not end their job: lost, failed, released.
attempts = Table(
    "attempts",
    metadata,
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("worker", Text),
    Column("started_at", Float(53)),
    Column("ended_at", Float(53), nullable=False),
    Column("outcome", Text, nullable=False),
    Column("error", Text),
)

blobs = Table(
    "blobs",
    metadata,
    Column("key", Text, primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE")),  # none: not about a job
    Column("bulk_id", Text),  # its counters are in bulk_events, under the same id
    Column("generation", Integer, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    UniqueConstraint("job_id", "generation"),
    _partial("ix_events_bulk", "bulk_id", "sequence", where="bulk_id IS NOT NULL"),
    # One end of a bulk and run of it, whatever ends it.
    _partial("uq_events_bulk_end", "bulk_id", "generation", where=_BULK_END, unique=True),
    sqlite_autoincrement=True,  # a sequence number is never used twice
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", Text, primary_key=True),
    Column("event_id", Text, ForeignKey("events.id", ondelete="CASCADE"), nullable=False),
    Column("job_id", Text),
    Column("tenant", Text, nullable=False),
    # empty: the job's own URL
    Column("endpoint_id", Text, nullable=False, server_default=text("''")),
    Column("url", Text, nullable=False),
    # tenant and origin of the URL
    Column("receiver", Text, nullable=False, server_default=text("''")),
    Column("state", Text, nullable=False),  # pending, delivered, dead
    Column("attempt", Integer, nullable=False),  # the fencing number
    Column("failures", Integer, nullable=False, server_default=text("0")),  # steps up the ladder
    Column("worker", Text),  # who is at it now
    Column("created_at", Float(53), nullable=False),
    Column("due_at", Float(53), nullable=False),  # while claimed: the lease's end
    Column("finished_at", Float(53)),
    Column("reason", Text),  # why it is dead
    UniqueConstraint("event_id", "endpoint_id"),
    Index("ix_deliveries_job_id", "job_id"),
    Index("ix_deliveries_tenant_created_at", "tenant", "created_at"),
    _partial("ix_deliveries_endpoint", "endpoint_id", "id", where="endpoint_id <> ''"),
    # The claim's index: a loose scan of it finds the receivers, and of each what is due first.
    _partial("ix_deliveries_pending", "receiver", "due_at", where="state = 'pending'"),
    # What is on its way now, as few as there are places: the claim counts it.
    _partial("ix_deliveries_in_flight", "receiver", where=_IN_FLIGHT),
    _partial("ix_deliveries_dead", "id", where="state = 'dead'"),  # they are counted
)

#: Receivers whose last attempts failed, and until when they are left alone; the others have no row.
receivers = Table(
    "receivers",
    metadata,
    Column("name", Text, primary_key=True),
    Column("failures", Integer, nullable=False),
    Column("failing_since_at", Float(53), nullable=False),
    Column("paused_until_at", Float(53), nullable=False),
)

webhook_endpoints = Table(
    "webhook_endpoints",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("events", Text),  # none: all of them
    Column("secret", Text, nullable=False),
    Column("old_secret", Text),
    Column("old_secret_until_at", Float(53)),
    Column("created_at", Float(53), nullable=False),
    Column("updated_at", Float(53), nullable=False),
    Column("failing_since_at", Float(53)),  # the first failure since the last success
    Column("disabled_at", Float(53)),
    Column("disabled_reason", Text),
    Index("ix_webhook_endpoints_tenant_id", "tenant", "id"),
)

delivery_attempts = Table(
    "delivery_attempts",
    metadata,
    Column("delivery_id", Text, ForeignKey("deliveries.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("created_at", Float(53), nullable=False),
    Column("status", Integer),
    Column("latency_s", Float(53), nullable=False),
    Column("error", Text),
    Column("answer", Text),
)

receipts = Table(
    "receipts",
    metadata,
    Column("hash", Text, primary_key=True),
    Column("body", LargeBinary, nullable=False),
    Column("created_at", Float(53), nullable=False),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("route", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("body_hash", Text, nullable=False),
    Column("job_id", Text),
    Column("created_at", Float(53), nullable=False),
    Index("ix_idempotency_keys_created_at", "created_at"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", Text, primary_key=True),
    Column("webhook_secret", Text, nullable=False),
    Column("old_webhook_secret", Text),
    Column("old_webhook_secret_until_at", Float(53)),
    Column("created_at", Float(53), nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("device", Text, nullable=False),
    Column("models", Text, nullable=False),
    Column("started_at", Float(53), nullable=False),
    Column("heartbeat_at", Float(53), nullable=False),
    Column("memory_bytes", BigInteger),
    Column("device_memory_bytes", BigInteger),
    Column("device_memory_total_bytes", BigInteger),
)

#: What was done in each ten seconds of the last hour.
throughput = Table(
    "throughput",
    metadata,
    Column("slot", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, primary_key=True),
    Column("value", Float(53), nullable=False),
)

counters = Table(
    "counters",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Float(53), nullable=False),
)

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
    Column("metadata", _Json, nullable=False),
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
    _partial("ix_bulks_open", "lease_until_at", where="finished_at IS NULL"),
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
    _partial("ix_bulk_chunks_open", "bulk_id", "first_line", where="open_jobs > 0"),
)

bulk_events = Table(
    "bulk_events",
    metadata,
    Column("sequence", _Sequence, primary_key=True, autoincrement=True),
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
)
