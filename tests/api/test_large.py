"""Large requests: limited, stored whole, and no reason for others to wait."""

import asyncio
import io
import time

import msgspec
import pytest

from api.limits import GATE
from api.state import SETTINGS
from api.submission import estimate_tokens
from contract.scores import ScoreRequest
from storage import jobs
from tests.api.service import Service

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/score"])
async def test_more_tokens_than_the_limit_are_refused(service: Service, path: str) -> None:
    """A small body can ask for much: the query counts once per item. The limit is named."""
    body = {"model": "tiny", "query": "x" * 1_000_000, "items": [""] * 10_000}

    answer = await service.post(path, body)

    assert answer.status == 413
    assert b"max_job_tokens of 100000000" in answer.body
    assert (await service.get("/v1/limits")).json["max_job_tokens"] == 100_000_000


async def test_the_largest_estimate_can_be_stored(service: Service) -> None:
    """Whatever the limit is set to, the estimate fits its column."""
    settings = msgspec.structs.replace(
        service.settings, max_job_tokens=2**31 - 1, tenant_queued_tokens=0, queue_tokens=0
    )
    service.app._state[SETTINGS] = settings
    gate = service.app[GATE]
    gate._settings, gate._defaults = settings, settings.tenant_limits
    body = {"model": "tiny", "query": "x" * 1_000_000, "items": [""] * 10_000}

    answer = await service.post("/v1/jobs", body)

    assert answer.status == 202
    assert estimate_tokens(ScoreRequest(items=["a"] * 9000, query="x" * 10**6)) == 2**31 - 1


async def test_a_large_request_is_stored_whole(sqlite_service: Service) -> None:
    """What the worker reads is what was sent, also above the size at which it is sliced."""
    items = [[n % 7, 2**31 - 1] * 40 for n in range(1000)]
    body = {"model": "tiny", "items": items, "query": [1, 2, 3], "return_label_mass": False}
    small = await sqlite_service.submit(items=items[:2], query=[1, 2, 3], return_label_mass=False)

    answer = await sqlite_service.post("/v1/jobs", body, Idempotency_Key="large")
    again = await sqlite_service.post("/v1/jobs", body, Idempotency_Key="large")
    async with sqlite_service.database.snapshot() as tx:
        stored = await jobs.read_request(tx, "default", answer.json["id"])
        sample = await jobs.read_request(tx, "default", small)

    assert again.headers["Idempotent-Replayed"] == "true"
    assert msgspec.json.decode(stored) == {**msgspec.json.decode(sample), "items": items}


async def test_a_large_body_holds_nobody_up(sqlite_service: Service) -> None:
    """While 30 MB are taken in, the event loop answers: no gap is near the seconds they cost."""
    item = "[" + ",".join(["1"] * 1500) + "]"
    body = ('{"model":"tiny","items":[' + ",".join([item] * 10_000) + "]}").encode()
    gaps: list[float] = []

    async def beat() -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.005)
            gaps.append(time.monotonic() - begun)

    beating = asyncio.create_task(beat())
    begun = time.monotonic()
    answer = await sqlite_service.request("POST", "/v1/jobs", data=io.BytesIO(body), headers=JSON)
    took = time.monotonic() - begun
    beating.cancel()

    assert answer.status == 202
    assert max(gaps) < max(0.5, took / 5), (max(gaps), took)


async def test_scores_beyond_json_are_fetched_as_a_file(
    sqlite_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has a limit for scores too, and says what to do; the file has none."""
    monkeypatch.setattr("api.results.MAX_JSON_BYTES", 64)
    job_id = await sqlite_service.submit(items=["a"] * 9)
    await sqlite_service.finish(await sqlite_service.claim())
    path = f"/v1/jobs/{job_id}/scores"

    answer = await sqlite_service.get(path)
    file = await sqlite_service.get(path, headers={"Accept": "application/vnd.safetensors"})

    assert answer.status == 413
    assert "72 bytes" in answer.json["detail"]
    assert "safetensors" in answer.json["detail"]
    assert file.status == 200


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/score"])
@pytest.mark.parametrize(
    "labels",
    [
        {"labels": [f" {n}" for n in range(101)]},
        {"label_token_ids": list(range(101))},
        {"label_token_ids": [[*range(101)]] * 10},
    ],
)
async def test_more_scores_than_the_limit_are_refused(
    sqlite_service: Service, path: str, labels: dict[str, object]
) -> None:
    """Items times labels: a few kilobytes cannot ask for more than the limit, which is named."""
    sqlite_service.app._state[SETTINGS] = msgspec.structs.replace(
        sqlite_service.settings, max_scores=1000
    )
    answer = await sqlite_service.post(path, {"model": "tiny", "items": ["a"] * 10, **labels})

    assert answer.status == 413
    assert b"1010 scores" in answer.body
    assert b"max_scores of 1000" in answer.body
    assert (await sqlite_service.get("/v1/limits")).json["max_scores"] == 1000


def test_labels_count_in_the_estimate() -> None:
    """A job with many long labels is not claimed together with hundreds of others."""
    bare = estimate_tokens(ScoreRequest(items=["a"] * 300))
    labels = ["x" * 40 + str(n) for n in range(300)]
    assert estimate_tokens(ScoreRequest(items=["a"] * 300, labels=labels)) >= bare + 300 * 300 * 10
