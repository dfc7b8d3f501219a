"""A whole worker: from a queued row to a durable result, on real stores."""

import asyncio

from contract.config import Settings
from contract.jobs import JobState
from tests.worker.harness import Bench, run_worker
from tests.worker.scorers import ArithmeticScorer


async def test_a_job_is_scored_and_stored(settings: Settings, bench: Bench) -> None:
    """Claimed, scored, written: the row says succeeded and the bytes are in the blob."""
    async with run_worker(settings, ArithmeticScorer()):
        [job] = await bench.submit([[1, 2], [3]])
        [row] = await bench.wait(job)

    assert row.state is JobState.SUCCEEDED
    assert (row.scored_count, row.failed_count, row.attempt) == (2, 0, 1)
    assert await bench.scores(row) == [[3], [3]]


async def test_without_redis_jobs_finish(settings: Settings, bench: Bench) -> None:
    """SQL is the queue: no hint was sent at all."""
    async with run_worker(settings, ArithmeticScorer()):
        ids = await bench.submit(*[[[n]] for n in range(50)], hinted=False)
        rows = await bench.wait(*ids)

    assert {row.state for row in rows} == {JobState.SUCCEEDED}
    await asyncio.sleep(0)
