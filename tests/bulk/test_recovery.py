"""What goes wrong in the middle: readers that stop, lines that kill workers, tenants that share."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

from api.bulk import ingestion
from api.bulk.access import BULKS
from contract.errors import StoreUnavailableError
from storage.bulk_chunks import add_chunks, has_open_chunks
from storage.bulks import NewBulk, add_bulk, claim_bulk
from storage.claims import claim_jobs
from storage.database import Database, Transaction
from storage.sweeps import reap_jobs
from tests.bulk.bench import Bulks, rows


async def test_lines_beside_one_that_kills_workers_run_apart(bulks: Bulks) -> None:
    """A job of many lines that ended as poisoned is split; the others get their scores."""
    await bulks.service.report_ready()
    bulk_id = await bulks.start(rows(50), cache="off")
    bulk = await bulks.wait(bulk_id, "running")
    while bulk["ingested_lines"] < 50:
        bulk = await bulks.get(bulk_id)
    async with bulks.service.database.transaction() as tx:
        taken = await claim_jobs(
            tx, worker="dying", models=["tiny"], max_jobs=10, max_tokens=10**6, lease_s=-1
        )
        reaped = await reap_jobs(tx, max_crashes=1, limit=10)
    await bulks.start_worker()
    ended = await bulks.wait(bulk_id)

    assert len(taken) == len(reaped.failed) == 1
    assert ended["state"] == "completed"
    assert ended["counts"]["lines_completed"] == ended["counts"]["scored"] == 50
    assert ended["counts"]["failed"] == ended["counts"]["lines_failed"] == 0
    assert all(line["scores"][0] for line in await bulks.results(bulk_id))


async def test_ingestion_goes_on_where_it_stopped(
    bulks: Bulks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails after the first page: the next reader stores the rest, no line twice."""
    await bulks.start_worker()
    calls = 0

    async def fail_once(*arguments: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            message = "gone for a moment"
            raise StoreUnavailableError(message)
        await add_chunks(*arguments, **named)

    monkeypatch.setattr(ingestion, "add_chunks", fail_once)
    monkeypatch.setattr(ingestion, "_CHUNKS_A_COMMIT", 2)
    monkeypatch.setattr(ingestion, "LEASE_S", 1.0)
    monkeypatch.setattr("api.bulk.runner.LEASE_S", 1.0)
    bulk = await bulks.run(rows(2500))
    seen: list[int] = []
    while page := await bulks.results(bulk["id"], after=len(seen)):
        seen += [line["line"] for line in page]

    assert calls >= 4  # three pages, and one of them again
    assert bulk["counts"]["scored"] == bulk["counts"]["items"] == 2500
    assert seen == list(range(1, 2501))


async def test_a_reader_that_raises_ends_the_bulk(
    sqlite_bulks: Bulks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody foresaw: the bulk fails and says so, and nothing of it runs on."""

    def explode(*_: Any, **__: Any) -> None:
        message = "unforeseen"
        raise RuntimeError(message)

    await sqlite_bulks.service.report_ready()
    monkeypatch.setattr(ingestion, "pack_chunk", explode)
    bulk = await sqlite_bulks.run(rows(3))
    monkeypatch.setattr("api.bulk.runner.validate", explode)
    other = await sqlite_bulks.run(rows(3))

    assert bulk["state"] == other["state"] == "failed"
    assert bulk["errors"] == [{"code": "internal", "message": "RuntimeError"}]


async def test_a_bulk_whose_end_raises_stops_no_other(
    sqlite_bulks: Bulks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sweep names it in the log, goes on to the others, and comes back to it."""
    bad = ""

    async def raise_for_bad(tx: Transaction, bulk_id: str) -> bool:
        if bulk_id == bad:
            message = "unforeseen"
            raise RuntimeError(message)
        return await has_open_chunks(tx, bulk_id)

    await sqlite_bulks.service.report_ready()
    monkeypatch.setattr("api.bulk.runner.has_open_chunks", raise_for_bad)
    bad = await sqlite_bulks.start(rows(3))
    await sqlite_bulks.wait(bad, "running")
    await sqlite_bulks.start_worker()
    other = await sqlite_bulks.run(rows(3))
    named = {getattr(record, "bulk", "") for record in caplog.records}
    held = (await sqlite_bulks.get(bad))["state"]
    broken, bad = bad, ""
    ended = await sqlite_bulks.wait(broken)

    assert (other["state"], held, ended["state"]) == ("completed", "running", "completed")
    assert broken in named


async def test_urgent_work_overtakes_a_bulk(sqlite_bulks: Bulks) -> None:
    """A waiting route's job is taken before any line that still waits."""
    await sqlite_bulks.service.report_ready()
    bulk_id = await sqlite_bulks.start(rows(2000), cache="off")
    bulk = await sqlite_bulks.wait(bulk_id, "running")
    while bulk["ingested_lines"] < 2000:
        bulk = await sqlite_bulks.get(bulk_id)
    job = await sqlite_bulks.service.submit(priority="interactive")
    async with sqlite_bulks.service.database.transaction() as tx:
        first = await claim_jobs(
            tx,
            worker="w",
            models=["tiny"],
            max_jobs=1,
            max_tokens=4096,
            lease_s=30,
            aged_first=False,
        )

    assert [claimed.id for claimed in first] == [job]


async def test_tenants_take_turns_at_the_readers(database: Database) -> None:
    """A tenant's second bulk waits behind another's first, however early it came."""
    async with database.transaction() as tx:
        added = {}
        for name in ("a1", "a2", "b1"):
            new = NewBulk(
                tenant=name[0],
                kind="bulk",
                endpoint="",
                source=b"{}",
                options=b"{}",
                metadata={},
            )
            row, _ = await add_bulk(tx, new)
            added[row.id] = name
    taken = []
    for _ in range(4):
        async with database.transaction() as tx:
            claimed = await claim_bulk(tx, lease_s=30)
            taken.append(None if claimed is None else added[claimed.id])

    assert taken == ["a1", "b1", "a2", None]


async def test_lines_that_run_apart_are_known_to_the_cache(sqlite_bulks: Bulks) -> None:
    """The cache has passed a chunk whose poisoned job is split: it looks at it again."""
    await sqlite_bulks.service.report_ready()
    bulk_id = await sqlite_bulks.start(rows(50))
    await sqlite_bulks.wait(bulk_id, "running")
    while (await sqlite_bulks.get(bulk_id))["ingested_lines"] < 50:
        pass
    async with sqlite_bulks.service.database.transaction() as tx:
        await claim_jobs(
            tx, worker="dying", models=["tiny"], max_jobs=10, max_tokens=10**6, lease_s=-1
        )
        await reap_jobs(tx, max_crashes=1, limit=10)
        await tx.execute(text("UPDATE bulks SET indexed_lines = 50"))
    await sqlite_bulks.start_worker()
    await sqlite_bulks.wait(bulk_id)
    await sqlite_bulks.wait_until_indexed(bulk_id)

    assert (await sqlite_bulks.run(rows(50)))["counts"]["from_cache"] == 50


async def test_nothing_to_do_takes_no_lock(sqlite_bulks: Bulks) -> None:
    """An idle reader only looks."""
    runner = sqlite_bulks.service.app[BULKS]

    assert not await runner.read_once()
    await asyncio.wait_for(runner.sweep_once(), 5)
