"""One bad job fails alone, with a real model: what raises, what does not fit, what is huge."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from contract.config import Settings
from contract.jobs import JobState, Lane
from contract.models import ModelConfig
from contract.results import StoredResult
from storage.jobs import JobRow, NewJob, add_jobs
from tests.engine.helpers import draw_ids
from tests.worker.harness import TENANT, Bench, create_settings, run_worker
from worker.engine.loader import load_model
from worker.engine.scorer import ModelScorer

#: the token that the marked model cannot bear
MARKED = 383
FULL = "CUDA out of memory"
LENGTHS = [3 + 7 * n % 41 for n in range(64)]


@pytest.fixture
def settings(sqlite_url: str, blob_url: str, redis_url: str) -> Settings:
    """One database is enough: what is tested happens between claim and outcome."""
    return create_settings(sqlite_url, blob_url, redis_url)


@pytest.fixture(scope="module")
def classifier(tiny_llama_classifier: Path) -> ModelScorer:
    """A decoder that is packed and shares prefixes."""
    return load(tiny_llama_classifier)


@pytest.fixture(scope="module")
def encoder(tiny_bert: Path) -> ModelScorer:
    """An encoder of 512 positions."""
    return load(tiny_bert)


def load(folder: Path) -> ModelScorer:
    """Return the scorer of a tiny checkpoint."""
    scorer = load_model("tiny", ModelConfig(source=str(folder)))
    assert isinstance(scorer, ModelScorer)
    return scorer


@contextlib.contextmanager
def watched(scorer: ModelScorer, check: Callable[[torch.Tensor], object]) -> Iterator[list[int]]:
    """Call ``check`` with the ids of each forward; yield how many tokens each had."""
    sizes: list[int] = []

    def look(_module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        sizes.append(given[0].numel())
        check(given[0])

    embeddings = scorer.network.backbone.module.get_input_embeddings()  # type: ignore[operator]
    hook = embeddings.register_forward_pre_hook(look)
    try:
        yield sizes
    finally:
        hook.remove()


def refuse_marked(ids: torch.Tensor) -> None:
    """Raise as a model does that stumbles over its input."""
    if bool((ids == MARKED).any()):
        message = "shapes cannot be multiplied"
        raise RuntimeError(message)


async def submit(bench: Bench, bodies: Sequence[dict[str, Any]]) -> list[JobRow]:
    """Run one job per body and return the ended jobs; all are claimed together."""
    new = [
        NewJob(
            tenant=TENANT,
            model="tiny",
            lane=Lane.NORMAL,
            request=msgspec.json.encode({"model": "tiny", **body}),
            item_count=len(body["items"]),
            estimated_tokens=10,
        )
        for body in bodies
    ]
    async with bench.database.transaction() as tx:
        rows = await add_jobs(tx, new)
    await bench.queue.hint([row.hint for row in rows])
    return await bench.wait(*(row.id for row in rows))


async def read(bench: Bench, rows: Sequence[JobRow]) -> np.ndarray[Any, Any]:
    """Return the first item's scores of every job."""
    return np.array([(await bench.scores(row))[0] for row in rows])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("determinism", [None, "strict"])
async def test_one_of_64_jobs_raises(
    determinism: str | None,
    shared: bool,
    settings: Settings,
    bench: Bench,
    classifier: ModelScorer,
) -> None:
    """Only that job fails; strictly the 63 others have the same bits, otherwise 1e-5."""
    query = draw_ids(20, seed=1)[0] if shared else []
    items = draw_ids(*LENGTHS, seed=2)
    bodies = [{"query": query, "items": [item], "determinism": determinism} for item in items]
    innocent = [body for index, body in enumerate(bodies) if index != 29]
    bodies[29] = bodies[29] | {"items": [[*items[29], MARKED, 9]]}
    async with run_worker(settings, classifier):
        await bench.wait_for_models("tiny")
        with watched(classifier, refuse_marked) as sizes:
            rows = await submit(bench, bodies)
        without = await submit(bench, innocent)

    culprit = rows.pop(29)
    assert culprit.state is JobState.FAILED
    assert bench.problem(culprit).code == "forward_failed"
    assert [row.state for row in rows] == [JobState.SUCCEEDED] * 63
    assert len(sizes) > 1
    found, expected = await read(bench, rows), await read(bench, without)
    if determinism == "strict":
        assert found.tobytes() == expected.tobytes()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


async def test_memory_is_halved_and_remembered_by_shape(
    settings: Settings, bench: Bench, classifier: ModelScorer
) -> None:
    """What did not fit is not tried again at that length; another length is, and all are scored."""

    def fit_200(ids: torch.Tensor) -> None:
        if ids.numel() > 200:
            raise torch.OutOfMemoryError(FULL)

    short = [{"items": [item]} for item in draw_ids(*[12] * 64, seed=3)]
    longer = [{"items": [item]} for item in draw_ids(*[40] * 12, seed=4)]
    async with run_worker(settings, classifier):
        await bench.wait_for_models("tiny")
        with watched(classifier, fit_200) as first:
            rows = await submit(bench, short)
        with watched(classifier, fit_200) as second:
            again = await submit(bench, short)
        with watched(classifier, fit_200) as third:
            rows += await submit(bench, longer)
        plain = await submit(bench, short)

    assert {row.state for row in [*rows, *again]} == {JobState.SUCCEEDED}
    assert max(first) > 200
    assert max(second) <= 200
    assert max(third) > 200
    found, expected = await read(bench, again), await read(bench, plain)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


async def test_an_item_that_does_not_fit_alone(
    settings: Settings, bench: Bench, classifier: ModelScorer
) -> None:
    """It fails as out of memory, its neighbours in the same job do not."""

    def fit_30(ids: torch.Tensor) -> None:
        if ids.numel() > 30:
            raise torch.OutOfMemoryError(FULL)

    async with run_worker(settings, classifier):
        await bench.wait_for_models("tiny")
        with watched(classifier, fit_30):
            (row,) = await submit(bench, [{"items": draw_ids(5, 40, 6)}])

    assert row.state is JobState.PARTIAL
    assert row.result is not None
    result = msgspec.json.decode(row.result, type=StoredResult)
    assert [(error.index, error.code) for error in result.errors] == [(1, "out_of_memory")]
    assert np.isfinite(await bench.scores(row)).all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("truncation", ["error", "item"])
async def test_a_huge_document_among_300(
    truncation: str, settings: Settings, bench: Bench, encoder: ModelScorer
) -> None:
    """It is refused or cut by rule; no forward holds more than the budget of tokens."""
    items = ["a good film"] * 300
    items[77] = "good film " * 10_000
    async with run_worker(settings, encoder):
        await bench.wait_for_models("tiny")
        with watched(encoder, lambda _: None) as sizes:
            (row,) = await submit(bench, [{"items": items, "truncation": truncation}])

    assert row.state is (JobState.PARTIAL if truncation == "error" else JobState.SUCCEEDED)
    assert max(sizes) <= settings.batch_tokens
    finite = np.isfinite(await bench.scores(row)).all(1)
    assert np.flatnonzero(~finite).tolist() == ([77] if truncation == "error" else [])
