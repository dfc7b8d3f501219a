"""What a worker counts of its work: as sums for ever, and by slots for the last hour."""

from contract.config import Settings
from storage import workers
from storage.counters import read_counts
from storage.database import Database
from storage.throughput import read_throughput
from tests.services import free_port
from tests.worker.harness import Bench, run_worker
from tests.worker.scorers import ArithmeticScorer
from worker.metering import Meter


async def test_a_worker_counts_its_jobs_items_and_tokens(settings: Settings, bench: Bench) -> None:
    """Each once, when it has drained; the sums and the slots agree."""
    async with run_worker(settings, ArithmeticScorer()):
        ids = await bench.submit([[1, 2], [3]], [[4]])
        rows = await bench.wait(*ids)

    async with bench.database.snapshot() as tx:
        counts = await read_counts(tx)
        throughput = await read_throughput(tx, slots=90)
    assert [row.scored_count for row in rows] == [2, 1]
    assert (counts["jobs_completed"], counts["items_scored"], counts["tokens_scored"]) == (2, 3, 4)
    sums = {name: sum(values) for name, values in throughput.series.items()}
    assert sums == {"jobs_completed": 2, "items_scored": 3, "tokens_scored": 4}


async def test_a_heartbeat_tells_the_memory(settings: Settings, bench: Bench) -> None:
    """Soon after its start a worker says how much it holds."""
    async with run_worker(settings, ArithmeticScorer()):

        async def is_told() -> bool:
            async with bench.database.snapshot() as tx:
                found = await workers.list_workers(tx)
            return any((worker.memory.memory_bytes or 0) > 1_000_000 for worker in found)

        await bench.wait_until(is_told)


async def test_what_the_store_refuses_waits(sqlite_database: Database) -> None:
    """Nothing is lost: the growth is added, once, when the store is back."""
    away = Database(f"postgresql+asyncpg://postgres@127.0.0.1:{free_port()}/none")
    meter = Meter(away, [lambda: {"items_scored": 5.0}])

    refused = await meter.add_once()
    meter._database = sqlite_database
    added = await meter.add_once()
    again = await meter.add_once()

    async with sqlite_database.snapshot() as tx:
        counts = await read_counts(tx)
    await away.close()
    assert (refused, added, again) == (0, 1, 0)
    assert counts == {"items_scored": 5.0}
