"""Which lines have all but their one text in common, and what becomes of those that do not."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from sqlalchemy import text

from api.bulk.lines import LineParser
from api.bulk.packing import pack_chunk
from contract.config import Settings
from contract.jobs import JobState
from contract.models import ModelConfig, ModelState, ModelStatus, ScoringPath
from storage.bulk_chunks import ChunkJob
from storage.jobs import list_jobs
from storage.outcomes import JobOutcome, complete_jobs
from tests.bulk.bench import Bulks, rows
from worker.engine.deterministic import SOURCE

CAUSAL = ModelConfig(source=SOURCE, path=ScoringPath.CAUSAL)


def pack(parameters: dict[str, Any]) -> Sequence[ChunkJob]:
    """Return the jobs that three lines of one text become under these parameters."""
    parser = LineParser(
        {"tiny": ModelStatus(name="tiny", state=ModelState.LOADING)},
        endpoint=None,
        model="tiny",
        parameters=parameters,
        columns={},
        hidden_states=None,
        limits=Settings(),
    )
    lines = [parser.parse(n, msgspec.json.encode(row)) for n, row in enumerate(rows(3), start=1)]
    chunk = pack_chunk(
        lines,
        first_line=0,
        first_item=0,
        batch_tokens=4096,
        hashes=[""] * 3,
        cached=[None] * 3,
    )
    return chunk.jobs


@pytest.mark.parametrize(
    ("parameters", "counts"),
    [
        ({"queries": ["q"]}, [1, 1, 1]),
        ({"query": "q", "label_token_ids": [[1, 2]]}, [1, 1, 1]),
        ({"query": "q", "label_token_ids": [1, 2]}, [3]),
    ],
)
def test_what_belongs_to_one_item_is_not_shared(
    parameters: dict[str, Any], counts: list[int]
) -> None:
    """A query or labels of an item's own are of one line: such lines have a job each."""
    jobs = pack(parameters)

    assert [job.item_count for job in jobs] == counts


async def test_lines_scored_again_with_labels_of_their_own(sqlite_bulks: Bulks) -> None:
    """Lines that shared a job do not any more once their labels are nested; all are scored."""
    await sqlite_bulks.start_worker(tiny=CAUSAL)
    shared = {"query": "q", "label_token_ids": [1, 2]}
    first = await sqlite_bulks.run(rows(3), parameters=shared)

    again = await sqlite_bulks.rescore(bulk=first["id"], label_token_ids=[[1, 2]])
    results = await sqlite_bulks.results(again["id"])
    async with sqlite_bulks.service.database.snapshot() as tx:
        jobs = await list_jobs(tx, "default", limit=10)

    assert (again["counts"]["scored"], again["counts"]["failed"]) == (3, 0)
    assert [len(line["scores"][0]) for line in results] == [2, 2, 2]
    assert sorted(job.item_count for job in jobs) == [1, 1, 1, 3]


async def test_items_beyond_the_stored_rows_are_not_cached(sqlite_bulks: Bulks) -> None:
    """A job that was stored with fewer rows than it has items says nothing of the others."""
    await sqlite_bulks.service.report_ready()
    bulk_id = await sqlite_bulks.start(rows(3))
    [job] = await sqlite_bulks.service.next_claim()
    outcome = JobOutcome(
        id=job.id,
        attempt=job.attempt,
        state=JobState.SUCCEEDED,
        scored=1,
        failed=0,
        result=b'{"labels": ["yes"], "label_counts": [1]}',
        receipt=("f" * 64, b'{"fingerprint": "known"}'),
    )
    async with sqlite_bulks.service.database.transaction() as tx:
        await complete_jobs(tx, [outcome])
    await sqlite_bulks.wait(bulk_id)
    await sqlite_bulks.wait_until_indexed(bulk_id)

    async with sqlite_bulks.service.database.snapshot() as tx:
        entries = (await tx.execute(text("SELECT first_item, item_count FROM score_cache"))).all()

    assert [tuple(entry) for entry in entries] == [(0, 1)]
