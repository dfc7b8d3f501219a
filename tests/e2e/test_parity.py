"""Through HTTP every score equals a plain transformers forward in fp32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from tests.e2e.stack import Stack
from tests.tiny_models import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TEXTS = ["a fine film", "x", "dull " * 20, "what a day to be alive", "no", "never " * 7 + "again"]
QUERY = "is this good? "
LABELS = [9, 4, 17]
CLASSIFIERS = ["Bert", "Llama", "Qwen2", "Qwen3"]
DECODERS = ["Llama", "Qwen2", "Qwen3"]


@torch.inference_mode()
def _classify(folder: Path, *, pair: bool) -> list[list[float]]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in TEXTS:
        inputs = tokenizer(QUERY, text) if pair else tokenizer(QUERY + text)
        tensors = {name: torch.tensor([values]) for name, values in inputs.items()}
        rows.append(model(**tensors).logits[0].softmax(-1).tolist())
    return rows


@torch.inference_mode()
def _label_probabilities(folder: Path) -> list[list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(QUERY + text)["input_ids"]])
        rows.append(model(ids).logits[0, -1].softmax(-1)[LABELS].tolist())
    return rows


def _largest_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    return (torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs)).abs().max().item()


async def test_scores_equal_transformers(
    tmp_path: Path, redis_url: str, record_property: Callable[[str, object], None]
) -> None:
    """Bert, Llama, Qwen2 and Qwen3, both paths, six items a job: fp32 within 1e-5."""
    sources = {
        f"{family}-classifier": f"{family}ForSequenceClassification" for family in CLASSIFIERS
    }
    sources |= {f"{family}-causal": f"{family}ForCausalLM" for family in DECODERS}
    for name, architecture in sources.items():
        options: dict[str, Any] = {"num_labels": 3} if "Sequence" in architecture else {}
        make_tiny(tmp_path / name, architecture, **options)
    models = {name: {"source": str(tmp_path / name), "dtype": "float32"} for name in sources}

    async with Stack(tmp_path, redis_url, models) as stack:
        await stack.start_worker()
        await stack.wait_for("/readyz")
        for name in sources:
            causal = name.endswith("causal")
            body: dict[str, Any] = {"model": name, "query": QUERY, "items": TEXTS}
            body |= {"label_token_ids": LABELS} if causal else {"apply_softmax": True}
            status, _, answer = await stack.post("/v1/score", body)
            assert status == 200, answer
            folder = tmp_path / name
            expected = (
                _label_probabilities(folder)
                if causal
                else _classify(folder, pair=name.startswith("Bert"))
            )

            difference = _largest_difference(answer["scores"], expected)
            record_property(name, difference)
            assert difference <= 1e-5, name
