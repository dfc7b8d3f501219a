"""Idempotency keys on the routes that submit, on both databases."""

import asyncio
from collections import Counter

import pytest

from tests.api.service import Service

BODY = {"model": "tiny", "items": ["a"]}


@pytest.mark.parametrize("key", ["k-1", '"k-1"'])
async def test_the_same_key_is_the_same_job(service: Service, key: str) -> None:
    """Same key, same body: the same job, and the answer says that it is a replay."""
    first = await service.post("/v1/jobs", BODY, Idempotency_Key="k-1")
    second = await service.post("/v1/jobs", BODY, Idempotency_Key=key)

    assert first.status == second.status == 202
    assert first.json["id"] == second.json["id"]
    assert "Idempotent-Replayed" not in first.headers
    assert second.headers["Idempotent-Replayed"] == "true"


async def test_another_body_is_refused(service: Service) -> None:
    """Same key, other body: 422; on another route the key is another key."""
    await service.post("/v1/jobs", BODY, Idempotency_Key="k")

    other = await service.post("/v1/jobs", {**BODY, "items": ["b"]}, Idempotency_Key="k")
    route = await service.post("/v1/score", BODY, Idempotency_Key="k", Prefer="respond-async")

    assert other.status == 422
    assert other.json["code"] == "idempotency_key_reused"
    assert other.json["param"] == "Idempotency-Key"
    assert route.status == 202
    assert "Idempotent-Replayed" not in route.headers


async def test_fifty_at_once_are_one_job(service: Service) -> None:
    """However many come together, one job is made, and all are told of it."""
    posts = [service.post("/v1/jobs", BODY, Idempotency_Key="k") for _ in range(50)]

    answers = await asyncio.gather(*posts)

    assert {answer.status for answer in answers} == {202}
    assert len({answer.json["id"] for answer in answers}) == 1
    replayed = Counter(answer.headers.get("Idempotent-Replayed") for answer in answers)
    assert replayed == {None: 1, "true": 49}
    assert len((await service.get("/v1/jobs")).json["data"]) == 1


async def test_one_bad_key_harms_no_neighbour(service: Service) -> None:
    """Among many submits at once only the one with the reused key is refused."""
    await service.post("/v1/jobs", BODY, Idempotency_Key="used")
    posts = [service.post("/v1/jobs", BODY, Idempotency_Key=f"k{index}") for index in range(20)]
    posts.append(service.post("/v1/jobs", {**BODY, "query": "q"}, Idempotency_Key="used"))
    posts += [service.post("/v1/jobs", BODY) for _ in range(20)]

    answers = await asyncio.gather(*posts)

    assert Counter(answer.status for answer in answers) == {202: 40, 422: 1}


async def test_a_key_of_a_deleted_job_is_gone(service: Service) -> None:
    """The replay of a deleted job is 410, not a second job."""
    first = await service.post("/v1/jobs", BODY, Idempotency_Key="k")
    await service.finish(await service.claim())
    await service.request("DELETE", f"/v1/jobs/{first.json['id']}")

    again = await service.post("/v1/jobs", BODY, Idempotency_Key="k")

    assert again.status == 410


async def test_a_replay_on_a_waiting_route_waits_too(service: Service) -> None:
    """The second call gets the first one's scores."""
    first = asyncio.create_task(service.post("/v1/score", BODY, Idempotency_Key="k"))
    await service.finish(await service.next_claim())
    answer = await first

    again = await service.post("/v1/score", BODY, Idempotency_Key="k")

    assert again.status == 200
    assert again.json == answer.json
    assert again.headers["Idempotent-Replayed"] == "true"
