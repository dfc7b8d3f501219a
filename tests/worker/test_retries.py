"""A retried job: only what has no score goes through the model, the rest keeps its rows."""

from contract.config import Settings
from contract.errors import ForwardError
from contract.jobs import JobState
from storage.outcomes import retry_job
from tests.worker.harness import TENANT, Bench, run_worker
from tests.worker.scorers import ArithmeticScorer


async def retry(bench: Bench, job_id: str) -> None:
    """Retry as a client does."""
    async with bench.database.transaction() as tx:
        row = await retry_job(tx, TENANT, job_id)
    await bench.queue.hint([row.hint])


async def test_only_failed_items_are_scored_again(settings: Settings, bench: Bench) -> None:
    """The second attempt sees one sequence; the old blob is gone, the rows of both are there."""
    sick = True

    def fault(batch: list[list[int]]) -> None:
        if sick and [2] in batch:
            raise ForwardError

    scorer = ArithmeticScorer(fault=fault)
    async with run_worker(settings, scorer):
        [job] = await bench.submit([[1], [2], [3]])
        [first] = await bench.wait(job)
        sick = False
        scorer.batches.clear()
        await retry(bench, job)
        [second] = await bench.wait(job)
        rows = await bench.scores(second)

    assert (first.state, second.state) == (JobState.PARTIAL, JobState.SUCCEEDED)
    assert scorer.batches == [[[2]]]
    assert rows == [[1.0], [2.0], [3.0]]
    assert (second.scored_count, second.failed_count, second.generation) == (3, 0, 1)
    assert [entry.key async for entry in bench.blobs.list()] == [second.blob_key]
    assert first.blob_key != second.blob_key


async def test_a_retry_that_fails_keeps_what_there_is(settings: Settings, bench: Bench) -> None:
    """The job is partial again, with the rows it had."""

    def fault(batch: list[list[int]]) -> None:
        if [2] in batch:
            raise ForwardError

    async with run_worker(settings, ArithmeticScorer(fault=fault)):
        [job] = await bench.submit([[1], [2]])
        await bench.wait(job)
        await retry(bench, job)
        [row] = await bench.wait(job)
        rows = await bench.scores(row)

    assert (row.state, row.scored_count, row.failed_count) == (JobState.PARTIAL, 1, 1)
    assert rows[0] == [1.0]


async def test_a_retry_that_cannot_begin_keeps_what_there_is(
    settings: Settings, bench: Bench
) -> None:
    """A run timeout ends the second attempt before its forward; the rows stay."""

    def fault(batch: list[list[int]]) -> None:
        if [2] in batch:
            raise ForwardError

    async with run_worker(settings, ArithmeticScorer(fault=fault)):
        [job] = await bench.submit([[1], [2]])
        await bench.wait(job)
        async with bench.database.transaction() as tx:
            await retry_job(tx, TENANT, job)
            await tx.exec_driver_sql("UPDATE jobs SET run_timeout_s = 0.000001")
        [row] = await bench.wait(job)
        rows = await bench.scores(row)

    assert (row.state, row.scored_count) == (JobState.PARTIAL, 1)
    assert row.result is not None
    assert rows[0] == [1.0]
