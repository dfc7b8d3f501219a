"""The application on SQLite with a worker that scores by hashes of the input."""

from collections.abc import AsyncIterator

import pytest

from contract.models import ModelConfig, ScoringPath
from storage.database import Database
from tests.api.service import Service
from tests.bulk.conftest import run
from tests.worker.harness import create_settings
from worker.engine.deterministic import SOURCE

MODELS = {
    "tiny": ModelConfig(source=SOURCE),
    "short": ModelConfig(source=SOURCE, max_tokens=8),
    "judge": ModelConfig(source=SOURCE, path=ScoringPath.CAUSAL),
    "told": ModelConfig(source=SOURCE, instruction="Find what answers."),
}


@pytest.fixture
async def served(
    sqlite_url: str, sqlite_database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Service]:
    """The service with its models ready."""
    settings = create_settings(sqlite_url, blob_url, redis_url, default_wait_s=20.0)
    async with run(settings, sqlite_database) as bulks:
        await bulks.start_worker(**MODELS)
        yield bulks.service


async def scores_of(
    service: Service, items: list[str], query: str = "", **fields: object
) -> list[float]:
    """Return the positive class's score of each item, asked for on SGLang's route."""
    body = {"model": "tiny", "items": items, "query": query, "activation": "model", **fields}
    answer = await service.post("/v1/score", body)
    assert answer.status == 200, answer.body
    return [row[1] for row in answer.json["scores"]]
