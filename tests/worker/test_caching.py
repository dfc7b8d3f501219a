"""Single jobs and the score cache: what is known needs no forward, and is told."""

from typing import Any

import msgspec

from contract.config import Settings
from contract.errors import ForwardError, StoreUnavailableError
from contract.jobs import JobState
from contract.scores import Usage
from storage.forgetting import delete_job, forget
from storage.jobs import JobRow
from storage.outcomes import retry_job
from storage.receipts import get_receipt
from storage.score_cache import CacheEntry, put_cached
from storage.statements import execute
from tests.worker.harness import TENANT, Bench, heed, run_worker
from tests.worker.scorers import ArithmeticScorer
from worker import caching

FINGERPRINT = "sha256:1"


async def run(bench: Bench, *items: Any, cache: str | None = "read", **parameters: Any) -> JobRow:
    """Submit one job and return it at its end."""
    ids = await bench.submit(list(items), cache=cache, parameters=parameters)
    (row,) = await bench.wait(*ids)
    return row


def usage(row: JobRow) -> Usage:
    """Return the job's usage."""
    return msgspec.json.decode(row.usage or b"{}", type=Usage)


async def receipt(bench: Bench, row: JobRow) -> dict[str, Any]:
    """Return the job's receipt."""
    async with bench.database.snapshot() as tx:
        raw = await get_receipt(tx, row.receipt_hash or "")
    return dict(msgspec.json.decode(raw or b"{}"))


async def test_what_is_known_needs_no_forward(settings: Settings, bench: Bench) -> None:
    """The second job copies the first one's scores; usage and receipt say so."""
    scorer = ArithmeticScorer(fingerprint=FINGERPRINT)
    async with run_worker(settings, scorer):
        first = await run(bench, [1], [2, 3])
        scorer.batches.clear()
        second = await run(bench, [1], [2, 3])

    assert scorer.batches == []
    assert second.state is JobState.SUCCEEDED
    assert await bench.scores(second) == await bench.scores(first) == [[1.0], [5.0]]
    assert second.blob_key != first.blob_key
    assert (usage(first).from_cache, usage(second).from_cache) == (msgspec.UNSET, 2)
    assert (usage(second).prompt_tokens, usage(second).computed_tokens) == (3, 0)
    assert await receipt(bench, second) == await receipt(bench, first) | {"from_cache": 2}


async def test_refresh_runs_and_off_keeps_nothing(settings: Settings, bench: Bench) -> None:
    """``refresh`` does not look, ``off`` neither looks nor is found; other input is another key."""
    scorer = ArithmeticScorer(fingerprint=FINGERPRINT)
    async with run_worker(settings, scorer):
        await run(bench, [1], cache=None)
        after_off = await run(bench, [1])
        refreshed = await run(bench, [1], cache="refresh")
        known = await run(bench, [1])
        other = await run(bench, [2])
        asked_otherwise = await run(bench, [1], apply_softmax=True)

    assert [usage(row).from_cache or 0 for row in (after_off, refreshed, known)] == [0, 0, 1]
    assert [usage(row).from_cache or 0 for row in (other, asked_otherwise)] == [0, 0]


async def test_a_copy_outlives_what_it_was_copied_from(settings: Settings, bench: Bench) -> None:
    """The first job deleted, its copy keeps its scores; the cache knows nothing then."""
    scorer = ArithmeticScorer(fingerprint=FINGERPRINT)
    async with run_worker(settings, scorer):
        first = await run(bench, [1])
        copy = await run(bench, [1])
        async with bench.database.transaction() as tx:
            ref = await delete_job(tx, TENANT, first.id)
        assert ref is not None
        await forget(bench.database, bench.blobs, ref)
        third = await run(bench, [1])

    assert await bench.scores(copy) == await bench.scores(third) == [[1.0]]
    assert usage(third).from_cache is msgspec.UNSET


async def test_an_item_without_a_score_is_not_known(settings: Settings, bench: Bench) -> None:
    """A partial job is not found: the next one runs as a whole."""

    def fault(batch: list[list[int]]) -> None:
        if [2] in batch:
            raise ForwardError

    scorer = ArithmeticScorer(fault=fault, fingerprint=FINGERPRINT)
    async with run_worker(settings, scorer):
        first = await run(bench, [1], [2])
        scorer.batches.clear()
        second = await run(bench, [1], [2])

    assert first.state is second.state is JobState.PARTIAL
    assert [1] in [ids for batch in scorer.batches for ids in batch]


async def test_what_a_retry_kept_is_not_found(settings: Settings, bench: Bench) -> None:
    """The kept scores may be of an older model: the next job runs as a whole."""
    broken = [[2]]

    def fault(batch: list[list[int]]) -> None:
        if any(ids in broken for ids in batch):
            raise ForwardError

    scorer = ArithmeticScorer(fault=fault, fingerprint=FINGERPRINT)
    async with run_worker(settings, scorer):
        first = await run(bench, [1], [2])
        broken.clear()
        async with bench.database.transaction() as tx:
            again = await retry_job(tx, TENANT, first.id)
        await bench.queue.hint([again.hint])
        (retried,) = await bench.wait(first.id)
        third = await run(bench, [1], [2])

    assert (first.state, retried.state) == (JobState.PARTIAL, JobState.SUCCEEDED)
    assert usage(third).from_cache is msgspec.UNSET


async def test_part_of_a_job_is_known(settings: Settings, bench: Bench) -> None:
    """An entry may be one item of many, as those of bulks are: its rows alone are taken."""
    scorer = ArithmeticScorer(fingerprint=FINGERPRINT)
    async with run_worker(settings, scorer):
        many = await run(bench, [1], [2, 3], [4])
        known = await run(bench, [2, 3], cache="refresh")
        key = await _key_of(bench, known)
        async with bench.database.transaction() as tx:
            await put_cached(tx, [CacheEntry(key, many.id, 1, 1, has_hidden=False)])
        scorer.batches.clear()
        row = await run(bench, [2, 3])

    assert scorer.batches == []
    assert await bench.scores(row) == [[5.0]]
    assert usage(row).prompt_tokens == 2


async def test_what_does_not_fit_runs(settings: Settings, bench: Bench) -> None:
    """Hidden states that were not kept, bytes that are gone, rows of another form: it runs."""
    scorer = ArithmeticScorer(fingerprint=FINGERPRINT)
    async with run_worker(settings, scorer):
        await run(bench, [1])
        hidden = await run(bench, [1], return_pooled_hidden_states=True)
        two = await run(bench, [1], [2])
        key = await _key_of(bench, hidden)
        async with bench.database.transaction() as tx:
            await put_cached(tx, [CacheEntry(key, two.id, 0, 2, has_hidden=False)])
        misfit = await run(bench, [1])
        await bench.blobs.delete([misfit.blob_key or ""])
        gone = await run(bench, [1])

    assert [usage(row).from_cache or 0 for row in (hidden, misfit, gone)] == [0, 0, 0]
    assert await bench.scores(gone) == [[1.0]]


async def test_jobs_run_while_the_cache_cannot_be_asked(
    settings: Settings, bench: Bench, monkeypatch: Any
) -> None:
    """A store that fails for the look-up alone delays nobody; it is logged."""

    async def fail(*_: Any, **__: Any) -> dict[str, CacheEntry]:
        raise StoreUnavailableError

    monkeypatch.setattr(caching, "find_cached", fail)
    with heed("score cache not asked") as told:
        async with run_worker(settings, ArithmeticScorer(fingerprint=FINGERPRINT)):
            row = await run(bench, [1])

    assert told.is_set()
    assert row.state is JobState.SUCCEEDED


async def test_models_without_a_fingerprint_are_not_cached(
    settings: Settings, bench: Bench
) -> None:
    """Nobody could say whether it is the same model."""
    async with run_worker(settings, ArithmeticScorer()):
        await run(bench, [1])
        again = await run(bench, [1])
        empty = await run(bench)

    assert usage(again).from_cache is msgspec.UNSET
    assert empty.state is JobState.SUCCEEDED


async def _key_of(bench: Bench, row: JobRow) -> str:
    statement = "SELECT key FROM score_cache WHERE job_id = :id"
    async with bench.database.snapshot() as tx:
        return str((await execute(tx, statement, {"id": row.id})).scalar_one())
