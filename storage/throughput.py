"""What all workers did lately, in slots of ten seconds: the only place for throughput over time.

Workers add to the slot of the database's clock; the last hour is kept, the table stays small.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from storage.database import Transaction
from storage.statements import execute, pack

__all__ = ["MEASURES", "SLOT_S", "Throughput", "add_throughput", "read_throughput"]

#: How long a slot is.
SLOT_S = 10
#: The counters whose growth is kept by slot.
MEASURES = ("jobs_completed", "items_scored", "tokens_scored")
_KEPT_SLOTS = 3600 // SLOT_S


@dataclass(frozen=True, slots=True)
class Throughput:
    """Growth by measure, oldest slot first; the last slot, which began at ``last_at``, goes on."""

    last_at: float
    series: dict[str, list[float]]


async def add_throughput(tx: Transaction, counts: Mapping[str, float]) -> None:
    """Add the growth of ``MEASURES`` to the present slot; forget slots that are an hour old."""
    rows = [{"name": name, "value": counts[name]} for name in sorted(MEASURES) if counts.get(name)]
    if rows:
        await execute(tx, _ADD, {"rows": pack(rows)})
        await execute(tx, _FORGET, {"slots": _KEPT_SLOTS})


async def read_throughput(tx: Transaction, *, slots: int) -> Throughput:
    """Return the last ``slots`` slots; those in which nothing was done are zero."""
    last = int((await execute(tx, _NOW, {})).scalar_one())
    first = last - slots + 1
    series = {name: [0.0] * slots for name in MEASURES}
    for row in await execute(tx, _READ, {"first": first, "last": last}):
        if row.name in series:
            series[row.name][row.slot - first] = row.value
    return Throughput(last_at=float(last * SLOT_S), series=series)


#: The floor, in words that SQLite and PostgreSQL share.
_SLOT = f"CAST(round({{now}} / {SLOT_S} - 0.5) AS INTEGER)"

_NOW = f"SELECT {_SLOT} AS slot"

_ADD = f"""
INSERT INTO throughput (slot, name, value)
SELECT {_SLOT}, r.name, r.value FROM {{rows(name text, value real)}} r WHERE true ORDER BY r.name
ON CONFLICT (slot, name) DO UPDATE SET value = throughput.value + excluded.value
"""  # noqa: S608  # constants of ours

_FORGET = f"DELETE FROM throughput WHERE slot < {_SLOT} - :slots"  # noqa: S608  # constants of ours

_READ = "SELECT slot, name, value FROM throughput WHERE slot BETWEEN :first AND :last"
