"""Labels of a large vocabulary: their rows of the head alone against full logits.

``python -m benchmarks.label_rows`` builds a random Qwen3-shaped causal model (4 layers, hidden 256)
with Qwen3's vocabulary and scores one batch of prompts of 60 tokens with two labels, three ways in
turn: softmax over the labels (the labels' rows of the head at the last position), full-vocabulary
probabilities (the whole head at the last position), and logits of the whole vocabulary at every
position, as a plain forward of transformers yields them. Median CPU times of several rounds.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.multi_item import SHAPE
from contract.models import ModelConfig
from contract.scores import ScoreRequest
from tests.engine.helpers import draw_ids
from tests.tiny_models import make_tokenizer
from worker.engine.loader import load_model, set_up_threads
from worker.engine.seam import Scorer

VOCABULARY = 151_936
LABELS = [5, 9]


def main() -> None:
    """Print one line per way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--items", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    set_up_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="scorekeep-labels-") as name:
        folder = Path(name)
        words = make_tokenizer("Qwen3")
        config = Qwen3Config(vocab_size=VOCABULARY, pad_token_id=words.pad_token_id, **SHAPE)
        kind: Any = Qwen3ForCausalLM
        kind(config).save_pretrained(folder)
        words.save_pretrained(folder)
        scorer = load_model("m", ModelConfig(source=str(folder), dtype="float32"))
        plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        _measure(scorer, plain.eval(), options)


def _measure(scorer: Scorer, plain: Any, options: argparse.Namespace) -> None:  # noqa: ANN401
    items = draw_ids(*[60] * options.items, seed=4)
    ways: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
        "label rows alone": lambda: _score(scorer, items, apply_softmax=True, mass=False),
        "vocabulary at the last position": lambda: _score(
            scorer, items, apply_softmax=True, mass=True
        ),
        "vocabulary at every position": lambda: _score_plainly(plain, items),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, np.ndarray[Any, Any]] = {}
    for _ in range(options.rounds + 1):
        for way, call in ways.items():
            began_at = time.process_time()
            found[way] = call()
            times[way].append(time.process_time() - began_at)
    first = "label rows alone"
    least = statistics.median(times[first][1:])
    sys.stdout.write(
        f"{options.items} prompts of 60 tokens, vocabulary {VOCABULARY}, fp32, "
        f"{options.threads} thread(s): CPU seconds, median of {options.rounds}\n"
    )
    for way in ways:
        median = statistics.median(times[way][1:])
        difference = np.abs(found[way] - found[first]).max()
        sys.stdout.write(
            f"{way:34}{median:>9.4f} s{median / least:>8.1f}x  difference {difference:.0e}\n"
        )


def _score(
    scorer: Scorer, items: list[list[int]], *, apply_softmax: bool, mass: bool
) -> np.ndarray[Any, Any]:
    request = ScoreRequest(
        items=[*items],
        label_token_ids=[*LABELS],
        apply_softmax=apply_softmax,
        return_label_mass=mass,
    )
    prepared = scorer.prepare(request)
    found = scorer.finish(prepared, scorer.forward(prepared.sequences))
    return np.asarray(found.tensors["scores"], np.float64)


@torch.inference_mode()
def _score_plainly(model: Any, items: list[list[int]]) -> np.ndarray[Any, Any]:  # noqa: ANN401
    logits = model(torch.tensor(items)).logits[:, -1, LABELS].double()
    scores: np.ndarray[Any, Any] = logits.softmax(-1).numpy()
    return scores


if __name__ == "__main__":
    main()
