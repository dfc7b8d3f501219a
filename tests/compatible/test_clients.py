"""Stock clients of other services, nothing but the address changed."""

import asyncio
from typing import Any

import cohere
import httpx
import pytest
from cohere.errors import NotFoundError, UnprocessableEntityError
from huggingface_hub import InferenceClient
from openai import AsyncOpenAI

from tests.api.service import Service
from tests.compatible.conftest import scores_of

DOCUMENTS = ["Paris is in France.", "Bread.", "The Seine flows through Paris."]


async def test_coheres_v2_client(served: Service) -> None:
    """``cohere.AsyncClientV2.rerank``: results, order, meta."""
    scores = await scores_of(served, DOCUMENTS, "Paris?")
    async with cohere.AsyncClientV2(api_key="none", base_url=served.url) as client:
        answer = await client.rerank(model="tiny", query="Paris?", documents=DOCUMENTS, top_n=2)

    best = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [each.index for each in answer.results] == best
    assert [each.relevance_score for each in answer.results] == [scores[index] for index in best]
    assert answer.meta is not None
    assert answer.meta.billed_units is not None
    assert answer.meta.billed_units.search_units == 1


async def test_coheres_v1_client(served: Service) -> None:
    """``cohere.AsyncClient.rerank``, the older route, with documents sent back."""
    async with cohere.AsyncClient(api_key="none", base_url=served.url) as client:
        answer = await client.rerank(
            model="tiny", query="Paris?", documents=DOCUMENTS, return_documents=True
        )

    for each in answer.results:
        assert each.document is not None
        assert each.document.text == DOCUMENTS[each.index]


async def test_coheres_errors(served: Service) -> None:
    """What the service refuses is the client's own class of error."""
    async with cohere.AsyncClientV2(api_key="none", base_url=served.url) as client:
        with pytest.raises(NotFoundError, match="nobody"):
            await client.rerank(model="nobody", query="q", documents=["a"])
        with pytest.raises(UnprocessableEntityError):
            await client.rerank(model="tiny", query="q", documents=["a"], top_n=-1)


async def test_hugging_faces_client(served: Service) -> None:
    """``InferenceClient.text_classification`` against ``/predict``."""
    client = InferenceClient(model=f"{served.url}/predict?model=tiny", timeout=20)
    body = {"model": "tiny", "items": ["I liked it."], "activation": "model"}
    (row,) = (await served.post("/v1/score", body)).json["scores"]

    classes: Any = await asyncio.to_thread(client.text_classification, "I liked it.", top_k=1)

    assert classes[0].score == max(row)


async def test_openais_client_lists_models_and_scores(served: Service) -> None:
    """The ``openai`` client's base address serves ``models.list`` and raw posts."""
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        names = [model.id async for model in client.models.list()]
        answer = await client.post(
            "/score",
            body={"model": "tiny", "text_1": "q", "text_2": ["a", "b"]},
            cast_to=httpx.Response,
        )

    assert names == ["judge", "other", "short", "tiny", "told"]
    assert [each["index"] for each in answer.json()["data"]] == [0, 1]
