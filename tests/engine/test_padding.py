"""What is padded is counted: that, and nothing else."""

import asyncio
from collections.abc import Callable

from contract.jobs import Lane
from tests.engine.helpers import draw_ids, make_request
from worker.batcher import MicroBatcher, Ticket
from worker.deadlines import HardDeadline
from worker.engine.scorer import ModelScorer
from worker.engine.seam import Padding


async def run(scorer: ModelScorer, lengths: list[int]) -> dict[str, float]:
    """Put sequences of these lengths through the device; return the batcher's histograms."""
    prepared = scorer.prepare(make_request(items=draw_ids(*lengths)))
    batcher = MicroBatcher(budget_tokens=4096, deadline=HardDeadline(60))
    try:
        submission = batcher.submit(scorer, [Ticket("a", Lane.NORMAL, prepared.sequences)])
        async with asyncio.timeout(20):
            await submission.wait()
    finally:
        batcher.stop()
    return batcher.batch_sequences.totals() | batcher.batch_tokens.totals()


async def test_padding_is_counted(scorer_of: Callable[..., ModelScorer]) -> None:
    """A padded batch of lengths 19 and 20 computes one token for nothing, a packed one none."""
    scorer = scorer_of("BertForSequenceClassification")
    assert isinstance(scorer, Padding)
    backbone = scorer.network.backbone
    began, packed = scorer.padding_tokens, backbone.packed
    found = await run(scorer, [19, 20])
    after_packed = scorer.padding_tokens
    backbone.packed = False
    backbone.set_attention("eager")
    try:
        await run(scorer, [19, 20])
    finally:
        backbone.packed = packed
        backbone.set_attention("scorekeep_packed")

    assert packed
    assert after_packed - began == 0
    assert scorer.padding_tokens - after_packed == 1
    assert found["batch_sequences:2"] == 1
    assert found["batch_sequences:sum"] == 2
    assert found["batch_tokens:64"] == 1
    assert found["batch_tokens:sum"] >= 39
