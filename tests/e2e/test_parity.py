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


@torch.inference_mode()
def _relevance(folder: Path, instruction: str) -> list[float]:
    """Qwen3-Reranker's own prompt, written by hand, and yes against no behind it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = tokenizer.convert_tokens_to_ids(["yes", "no"])
    found = []
    for text in TEXTS[:3]:
        prompt = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
            'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            f"<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {QUERY}\n"
            f"<Document>: {text}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        found.append(model(ids).logits[0, -1, answers].softmax(-1)[0].item())
    return found


async def _check_reranker(stack: Stack, folder: Path) -> float:
    """Rerank with instructions; return the largest difference, and see what has no place."""
    body = {"model": "reranker", "query": QUERY, "documents": TEXTS[:3]}
    difference = 0.0
    for told in ("Find what was liked", "Find complaints"):
        status, _, answer = await stack.post("/v1/rerank", body | {"instruct": told})
        assert status == 200, answer
        ranked = {each["index"]: each["relevance_score"] for each in answer["results"]}
        ours = [ranked[index] for index in range(3)]
        difference = max(difference, _largest_difference([ours], [_relevance(folder, told)]))
    status, _, refused = await stack.post(
        "/v1/rerank", body | {"model": "Bert-classifier", "instruct": "x"}
    )
    assert (status, refused["error"]["param"]) == (422, "instruction")
    return difference


def _largest_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    return (torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs)).abs().max().item()


async def test_scores_equal_transformers(
    tmp_path: Path, redis_url: str, record_property: Callable[[str, object], None]
) -> None:
    """Bert, Llama, Qwen2 and Qwen3, both paths, six items a job: fp32 within 1e-5.

    So do those of a reranker that is told its task with each request.
    """
    sources = {
        f"{family}-classifier": f"{family}ForSequenceClassification" for family in CLASSIFIERS
    }
    sources |= {f"{family}-causal": f"{family}ForCausalLM" for family in DECODERS}
    for name, architecture in sources.items():
        options: dict[str, Any] = {"num_labels": 3} if "Sequence" in architecture else {}
        make_tiny(tmp_path / name, architecture, **options)
    models = {name: {"source": str(tmp_path / name), "dtype": "float32"} for name in sources}
    folder = make_tiny(
        tmp_path / "reranker", "Qwen3ForCausalLM", tokenizer={"added": ("yes", "no")}
    )
    models["reranker"] = {"source": str(folder), "template": "qwen3-reranker"}

    async with Stack(tmp_path, redis_url, models) as stack:
        await stack.start_worker()
        await stack.wait_for("/readyz")
        for name in sources:
            causal = name.endswith("causal")
            body: dict[str, Any] = {"model": name, "query": QUERY, "items": TEXTS}
            body |= {"label_token_ids": LABELS} if causal else {"apply_softmax": True}
            status, _, answer = await stack.post("/v1/score", body)
            assert status == 200, answer
            expected = (
                _label_probabilities(tmp_path / name)
                if causal
                else _classify(tmp_path / name, pair=name.startswith("Bert"))
            )

            difference = _largest_difference(answer["scores"], expected)
            record_property(name, difference)
            assert difference <= 1e-5, name
        assert await _check_reranker(stack, folder) <= 1e-5
