"""The tables and their indexes. Moments are epoch seconds of the database's clock.

JSON documents are text; the request is compressed and opaque. The enumerations' values are the
contract's, ``lane`` is the position in ``contract.jobs.LANES``. The tables of bulks are in
``bulk_tables``, those of who may do what in ``access_tables``.
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
    "BULK_END",
    "JSON_DOCUMENT",
    "PARKED_AT",
    "RARE",
    "SEQUENCE",
    "attempts",
    "blobs",
    "counters",
    "deliveries",
    "delivery_attempts",
    "events",
    "idempotency_keys",
    "jobs",
    "metadata",
    "partial_index",
    "receipts",
    "receivers",
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

SEQUENCE = BigInteger().with_variant(Integer, "sqlite")
JSON_DOCUMENT = JSON().with_variant(JSONB, "postgresql")


#: Ends that most jobs do not have. SQLite uses an index on it only for a query that says the same.
RARE = "state IN ('partial', 'failed', 'cancelled', 'expired')"
#: Beyond any moment: what a paused bulk holds back becomes available then, that is never.
PARKED_AT = "1e15"
#: What ends a run of a bulk: there is one.
BULK_END = "bulk_id IS NOT NULL AND type <> 'batch.progress'"
_IN_FLIGHT = "state = 'pending' AND worker IS NOT NULL"


def partial_index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """Return an index of the rows for which ``where`` holds."""
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
    Column("metadata", JSON_DOCUMENT, nullable=False),
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
    Column("cache", Text),  # read or refresh; of a bulk's jobs the bulk's reader sees to it
    Index("ix_jobs_tenant_id", "tenant", "id"),
    # The claim's index: only queued rows are in it, so that it stays as small as the backlog.
    # In the order of available_at, which no other index has: PostgreSQL would take that one.
    partial_index(
        "ix_jobs_queued", "model", "lane", "tenant", "available_at", "id", where="state = 'queued'"
    ),
    partial_index("ix_jobs_running", "lease_until_at", where="state = 'running'"),
    partial_index("ix_jobs_unhinted", "created_at", where="state = 'queued' AND hinted_at IS NULL"),
    partial_index(
        "ix_jobs_queue_deadline",
        "queue_deadline_at",
        where="state = 'queued' AND queue_deadline_at IS NOT NULL",
    ),
    partial_index(
        "ix_jobs_expires", "expires_at", where="expires_at IS NOT NULL AND deleted_at IS NULL"
    ),
    partial_index("ix_jobs_bulk", "bulk_id", "id", where="bulk_id IS NOT NULL"),
    partial_index("ix_jobs_blob", "blob_key", where="blob_key IS NOT NULL"),
    # Lists of what is rare: no row of a job that succeeds is in them.
    partial_index("ix_jobs_ended", "tenant", "state", "id", where=RARE),
    partial_index("ix_jobs_error", "tenant", "id", where="error IS NOT NULL"),
    partial_index(
        "ix_jobs_forgotten", "deleted_at", where="deleted_at IS NOT NULL AND blob_key IS NOT NULL"
    ),
    partial_index(
        "ix_jobs_tombstones", "deleted_at", where="deleted_at IS NOT NULL AND blob_key IS NULL"
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
    Column("sequence", SEQUENCE, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE")),  # none: not about a job
    Column("bulk_id", Text),  # its counters are in bulk_events, under the same id
    Column("generation", Integer, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    UniqueConstraint("job_id", "generation"),
    partial_index("ix_events_bulk", "bulk_id", "sequence", where="bulk_id IS NOT NULL"),
    # Those that are purged. With job_id, or SQLite would take the unique one and sort.
    partial_index("ix_events_no_job", "job_id", "created_at", where="job_id IS NULL"),
    # One end of a bulk and run of it, whatever ends it.
    partial_index("uq_events_bulk_end", "bulk_id", "generation", where=BULK_END, unique=True),
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
    partial_index("ix_deliveries_endpoint", "endpoint_id", "id", where="endpoint_id <> ''"),
    # The claim's index: a loose scan of it finds the receivers, and of each what is due first.
    partial_index("ix_deliveries_pending", "receiver", "due_at", where="state = 'pending'"),
    # What is on its way now, as few as there are places: the claim counts it.
    partial_index("ix_deliveries_in_flight", "receiver", where=_IN_FLIGHT),
    partial_index("ix_deliveries_dead", "id", where="state = 'dead'"),  # they are counted
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
