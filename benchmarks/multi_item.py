"""Many items, one query: shared prefix against one by one; and what hidden states cost.

``python -m benchmarks.multi_item`` builds a random Qwen3-shaped classifier (4 layers, hidden 256)
and scores a query of 300 tokens with 1, 10, 50 and 100 items of 20: through the shared prefix,
and each sequence whole. Both alternate in one run; the median CPU time of several rounds is
printed, which a busy neighbour does not change, beside the ratio of computed tokens.
Then a batch of 64 items of 20 with and without their hidden states, alternating as well.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from contract.models import ModelConfig
from contract.scores import ScoreRequest
from tests.engine.helpers import draw_ids
from tests.tiny_models import make_tokenizer
from worker.engine.loader import load_model, set_up_threads
from worker.engine.scorer import ModelScorer
from worker.engine.seam import Reading
from worker.engine.seam import Sequence as TokenSequence

COUNTS = (1, 10, 50, 100)
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "initializer_range": 0.02,
}


def main() -> None:
    """Print one line per dtype and count, then the hidden states."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    set_up_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="scorekeep-items-") as name:
        folder = _make(Path(name))
        scorers = [_load(folder, dtype) for dtype in options.dtypes]
        _print(f"query 300, items of 20, {options.threads} thread(s), CPU seconds per job (median)")
        _print(f"{'dtype':10}{'items':>6}{'shared':>10}{'one by one':>12}{'ratio':>8}"
               f"{'tokens':>9}{'difference':>12}")  # fmt: skip
        for scorer in scorers:
            for count in COUNTS:
                _compare_layouts(scorer, count, options.rounds)
        _print("hidden states: 64 items of 20 in one batch")
        for scorer in scorers:
            _compare_hidden(scorer, options.rounds * 8)


def _make(folder: Path) -> Path:
    """Write a random model as transformers initialises it: logits of a trained one's size."""
    words = make_tokenizer("Qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=384, pad_token_id=words.pad_token_id, **SHAPE)
    kind: Any = Qwen3ForSequenceClassification
    kind(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def _load(folder: Path, dtype: str) -> ModelScorer:
    scorer = load_model(dtype, ModelConfig(source=str(folder), dtype=dtype))
    assert isinstance(scorer, ModelScorer)
    assert scorer.network.sharing
    return scorer


def _compare_layouts(scorer: ModelScorer, count: int, rounds: int) -> None:
    query, *items = draw_ids(300, *[20] * count, seed=count)
    shared = scorer.prepare(ScoreRequest(query=query, items=[*items])).sequences
    whole = [replace(sequence, group=b"", prefix_length=0) for sequence in shared]
    times, readings = _alternate(
        lambda: scorer.forward(shared), lambda: _one_by_one(scorer, whole), rounds
    )
    ours, theirs = (np.stack([reading.values for reading in found]) for found in readings)
    tokens = [sum(reading.computed_tokens for reading in found) for found in readings]
    _print(
        f"{scorer.description.dtype:10}{count:>6}{times[0]:>10.4f}{times[1]:>12.4f}"
        f"{times[1] / times[0]:>7.1f}x{tokens[1] / tokens[0]:>8.1f}x"
        f"{np.abs(ours - theirs).max():>12.1e}"
    )


def _one_by_one(scorer: ModelScorer, sequences: Sequence[TokenSequence]) -> list[Reading]:
    return [scorer.forward([sequence])[0] for sequence in sequences]


def _compare_hidden(scorer: ModelScorer, rounds: int) -> None:
    items = draw_ids(*[20] * 64, seed=3)
    jobs = [
        scorer.prepare(ScoreRequest(items=[*items], return_pooled_hidden_states=asked))
        for asked in (True, False)
    ]

    def run(index: int) -> list[Reading]:
        found = scorer.forward(jobs[index].sequences)
        scorer.finish(jobs[index], found)
        return found

    times, readings = _alternate(lambda: run(0), lambda: run(1), rounds)
    same = all(
        np.array_equal(one.values, other.values) for one, other in zip(*readings, strict=True)
    )
    scores = scorer.finish(jobs[0], readings[0])
    hidden = scores.tensors["hidden_states"]
    size = hidden[0].nbytes
    _print(
        f"{scorer.description.dtype:10} with {times[0]:.4f} s, without {times[1]:.4f} s "
        f"({times[0] / times[1] - 1:+.1%}), {size} bytes per item, scores the same bits: {same}"
    )


def _alternate(
    first: Callable[[], list[Reading]], second: Callable[[], list[Reading]], rounds: int
) -> tuple[tuple[float, float], tuple[list[Reading], list[Reading]]]:
    """Run both in turn; return their median times and last results. The first round warms up."""
    times: tuple[list[float], list[float]] = ([], [])
    found: list[list[Reading]] = [[], []]
    for _ in range(rounds + 1):
        for index, call in enumerate((first, second)):
            began = time.process_time()
            found[index] = call()
            times[index].append(time.process_time() - began)
    return (
        (statistics.median(times[0][1:]), statistics.median(times[1][1:])),
        (found[0], found[1]),
    )


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
