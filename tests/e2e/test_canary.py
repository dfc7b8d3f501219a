"""A weight changes under a live model: the API says so, and sends nobody there any more."""

import asyncio
from pathlib import Path
from typing import Any

import torch

from contract.models import CANARY_DRIFT, ModelConfig
from storage.database import Database
from tests.api.service import Service
from tests.tiny_models import make_tiny
from tests.worker.harness import create_settings, run_worker
from worker.engine.loader import load_model
from worker.engine.scorer import ModelScorer


def load(folder: Path, name: str) -> ModelScorer:
    """Return a one-label reranker that is recorded in ``folder``."""
    source = make_tiny(folder / name, "BertForSequenceClassification", labels=1, seed=len(name))
    scorer = load_model(name, ModelConfig(source=str(source)), folder / "canaries")
    assert isinstance(scorer, ModelScorer)
    return scorer


def change_a_weight(scorer: ModelScorer) -> None:
    """What a bad memory module or a stray write does."""
    with torch.no_grad():
        next(scorer.network.backbone.module.parameters()).mul_(1.01)


async def wait_for(service: Service, model: str, state: str) -> dict[str, Any]:
    """Return what ``/readyz`` answers once the model is in that state, its status beside it."""
    async with asyncio.timeout(20):
        while True:
            answer = await service.get("/readyz")
            if answer.json["models"].get(model) == state:
                return {"status": answer.status, **answer.json}
            await asyncio.sleep(0.05)


async def test_readiness_follows_the_canaries(
    tmp_path: Path, sqlite_url: str, sqlite_database: Database, blob_url: str, redis_url: str
) -> None:
    """One drifted model is named while the other serves; with none left the answer is 503."""
    settings = create_settings(sqlite_url, blob_url, redis_url, canary_s=0.05)
    one, other = load(tmp_path, "one"), load(tmp_path, "other")
    names = {name: ModelConfig(source="x") for name in ("one", "other")}
    service = Service(settings, sqlite_database, names)
    await service.start()
    body = {"query": "good?", "items": ["yes", "a good film"]}
    async with run_worker(settings, one, other):
        healthy = [await wait_for(service, name, "ready") for name in names][-1]
        scored = await service.post("/v1/score", {"model": "one", **body})
        change_a_weight(one)
        half = await wait_for(service, "one", "failed")
        refused = await service.post("/v1/score", {"model": "one", **body})
        served = await service.post("/v1/score", {"model": "other", **body})
        change_a_weight(other)
        none = await wait_for(service, "other", "failed")
    await service.stop()

    assert (healthy["status"], healthy["reasons"]) == (200, [])
    assert scored.status == 200
    assert [len(row) for row in scored.json["scores"]] == [1, 1]
    assert half["status"] == 200
    assert [(r["part"], r["code"]) for r in half["reasons"]] == [("model one", CANARY_DRIFT)]
    assert str(tmp_path / "canaries") in half["reasons"][0]["detail"]
    assert refused.status == 503
    assert CANARY_DRIFT in refused.json["error"]["message"]
    assert served.status == 200
    assert none["status"] == 503
    assert len(none["reasons"]) == 2
