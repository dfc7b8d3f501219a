"""What waits and what is stored, counted from the rows themselves.

There is no counter to keep right: a job that ended, however it ended, is not counted any more, and
no row is written by everybody. Who asks often keeps the answer for a while.
"""

from dataclasses import dataclass

from contract.jobs import LANES, Lane
from storage.database import Transaction
from storage.statements import execute
from storage.tables import PARKED_AT

__all__ = ["Waiting", "count_open_bulks", "read_stored_bytes", "read_waiting"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits of one tenant in one lane: jobs of their own, or ``in_bulks``."""

    tenant: str
    lane: Lane
    in_bulks: bool
    jobs: int
    tokens: int


async def read_waiting(tx: Transaction) -> list[Waiting]:
    """Return what waits, by tenant and lane, without what paused bulks hold back.

    Reads every queued row: keep the answer.
    """
    return [
        Waiting(row.tenant, LANES[row.lane], bool(row.in_bulks), row.jobs, int(row.tokens))
        for row in await execute(tx, _WAITING, {})
    ]


async def read_stored_bytes(tx: Transaction, tenant: str) -> int:
    """Return the bytes of a tenant's files, requests and results. Reads all its jobs' rows."""
    return int((await execute(tx, _STORED, {"tenant": tenant})).scalar_one())


async def count_open_bulks(tx: Transaction, tenant: str) -> int:
    """Return how many bulks of a tenant have not ended, this transaction's own among them.

    Two that open one at once count one after the other: the first keeps the other waiting.
    """
    if tx.dialect.name == "postgresql":  # SQLite's writers take turns anyway
        await execute(tx, _TURN, {"tenant": tenant})
    count: int = (await execute(tx, _OPEN_BULKS, {"tenant": tenant})).scalar_one()
    return count


_WAITING = f"""
SELECT tenant, lane, CASE WHEN bulk_id IS NULL THEN 0 ELSE 1 END AS in_bulks,
       count(*) AS jobs, sum(estimated_tokens) AS tokens
FROM jobs WHERE state = 'queued' AND available_at < {PARKED_AT} GROUP BY 1, 2, 3
"""  # noqa: S608  # constants of ours

_STORED = """
SELECT (SELECT coalesce(sum(size_bytes), 0) FROM files
        WHERE tenant = :tenant AND deleted_at IS NULL)
     + (SELECT coalesce(sum(stored_bytes), 0) FROM jobs
        WHERE tenant = :tenant AND deleted_at IS NULL)
"""

#: Marks our advisory locks: the first of their two keys, the second is the tenant's hash.
_TURN = "SELECT pg_advisory_xact_lock(7360003, hashtext(:tenant))"

_OPEN_BULKS = """
SELECT count(*) FROM bulks
WHERE tenant = :tenant AND finished_at IS NULL AND deleted_at IS NULL
"""
