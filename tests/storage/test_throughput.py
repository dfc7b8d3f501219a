"""Throughput by slots of ten seconds: added up, read as series, forgotten after an hour."""

from storage.database import Database
from storage.throughput import MEASURES, SLOT_S, add_throughput, read_throughput
from tests.storage.factories import count, run_sql


async def test_growth_is_added_to_the_present_slot(database: Database) -> None:
    """Twice is the sum; what is no measure is left out; empty slots are zero."""
    async with database.transaction() as tx:
        await add_throughput(tx, {"jobs_completed": 2, "commits": 9, "items_scored": 0})
        await add_throughput(tx, {"jobs_completed": 3, "tokens_scored": 70})
        read = await read_throughput(tx, slots=6)

    assert set(read.series) == set(MEASURES)
    assert {len(series) for series in read.series.values()} == {6}
    assert sum(read.series["jobs_completed"]) == 5
    assert sum(read.series["tokens_scored"]) == 70
    assert sum(read.series["items_scored"]) == 0
    assert read.last_at % SLOT_S == 0


async def test_older_slots_stand_before_newer_ones(database: Database) -> None:
    """Each slot has its place; those before the first that was asked for are not read."""
    async with database.transaction() as tx:
        await add_throughput(tx, {"items_scored": 1})
    await run_sql(
        database,
        "INSERT INTO throughput SELECT slot - 2, name, 20 FROM throughput"
        " UNION ALL SELECT slot - 30, name, 300 FROM throughput",
    )

    async with database.snapshot() as tx:
        read = await read_throughput(tx, slots=10)

    series = read.series["items_scored"]
    assert sum(series) == 21
    assert series.index(1) - series.index(20) == 2


async def test_an_hour_is_kept(database: Database) -> None:
    """Whoever adds removes what is older: the table does not grow."""
    async with database.transaction() as tx:
        await add_throughput(tx, {"items_scored": 1})
    await run_sql(
        database,
        "INSERT INTO throughput SELECT slot - 300, name, 1 FROM throughput"
        " UNION ALL SELECT slot - 3600, name, 1 FROM throughput",
    )

    async with database.transaction() as tx:
        await add_throughput(tx, {"jobs_completed": 1})
        left = await count(tx, "throughput")

    assert left == 3
