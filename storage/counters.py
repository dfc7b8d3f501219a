"""Counters of the whole installation: workers add what they did, the API shows the sums.

They outlive every process, so that they only grow; what a killed worker had not added is missing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from storage.database import Transaction
from storage.statements import execute, pack

__all__ = ["Backlog", "add_counts", "read_backlog", "read_counts"]


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is under way beside the queue. ``overdue_s`` is of the oldest delivery."""

    running_jobs: int
    pending_deliveries: int
    overdue_s: float
    dead_deliveries: int


async def add_counts(tx: Transaction, counts: Mapping[str, float]) -> None:
    """Add to the counters; one that is new begins at zero."""
    rows = [{"name": name, "value": counts[name]} for name in sorted(counts) if counts[name]]
    if rows:
        await execute(tx, _ADD, {"rows": pack(rows)})


async def read_counts(tx: Transaction) -> dict[str, float]:
    """Return every counter by name."""
    return {row.name: row.value for row in await execute(tx, _READ, {})}


async def read_backlog(tx: Transaction) -> Backlog:
    """Return what runs and what is to be delivered."""
    row = (await execute(tx, _BACKLOG, {})).one()
    return Backlog(row.running, row.pending, max(0.0, float(row.overdue or 0.0)), row.dead)


_ADD = """
INSERT INTO counters (name, value)
SELECT r.name, r.value FROM {rows(name text, value real)} r WHERE true ORDER BY r.name
ON CONFLICT (name) DO UPDATE SET value = counters.value + excluded.value
"""

_READ = "SELECT name, value FROM counters"

_BACKLOG = """
SELECT
    (SELECT count(*) FROM jobs WHERE state = 'running') AS running,
    (SELECT count(*) FROM deliveries WHERE state = 'pending') AS pending,
    (SELECT {now} - min(due_at) FROM deliveries WHERE state = 'pending') AS overdue,
    (SELECT count(*) FROM deliveries WHERE state = 'dead') AS dead
"""
