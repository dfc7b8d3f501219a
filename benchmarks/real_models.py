"""Real models through the service: how often they are right, and that plain transformers agrees.

``python -m benchmarks.real_models`` serves what ``scorekeep demo`` has prepared in the cache, and a
linear head fitted here on SmolLM2: the API and a worker as processes, jobs over HTTP. Labelled
sentences that no head was fitted on are scored: two-shot by SmolLM2's next-token probabilities, and
by both trained heads. Each decision is held against plain transformers on one sequence at a time.
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
)

from scorekeep.demo import PROMPT
from scorekeep.demo_sources import _fetch_sentences, default_cache, prepare_models
from tests.e2e.stack import Stack
from tests.services import start_redis

LABELS = [" negative", " positive"]
#: as the demo splits: its head was fitted on the first four fifths
TRAINING_SHARE = 0.8
PENALTIES = (1e-2, 1e-3, 1e-4, 1e-5)
FOLDS = 5
#: sentences of one length that go through the model together while the head is fitted
FITTED_TOGETHER = 16
Rows = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One model's account: its scores by the service, and by plain transformers."""

    name: str
    ours: Tensor
    theirs: Tensor
    truth: Tensor

    def render(self) -> str:
        """Return the line of the table."""
        decided, expected = self.ours.argmax(-1), self.theirs.argmax(-1)
        right = (decided == self.truth).float().mean().item()
        same = int((decided == expected).sum())
        difference = (self.ours - self.theirs).abs().max().item()
        return (
            f"{self.name:34}{len(self.truth):>6}{right:>10.1%}"
            f"{(expected == self.truth).float().mean().item():>14.1%}"
            f"{same:>8} of {len(self.truth):<6}{difference:>10.1e}"
        )


def main() -> None:
    """Fit the head, serve the three models, print one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shots", type=int, default=200, help="sentences for the two-shot prompt")
    parser.add_argument("--held-out", type=int, default=300, help="sentences for the heads")
    parser.add_argument(
        "--training", type=int, default=2400, help="rows that the head is fitted on"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    cached = prepare_models(default_cache(), lambda *_: None)
    training, held_out = _split_sentences()
    with tempfile.TemporaryDirectory(prefix="scorekeep-real-") as name:
        folder = Path(name)
        penalty = fit_smollm(cached["judge"], folder / "smollm", training[: options.training])
        _print(
            f"SmolLM2's head: fitted on {options.training} sentences, penalty {penalty:g} chosen "
            "by five folds of them"
        )
        sources = {**cached, "smollm": folder / "smollm"}
        outcomes = asyncio.run(
            _measure(folder, sources, held_out[: options.shots], held_out[: options.held_out])
        )
    _print(
        f"{'held-out sentences':34}{'count':>6}{'service':>10}{'transformers':>14}"
        f"{'same decision':>18}{'difference':>10}"
    )
    for outcome in outcomes:
        _print(outcome.render())


def _split_sentences() -> tuple[Rows, Rows]:
    with tempfile.TemporaryDirectory(prefix="scorekeep-sentences-") as name:
        rows, origin = _fetch_sentences(Path(name), lambda *_: None)
    _print(f"{len(rows)} labelled sentences: {origin}")
    random.Random(0).shuffle(rows)  # noqa: S311  # a split, not a secret
    cut = int(len(rows) * TRAINING_SHARE)
    return rows[:cut], rows[cut:]


@torch.inference_mode()
def fit_smollm(source: Path, target: Path, rows: Rows) -> float:
    """Write ``source`` as a classifier with a linear head without bias; return the penalty chosen.

    Features are the last token's state; nothing but ``rows`` is looked at.
    """
    model: Any = LlamaForSequenceClassification.from_pretrained(
        source,
        dtype=torch.float32,
        num_labels=2,
        id2label={0: "negative", 1: "positive"},
        label2id={"negative": 0, "positive": 1},
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    features_ND = _read_features(model.model, [tokenizer(text).input_ids for text, _ in rows])
    targets_N = torch.tensor([float(label) for _, label in rows])
    with torch.inference_mode(mode=False):
        features_ND, targets_N = features_ND.clone(), targets_N.clone()
        penalty = choose_penalty(features_ND, targets_N)
        weight_D = fit_weight(features_ND, targets_N, penalty)
    model.score.weight.data = torch.stack((-weight_D / 2, weight_D / 2)).float()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return penalty


def _read_features(backbone: Any, texts: Sequence[list[int]]) -> Tensor:  # noqa: ANN401
    """Return the last token's state of each text; texts of one length go together, unpadded."""
    features: dict[int, Tensor] = {}
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    for _, group in itertools.groupby(by_length, key=lambda index: len(texts[index])):
        for part in _split(list(group), FITTED_TOGETHER):
            ids_BL = torch.tensor([texts[index] for index in part])
            last_BD = backbone(ids_BL).last_hidden_state[:, -1]
            features |= dict(zip(part, last_BD, strict=True))
    return torch.stack([features[index] for index in range(len(texts))])


def _split(rows: list[int], size: int) -> Iterator[list[int]]:
    """Yield ``rows`` in parts of at most ``size``."""
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]


def choose_penalty(features_ND: Tensor, targets_N: Tensor) -> float:
    """Return the penalty with the best five-fold accuracy on these rows."""
    fold_N = torch.arange(len(targets_N)) % FOLDS

    def count_right(penalty: float) -> int:
        right = 0
        for fold in range(FOLDS):
            kept_N = fold_N != fold
            weight_D = fit_weight(features_ND[kept_N], targets_N[kept_N], penalty)
            guesses_N = features_ND[~kept_N].double() @ weight_D > 0
            right += int((guesses_N == targets_N[~kept_N]).sum())
        return right

    return max(PENALTIES, key=count_right)


def fit_weight(features_ND: Tensor, targets_N: Tensor, penalty: float) -> Tensor:
    """Return the weight of the logistic regression without intercept, by L-BFGS in float64."""
    features_ND, targets_N = features_ND.double(), targets_N.double()
    weight_D = torch.zeros(features_ND.shape[1], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS((weight_D,), max_iter=200, line_search_fn="strong_wolfe")

    def measure() -> Tensor:
        optimiser.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            features_ND @ weight_D, targets_N
        )
        loss = loss + penalty * weight_D.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(measure)  # type: ignore[no-untyped-call]
    return weight_D.detach()


async def _measure(
    folder: Path, sources: dict[str, Path], shots: Rows, rows: Rows
) -> list[Outcome]:
    models = {name: {"source": str(path), "dtype": "float32"} for name, path in sources.items()}
    with start_redis() as redis_url:
        async with Stack(folder, redis_url, models) as stack:
            await stack.start_worker()
            await _wait_for_models(stack, len(models))
            prompts = [f"{text}\nSentiment:" for text, _ in shots]
            texts = [text for text, _ in rows]
            judge = {"query": PROMPT, "items": prompts, "labels": LABELS, "apply_softmax": True}
            judged = await _score(stack, "judge", judge)
            plain = {"items": texts, "apply_softmax": True}
            heads = {name: await _score(stack, name, plain) for name in ("sentiment", "smollm")}
    _print("the service has scored all; now plain transformers, one sequence at a time")
    first = Outcome(
        "SmolLM2-135M, two-shot",
        judged,
        judge_plainly(sources["judge"], [PROMPT + prompt for prompt in prompts]),
        torch.tensor([label for _, label in shots]),
    )
    truth = torch.tensor([label for _, label in rows])
    titles = {"sentiment": "MiniLM, trained head", "smollm": "SmolLM2-135M, trained head"}
    return [
        first,
        *(
            Outcome(title, heads[name], classify_plainly(sources[name], texts), truth)
            for name, title in titles.items()
        ),
    ]


async def _wait_for_models(stack: Stack, count: int) -> None:
    async with asyncio.timeout(600):
        while True:
            _, _, answer = await stack.get("/v1/models")
            states = [model["state"] for model in answer["data"]]
            if states.count("ready") == count:
                return
            if "failed" in states:
                raise RuntimeError(answer)
            await asyncio.sleep(0.5)


async def _score(stack: Stack, model: str, body: dict[str, Any]) -> Tensor:
    (job_id,) = await stack.submit_many([{"model": model, **body}])
    jobs = await stack.finish([job_id], timeout_s=900)
    if jobs[job_id]["state"] != "succeeded":
        raise RuntimeError(jobs[job_id])
    _, _, answer = await stack.get(f"/v1/jobs/{job_id}/scores")
    return torch.tensor(answer["scores"], dtype=torch.float64)


@torch.inference_mode()
def judge_plainly(source: Path, texts: Sequence[str]) -> Tensor:
    """Return softmax over the two labels' next-token logits, one text at a time."""
    kind: Any = AutoModelForCausalLM
    model = kind.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    labels = [tokenizer(label, add_special_tokens=False).input_ids[0] for label in LABELS]
    rows = [model(torch.tensor([tokenizer(text).input_ids])).logits[0, -1] for text in texts]
    return torch.stack(rows)[:, labels].double().softmax(-1)


@torch.inference_mode()
def classify_plainly(source: Path, texts: Sequence[str]) -> Tensor:
    """Return softmax over the classes, one text at a time."""
    kind: Any = AutoModelForSequenceClassification
    model = kind.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    rows = [
        model(**{name: torch.tensor([ids]) for name, ids in tokenizer(text).items()}).logits[0]
        for text in texts
    ]
    return torch.stack(rows).double().softmax(-1)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
