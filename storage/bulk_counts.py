"""The counters of bulks: written in the transaction that ends a job, one row per chunk of lines.

No row of the bulk itself is touched, so that workers do not queue for it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from sqlalchemy import Row

from contract.bulks import ENDED_BULKS, BulkCounts, BulkState
from contract.jobs import JobState
from contract.scores import Usage
from storage.database import Transaction
from storage.statements import execute, pack

__all__ = ["Tally", "count_ended", "read_counts", "sum_chunks", "uncount"]


@dataclass(slots=True)
class Tally:
    """What became of lines and items; of a chunk, or of all of a bulk."""

    lines_completed: int = 0
    lines_failed: int = 0
    lines_cancelled: int = 0
    scored: int = 0
    failed: int = 0
    cancelled: int = 0
    from_cache: int = 0
    tokens: int = 0
    estimated_tokens: int = 0


async def count_ended(tx: Transaction, ended: Sequence[Row[Any]]) -> None:
    """Count jobs that ended, rows with the columns ``events.ENDED``, on their chunks."""
    await _count(tx, ended, 1)


async def uncount(tx: Transaction, ended: Sequence[Row[Any]]) -> None:
    """Take back what ``count_ended`` counted: these jobs, rows as they were, run again."""
    await _count(tx, ended, -1)


async def _count(tx: Transaction, ended: Sequence[Row[Any]], sign: int) -> None:
    if not ended:
        return
    chunks: dict[tuple[str, int], list[Row[Any]]] = defaultdict(list)
    for row in ended:
        chunks[row.bulk_id, row.bulk_chunk].append(row)
    rows = []
    for (bulk_id, first_line), jobs in chunks.items():
        tally = Tally()
        for row in jobs:
            _add(tally, row)
        counts = {f"new_{name}": sign * value for name, value in asdict(tally).items()}
        chunk = {"bulk_id": bulk_id, "first_line": first_line, "jobs": sign * len(jobs)}
        rows.append(chunk | counts)
    await execute(tx, _COUNT, {"rows": pack(rows)})


async def sum_chunks(tx: Transaction, bulk_id: str) -> tuple[Tally, int, bool]:
    """Return a bulk's counters, its items so far, and whether some of its jobs are open."""
    row = (await execute(tx, _SUM, {"bulk_id": bulk_id})).one()
    names = Tally.__dataclass_fields__
    return (
        Tally(**{name: int(getattr(row, name) or 0) for name in names}),
        int(row.items or 0),
        bool(row.open_jobs),
    )


async def read_counts(tx: Transaction, bulk_id: str) -> BulkCounts:
    """Return what became of a bulk's lines and items so far, as its clients see it."""
    bulk = (await execute(tx, _TOTALS, {"bulk_id": bulk_id})).one()
    tally, items, _ = await sum_chunks(tx, bulk_id)
    lines_cancelled, lines_failed = tally.lines_cancelled, tally.lines_failed
    if bulk.state == BulkState.FAILED and not bulk.ingested_lines:
        lines_failed = bulk.refused_lines
    elif bulk.state in ENDED_BULKS:  # lines that were never stored went with the others
        lines_cancelled += bulk.total_lines - bulk.ingested_lines
    changed = {"lines_cancelled": lines_cancelled, "lines_failed": lines_failed}
    return BulkCounts(**(asdict(tally) | changed), lines=bulk.total_lines, items=items)


def _add(tally: Tally, row: Row[Any]) -> None:
    """A job decides one line, or several of one item each: then items are lines."""
    lines, items = int(row.bulk_lines), int(row.item_count)
    if row.usage is not None:
        tally.tokens += msgspec.json.decode(row.usage, type=Usage).prompt_tokens
    if row.state == JobState.CANCELLED:
        tally.cancelled += items
        tally.lines_cancelled += lines
        return
    scored = int(row.scored_count)
    tally.scored += scored
    tally.failed += items - scored
    completed = min(lines, scored) if items else lines
    tally.lines_completed += completed
    tally.lines_failed += lines - completed


_NAMES = list(Tally.__dataclass_fields__)

_COUNT = f"""
WITH counted AS MATERIALIZED (
    SELECT c.bulk_id AS held_bulk, c.first_line AS held_line, r.jobs,
           {", ".join(f"r.new_{name}" for name in _NAMES)}
    FROM bulk_chunks c JOIN
    {{rows(bulk_id text, first_line integer, jobs integer,
           {", ".join(f"new_{name} integer" for name in _NAMES)})}} r
    ON r.bulk_id = c.bulk_id AND r.first_line = c.first_line
    ORDER BY c.bulk_id, c.first_line {{lock c}})
UPDATE bulk_chunks SET open_jobs = open_jobs - jobs,
    {", ".join(f"{name} = {name} + new_{name}" for name in _NAMES)}
FROM counted WHERE bulk_id = held_bulk AND first_line = held_line
"""  # noqa: S608  # constants of ours

_SUM = f"""
SELECT {", ".join(f"sum({name}) AS {name}" for name in _NAMES)},
       sum(item_count) AS items, max(open_jobs) AS open_jobs
FROM bulk_chunks WHERE bulk_id = :bulk_id
"""  # noqa: S608  # constants of ours

_TOTALS = """
SELECT state, total_lines, refused_lines, ingested_lines FROM bulks WHERE id = :bulk_id
"""
