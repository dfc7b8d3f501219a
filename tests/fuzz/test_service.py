"""The running service against headers, paths and bodies made at random, by two tenants.

Never a 500, never a hang, never a byte of the other's. The seed is in the name of the test.
"""

import asyncio
import random
from collections import Counter
from urllib.parse import quote

import aiohttp
import pytest
import yarl

from tests.api.service import Service
from tests.api.tenants import Tenant, make_tenant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
_REQUESTS = 400
_SECRET = "the-secret-of-the-other-tenant"  # noqa: S105  # what must not be seen
_PIECES = (
    *("bytes=", "-", ",", "0", "1", "7", "99999999999999999999", '"', "\\", ";", "=", "*", " "),
    *("wait", "respond-async", "W/", "v1,", "items", "gzip", "é", "null", "NaN", "-1", "1e999"),
    *("application/vnd.safetensors", "application/json", "text/event-stream", "q=0", "sk_"),
)
_NAMES = (
    *("Prefer", "Range", "If-Range", "If-None-Match", "Idempotency-Key", "Last-Event-ID"),
    *("Accept", "Content-Type", "Content-Encoding", "X-Request-Id", "Origin"),
)
_PARTS = (
    *("", "/scores", "/hidden_states", "/events", "/deliveries", "/items/0/hidden_state"),
    *("/cancel", "/retry", "/compare/x", "/content", "/results", "/rotate", "/test"),
)
_FOLDERS = (
    *("jobs", "bulks", "batches", "files", "webhook_endpoints", "deliveries", "score"),
    *("rescore", "models", "limits", "webhooks/default/secret"),
)
_METHODS = ("GET", "GET", "GET", "POST", "PATCH", "DELETE", "HEAD", "PUT")
_QUERY = ("wait", "limit", "cursor", "after", "state", "key", "encoding_format", "metadata.a")


def _noise(rng: random.Random) -> str:
    return "".join(rng.choices(_PIECES, k=rng.randint(0, 5)))


def _body(rng: random.Random) -> bytes:
    fields = ("items", "model", "query", "labels", "url", "input_file_id", "jobs", "bulk", "since")
    values = ('["a"]', '"tiny"', "[[1]]", "{}", "null", "1e999", '"\\u0000"', '"\\ud800"', "[" * 99)
    pairs = [f'"{rng.choice(fields)}": {rng.choice(values)}' for _ in range(rng.randint(0, 3))]
    text = "{" + ", ".join(pairs) + "}"
    return rng.choice([text.encode(), _noise(rng).encode(), b"", bytes(rng.randbytes(20))])


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_requests_are_answered(guarded: Service, seed: int) -> None:
    """Every answer is one of ours, soon, and holds nothing of the other tenant's."""
    rng = random.Random(seed)  # noqa: S311  # to be repeated
    owner, stranger = [await make_tenant(guarded, name) for name in ("owner", "stranger")]
    await guarded.report_ready()
    ids = await _fill(owner)
    statuses: Counter[int] = Counter()

    for _ in range(_REQUESTS):
        status, answer = await asyncio.wait_for(_ask(stranger, rng, ids), 15)
        statuses[status] += 1

        assert status < 500, answer
        assert _SECRET.encode() not in answer

    assert len(statuses) >= 5
    mine = await owner.get(f"/v1/jobs/{ids[0]}")
    assert (mine.status, mine.json["state"]) == (200, "succeeded")
    assert mine.json["metadata"] == {"a": _SECRET}


async def _fill(owner: Tenant) -> list[str]:
    job_id = await owner.submit(
        return_pooled_hidden_states=True, metadata={"a": _SECRET}, webhook="https://h.example/"
    )
    await owner.service.finish(await owner.service.claim())
    deliveries = await owner.get(f"/v1/jobs/{job_id}/deliveries")
    endpoint = await owner.post("/v1/webhook_endpoints", {"url": f"https://h.example/{_SECRET}"})
    return [job_id, deliveries.json["data"][0]["id"], endpoint.json["id"]]


async def _ask(stranger: Tenant, rng: random.Random, ids: list[str]) -> tuple[int, bytes]:
    named = rng.choice([*ids, f"job_{'0' * 32}", quote(_noise(rng), safe=""), "%00", "%ff", ".."])
    folder = rng.choice(_FOLDERS)
    path = f"/v1/{folder}" + (f"/{named}{rng.choice(_PARTS)}" if rng.random() < 0.8 else "")
    if rng.random() < 0.5:
        path += f"?{rng.choice(_QUERY)}={quote(rng.choice([_noise(rng), '1', 'owner']), safe='')}"
    method = rng.choice(_METHODS)
    headers = {
        name: _noise(rng).replace("é", "e") for name in rng.sample(_NAMES, rng.randint(0, 3))
    }
    if method in {"POST", "PATCH"} and rng.random() < 0.7:
        headers["Content-Type"] = "application/json"
    headers["Authorization"] = f"Bearer {stranger.key}"
    url = yarl.URL(stranger.service.url + path, encoded=True)
    data = _body(rng) if method in {"POST", "PATCH", "PUT"} else None
    timeout = aiohttp.ClientTimeout(total=10)
    http = stranger.service.http
    async with http.request(
        method, url, headers=headers, data=data, timeout=timeout, allow_redirects=False
    ) as answer:
        return answer.status, await answer.read()
