"""Cases of cases.jsonl that only the whole service can show: real models behind HTTP."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.models import ModelConfig
from storage.database import Database
from tests.api.service import Service
from tests.reference import Reference
from tests.tiny_models import make_tiny
from tests.worker.harness import create_settings, run_worker
from worker.engine.loader import load_model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "reranker": ("BertForSequenceClassification", {"labels": 1}),
    "broken": ("LlamaForSequenceClassification", {}),
    "causal": ("LlamaForCausalLM", {}),
}
#: the only id whose embedding is NaN in the broken model
BAD = 350


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints, one of them with a NaN in it."""
    folder = tmp_path_factory.mktemp("cases")
    made = {
        name: make_tiny(folder / name, kind, **options) for name, (kind, options) in MODELS.items()
    }
    weights = load_file(made["broken"] / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = float("nan")
    save_file(weights, made["broken"] / "model.safetensors", {"format": "pt"})
    return made


@pytest.fixture
async def service(
    folders: dict[str, Path],
    sqlite_url: str,
    sqlite_database: Database,
    blob_url: str,
    redis_url: str,
) -> AsyncIterator[Service]:
    """The API and a worker that serves all of them."""
    torch.set_num_threads(1)
    settings = create_settings(sqlite_url, blob_url, redis_url)
    configs = {name: ModelConfig(source=str(path)) for name, path in folders.items()}
    scorers = [load_model(name, config) for name, config in configs.items()]
    service = Service(settings, sqlite_database, configs)
    await service.start()
    async with run_worker(settings, *scorers):
        yield service
        await service.stop()


async def test_softmax_of_one_label(service: Service) -> None:
    """It is refused and the sigmoid named; without it the raw logits come, as rows of one."""
    body = {"model": "reranker", "query": "good?", "items": ["yes", "no"]}

    raw = await service.post("/v1/score", body)
    refused = await service.post("/v1/score", {**body, "apply_softmax": True})
    sigmoid = await service.post("/v1/score", {**body, "activation": "sigmoid"})

    assert [len(row) for row in raw.json["scores"]] == [1, 1]
    assert refused.status == 422
    assert "sigmoid" in refused.json["error"]["message"]
    expected = torch.sigmoid(torch.tensor(raw.json["scores"], dtype=torch.float64))
    assert torch.allclose(torch.tensor(sigmoid.json["scores"], dtype=torch.float64), expected)


async def test_a_head_that_yields_nan(service: Service) -> None:
    """One item of five fails by name, four scores stand, the job is partial, JSON stays JSON."""
    body = {"model": "broken", "items": [[30, 40], [31, 41], [32, BAD, 42], [33], [34, 44]]}

    job = (await service.post("/v1/jobs", body, Prefer="wait=20")).json
    answer = await service.get(f"/v1/jobs/{job['id']}/scores")

    assert job["state"] == "partial"
    assert job["counts"] == {"total": 5, "succeeded": 4, "failed": 1}
    assert b"NaN" not in answer.body
    assert [row is None for row in answer.json["scores"]] == [False, False, True, False, False]
    assert [(e["index"], e["code"]) for e in answer.json["errors"]] == [(2, "non_finite_score")]
    json.loads(answer.body, parse_constant=pytest.fail)


async def test_empty_text_items(service: Service, folders: dict[str, Path]) -> None:
    """The empty items' rows are the distribution after the query."""
    query = "the quick brown fox jumps over the lazy dog while seven wizards"
    labels = [9, 4, 17]
    reference = Reference(folders["causal"], causal=True)
    after = torch.tensor(reference.logprobs(reference.tokenizer(query).input_ids)[labels]).exp()

    answer = await service.post(
        "/v1/score",
        {"model": "causal", "query": query, "items": ["", " yes", ""], "label_token_ids": labels},
    )

    first, between, last = torch.tensor(answer.json["scores"], dtype=torch.float64)
    assert (first - after).abs().max() <= 1e-6
    assert (last - after).abs().max() <= 1e-6
    assert (between - after).abs().max() > 1e-4


async def test_text_and_tokens_mixed(service: Service) -> None:
    """A list of ids is never written into a prompt as text: it is refused."""
    body = {"model": "causal", "query": "abc", "items": [[1, 2]], "label_token_ids": [5]}

    answer = await service.post("/v1/score", body)

    assert answer.status == 422
    assert "mix" in answer.json["error"]["message"]
