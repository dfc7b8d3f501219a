"""Each round of maintenance, on both databases: what it does, how much it says it did."""

import os
from pathlib import Path

import msgspec
import pytest

from contract.config import Settings
from contract.errors import GoneError
from contract.jobs import JobState
from contract.webhooks import EventType
from storage import claims, forgetting, workers
from storage.database import Database
from storage.events import Announcement, announce
from storage.idempotency import find_or_claim
from storage.queue import Queue
from tests.worker.harness import TENANT, Bench, heed, run_worker
from tests.worker.scorers import ArithmeticScorer
from worker.maintenance import Maintenance
from worker.stores import Stores


@pytest.fixture
def announced() -> list[str]:
    """One entry per time that deliveries were woken."""
    return []


@pytest.fixture
def maintenance(bench: Bench, announced: list[str]) -> Maintenance:
    """The rounds on the stores of ``bench``."""
    stores = Stores(bench.database, bench.blobs, bench.queue)
    return Maintenance(bench.settings, stores, announced=lambda: announced.append("woken"))


async def claim(bench: Bench, lease_s: float) -> None:
    """Claim everything for a worker that then says nothing more."""
    async with bench.database.transaction() as tx:
        await claims.claim_jobs(
            tx, worker="wrk_dead", models=["sums"], max_jobs=9, max_tokens=99, lease_s=lease_s
        )


async def test_reaping_requeues_fails_and_cancels(
    maintenance: Maintenance, bench: Bench, announced: list[str]
) -> None:
    """A dead worker's jobs are hinted again; at the third death they are poisoned."""
    [poisoned] = await bench.submit([[1]], hinted=False)
    for _ in range(2):
        await claim(bench, -1.0)
        assert await maintenance.reap_once() == 1
    quiet = list(announced)
    [cancelled] = await bench.submit([[1]], hinted=False)
    await claim(bench, -1.0)
    await claim(bench, -1.0)
    await bench.cancel(cancelled)

    count = await maintenance.reap_once()

    rows = [await bench.get(poisoned), await bench.get(cancelled)]
    assert (quiet, count, announced) == ([], 2, ["woken"])
    assert [row.state for row in rows] == [JobState.FAILED, JobState.CANCELLED]
    assert bench.problem(rows[0]).code == "poisoned"


async def test_a_living_lease_is_left_alone(maintenance: Maintenance, bench: Bench) -> None:
    """Nothing to reap, nothing to say."""
    [job] = await bench.submit([[1]], hinted=False)
    await claim(bench, 60.0)

    assert await maintenance.reap_once() == 0
    assert (await bench.get(job)).state is JobState.RUNNING


async def test_queue_deadlines_expire(
    maintenance: Maintenance, bench: Bench, announced: list[str]
) -> None:
    """A job that nobody took in time ends, and its event is announced."""
    [late, early] = [
        (await bench.submit([[1]], queue_deadline_s=seconds))[0] for seconds in (0.0, 60.0)
    ]

    count = await maintenance.expire_once()

    states = [(await bench.get(job)).state for job in (late, early)]
    assert (count, states, announced) == (1, [JobState.EXPIRED, JobState.QUEUED], ["woken"])


async def test_retention_takes_rows_and_bytes(maintenance: Maintenance, bench: Bench) -> None:
    """What expired answers with a tombstone, and its bytes are gone; its neighbour stays."""
    [gone] = await bench.submit([[1]], expires_after_s=0.0)
    [kept] = await bench.submit([[2]])
    async with run_worker(bench.settings, ArithmeticScorer()):
        await bench.wait(kept)
        await bench.wait_until(lambda: is_gone(bench, gone))
    await maintenance.collect_once()

    row = await bench.get(kept)
    files = [blob.key async for blob in bench.blobs.list()]
    assert files == [row.blob_key]
    assert gone.encode() not in await bench.blobs.get(files[0])
    assert await bench.scores(row) == [[2]]


async def test_a_damaged_blob_keeps_no_other(maintenance: Maintenance, bench: Bench) -> None:
    """A blob that was cut short stays, for the doctor; what else expired is removed."""
    damaged, kept = await bench.submit([[1]], [[2]])
    async with run_worker(bench.settings, ArithmeticScorer()):
        await bench.wait(kept)
        await bench.wait(damaged)
        [file] = [blob.key async for blob in bench.blobs.list()]
        [other] = await bench.submit([[3]])
        await bench.wait(other)
    await bench.blobs.put(file, (await bench.blobs.get(file))[:20])
    async with bench.database.transaction() as tx:
        await tx.exec_driver_sql(
            f"UPDATE jobs SET expires_at = 1 WHERE id IN ('{damaged}', '{other}')"  # noqa: S608
        )

    count = await maintenance.collect_once()

    assert count == 1
    assert [blob.key async for blob in bench.blobs.list()] == [file]


def make_old(file: Path) -> None:
    """Let a file look two hours old."""
    moment = file.stat().st_mtime - 7200
    os.utime(file, (moment, moment))


async def is_gone(bench: Bench, job: str) -> bool:
    """Tell whether only the tombstone is left."""
    try:
        await bench.get(job)
    except GoneError:
        return True
    return False


async def test_lost_hints_are_sent_again(bench: Bench, maintenance: Maintenance) -> None:
    """A row that waits without a hint gets one, once; without Redis it stays due."""
    soon = msgspec.structs.replace(bench.settings, sweep_s=1e-6)
    [job] = await bench.submit([[1]], hinted=False)
    away = Queue("redis://127.0.0.1:1/0")
    deaf = Maintenance(soon, Stores(bench.database, bench.blobs, away))
    hearing = Maintenance(soon, maintenance.stores)

    counts = [await deaf.hint_once(), await hearing.hint_once(), await hearing.hint_once()]
    early = await maintenance.hint_once()

    await away.close()
    assert counts == [0, 1, 0]
    assert early == 0
    assert (await bench.get(job)).state is JobState.QUEUED


async def test_old_keys_and_dead_workers_are_forgotten(
    bench: Bench, maintenance: Maintenance
) -> None:
    """Yesterday's idempotency keys, and workers without a heartbeat for an hour."""
    row = workers.WorkerRow(id="wrk_dead", host="h", pid=1, device="cpu")
    async with bench.database.transaction() as tx:
        await workers.put_worker(tx, row)
        await find_or_claim(tx, "default", "/v1/jobs", "key", "hash")
    fresh = [await maintenance.drop_keys_once(), await maintenance.drop_workers_once()]
    async with bench.database.transaction() as tx:
        await tx.exec_driver_sql("UPDATE workers SET heartbeat_at = heartbeat_at - 3700")
        await tx.exec_driver_sql("UPDATE idempotency_keys SET created_at = created_at - 86500")

    old = [await maintenance.drop_keys_once(), await maintenance.drop_workers_once()]

    assert (fresh, old) == ([0, 0], [1, 1])


async def test_what_nobody_asks_for_any_more_is_purged(
    bench: Bench, maintenance: Maintenance
) -> None:
    """Thirty days after: a job's tombstone and an event about no job, not a day before."""
    [job] = await bench.submit([[1]], queue_deadline_s=0.0)
    await maintenance.expire_once()
    async with bench.database.transaction() as tx:
        await forgetting.delete_job(tx, TENANT, job)
        await announce(tx, [Announcement(tenant=TENANT, type=EventType.WEBHOOK_TEST, generation=0)])

    async def let_pass(days: int) -> None:
        async with bench.database.transaction() as tx:
            for table, column in (("jobs", "deleted_at"), ("events", "created_at")):
                await tx.exec_driver_sql(
                    f"UPDATE {table} SET {column} = {column} - 86400 * {days}"  # noqa: S608
                )

    await let_pass(29)
    early = await maintenance.purge_once()
    await let_pass(2)
    late = await maintenance.purge_once()

    assert (early, late) == (0, 2)


async def test_orphans_are_collected_when_they_are_old(
    bench: Bench, maintenance: Maintenance, tmp_path: Path
) -> None:
    """A blob without a row may be one whose row is about to be written: only old ones go."""
    await bench.blobs.put("batches/btc_orphan.safetensors", b"x")
    young = await maintenance.sweep_blobs_once()
    make_old(tmp_path / "blobs" / "batches" / "btc_orphan.safetensors")

    old = await maintenance.sweep_blobs_once()

    assert (young, old) == (0, 1)
    assert [blob.key async for blob in bench.blobs.list()] == []


async def test_a_round_that_fails_keeps_no_other(settings: Settings, bench: Bench) -> None:
    """With the blob store away the rows are still tended, and the log says what waits."""
    [late] = await bench.submit([[1]], queue_deadline_s=0.0)
    away = Database("postgresql+asyncpg://postgres@127.0.0.1:1/none")
    broken = Maintenance(settings, Stores(away, bench.blobs, bench.queue))
    whole = Maintenance(settings, Stores(bench.database, bench.blobs, bench.queue))
    with heed("maintenance waits") as waits:
        nothing = await broken.run_once()
    counts = await whole.run_once()

    await away.close()
    assert waits.is_set()
    assert nothing == {}
    assert counts == {
        "reaped": 0, "expired": 1, "collected": 0, "hinted": 0, "keys": 0,
        "tombstones": 0, "workers": 0,
    }  # fmt: skip
    assert (await bench.get(late)).state is JobState.EXPIRED


async def test_a_round_that_raises_keeps_no_other(
    settings: Settings, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever one statement raises, the others run and the process goes on."""

    async def fail(*_: object, **__: object) -> int:
        message = "value out of range"
        raise ValueError(message)

    monkeypatch.setattr("storage.sweeps.reap_jobs", fail)
    monkeypatch.setattr("storage.forgetting.drop_orphans", fail)
    whole = Maintenance(settings, Stores(bench.database, bench.blobs, bench.queue))
    with heed("maintenance raised") as raised:
        counts = await whole.run_once()
        swept = await whole.try_sweep_blobs()

    assert raised.is_set()
    assert "reaped" not in counts
    assert counts["expired"] == 0
    assert swept is None
