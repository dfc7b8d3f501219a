"""Everything that a client can get wrong, and what it is told."""

import asyncio
import gzip
import json
from typing import Any

import aiohttp
import pytest

from contract.config import Settings
from storage.database import Database
from tests.api.conftest import make_settings
from tests.api.service import Answer, Service

JSON = {"Content-Type": "application/json"}
UNKNOWN = "job_" + "0" * 32
GOOD = b'{"model": "tiny", "items": ["a"]}'
DEEP = b"[" * 10_000

#: Body, status, param, a word of the message. On both submitting routes.
BAD_BODIES: list[tuple[Any, int, str | None, str]] = [
    ({"model": "nope", "items": ["a"]}, 404, "model", "other, tiny"),
    ({"items": ["a"]}, 422, "model", "other, tiny"),
    ({"model": "tiny"}, 422, None, "items"),
    ({"model": "tiny", "items": None}, 422, "items", ""),
    ({"model": "tiny", "items": 5}, 422, "items", ""),
    ({"model": "tiny", "items": {"a": 1}}, 422, "items", ""),
    ({"model": "tiny", "items": ["a", 5]}, 422, "items[1]", ""),
    ({"model": "tiny", "items": ["a", [1]]}, 422, "items", "mix"),
    ({"model": "tiny", "items": [[1], [-1]]}, 422, "items[1][0]", "negative"),
    ({"model": "tiny", "items": [[2**31]]}, 422, "items[0][0]", "vocabulary"),
    ({"model": "tiny", "items": [[10**30]]}, 422, "items[0][0]", "vocabulary"),
    ({"model": "tiny", "items": [[True]]}, 422, "items[0][0]", ""),
    ({"model": "tiny", "items": ["a"], "query": [1]}, 422, "query", "mix"),
    ({"model": "tiny", "items": ["a"], "colour": 1}, 422, "colour", "unknown field"),
    ({"model": "tiny", "items": ["a"], "temperature": 0}, 422, "temperature", ""),
    ({"model": "tiny", "items": ["a"], "temperature": "hot"}, 422, "temperature", ""),
    ({"model": "tiny", "items": ["a"], "temperature": 2}, 422, "temperature", "apply_softmax"),
    ({"model": "tiny", "items": ["a"], "apply_softmax": "yes"}, 422, "apply_softmax", ""),
    ({"model": "tiny", "items": ["a"], "activation": "tanh"}, 422, "activation", ""),
    ({"model": "tiny", "items": ["a"], "truncation": "left"}, 422, "truncation", ""),
    ({"model": "tiny", "items": ["a"], "labels": []}, 422, "labels", "empty"),
    ({"model": "tiny", "items": ["a"], "label_token_ids": [1, 1]}, 422, "label_token_ids[1]", ""),
    ({"model": "tiny", "items": ["a"], "label_token_ids": [[1], [2]]}, 422, "label_token_ids", ""),
    ({"model": "tiny", "items": ["a"] * 21}, 413, "items", "max_items of 20"),
    ({"model": 5, "items": ["a"]}, 422, "model", ""),
    ({"model": "a\x00b", "items": ["a"]}, 404, "model", ""),
    ({"model": "x" * 5000, "items": ["a"]}, 404, "model", ""),
    ([], 422, None, ""),
    ("text", 422, None, ""),
    (None, 422, None, ""),
]

#: Fields of ``POST /v1/jobs`` alone.
BAD_FIELDS: list[tuple[dict[str, Any], int, str]] = [
    ({"webhook": "http://example.org/"}, 422, "webhook"),
    ({"webhook": "https://127.0.0.1/"}, 422, "webhook"),
    ({"webhook": "https://[::ffff:10.0.0.1]/"}, 422, "webhook"),
    ({"webhook": "nonsense"}, 422, "webhook"),
    ({"webhook": ""}, 422, "webhook"),
    ({"webhook": 5}, 422, "webhook"),
    ({"webhook_events": ["job.failed"]}, 422, "webhook_events"),
    ({"webhook": "https://example.org", "webhook_events": []}, 422, "webhook_events"),
    ({"webhook": "https://example.org", "webhook_events": ["x"]}, 422, "webhook_events[0]"),
    ({"priority": "urgent"}, 422, "priority"),
    ({"metadata": {"a": 1}}, 422, "metadata[...]"),
    ({"metadata": {"": "x"}}, 422, "metadata."),
    ({"metadata": {"k" * 65: "x"}}, 422, "metadata." + "k" * 64),
    ({"metadata": {"k": "x" * 513}}, 422, "metadata.k"),
    ({"metadata": {"k": "a\x00b"}}, 422, "metadata.k"),
    ({"metadata": {"k\x00": "a"}}, 422, "metadata"),
    ({"metadata": {str(index): "x" for index in range(17)}}, 422, "metadata"),
    ({"queue_deadline_s": 0}, 422, "queue_deadline_s"),
    ({"run_timeout_s": -1}, 422, "run_timeout_s"),
    ({"expires_after_s": 1e300}, 422, "expires_after_s"),
]

#: Raw body, headers, status.
BAD_BYTES: list[tuple[bytes, dict[str, str], int]] = [
    (b"", JSON, 400),
    (b"{", JSON, 400),
    (b"\xff\xfe", JSON, 400),
    (b'{"model": "tiny", "items": ["\xff"]}', JSON, 400),
    (b'{"model": "tiny", "items": ["\\ud800"]}', JSON, 400),
    (b'{"model": "tiny", "items": [NaN]}', JSON, 400),
    (b'{"model": "tiny", "items": ["a"], "temperature": 1e999}', JSON, 422),
    (DEEP, JSON, 422),
    (b'{"model": "tiny", "items": ' + DEEP, JSON, 422),
    (b"{}", {"Content-Type": "text/plain"}, 415),
    (b"{}", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    (b"{}", {"Content-Type": "nonsense"}, 415),
    (b"{}", {"Content-Type": "application/json; charset=utf-16"}, 415),
    (b"{}", {"Content-Type": "application/json; charset=nonsense"}, 415),
    (b"x" * 20000, JSON, 413),
    (b"not gzip", {**JSON, "Content-Encoding": "gzip"}, 400),
    (gzip.compress(b"{}")[:-4], {**JSON, "Content-Encoding": "gzip"}, 400),
    (b"{}", {**JSON, "Content-Encoding": "br"}, 415),
    (gzip.compress(b" " * 10**6), {**JSON, "Content-Encoding": "gzip"}, 413),
    (GOOD, {**JSON, "Idempotency-Key": '"unclosed'}, 400),
    (GOOD, {**JSON, "Idempotency-Key": "x" * 300}, 400),
]

BAD_PATHS: list[tuple[str, str, int, str]] = [
    ("GET", f"/v1/jobs/{UNKNOWN}", 404, "job_not_found"),
    ("GET", "/v1/jobs/nonsense", 404, "job_not_found"),
    ("GET", "/v1/jobs/job_%00", 404, "job_not_found"),
    ("GET", "/v1/jobs/%FF", 404, "job_not_found"),
    ("GET", "/v1/jobs/" + "x" * 3000, 404, "job_not_found"),
    ("GET", f"/v1/jobs/{UNKNOWN}/scores", 404, "job_not_found"),
    ("GET", f"/v1/jobs/{UNKNOWN}/hidden_states", 404, "job_not_found"),
    ("GET", f"/v1/jobs/{UNKNOWN}/items/0/hidden_state", 404, "job_not_found"),
    ("GET", f"/v1/jobs/{UNKNOWN}/events", 404, "job_not_found"),
    ("POST", f"/v1/jobs/{UNKNOWN}/cancel", 404, "job_not_found"),
    ("POST", "/v1/jobs/nonsense/cancel", 404, "job_not_found"),
    ("DELETE", f"/v1/jobs/{UNKNOWN}", 404, "job_not_found"),
    ("GET", f"/v1/jobs/{UNKNOWN}?wait=x", 422, "invalid_request"),
    ("GET", f"/v1/jobs/{UNKNOWN}?wait=-1", 422, "invalid_request"),
    ("GET", f"/v1/jobs/{UNKNOWN}?wait=nan", 422, "invalid_request"),
    ("GET", "/v1/jobs?state=lost", 422, "invalid_request"),
    ("GET", "/v1/jobs?colour=red", 422, "invalid_request"),
    ("GET", "/v1/jobs?metadata.=x", 422, "invalid_request"),
    ("GET", "/v1/jobs?metadata.a=%00", 422, "invalid_request"),
    ("GET", "/v1/jobs?metadata.%00=a", 422, "invalid_request"),
    ("GET", "/v1/jobs?model=%00", 422, "invalid_request"),
    ("GET", "/v1/jobs?limit=0", 422, "invalid_request"),
    ("GET", "/v1/jobs?cursor=x", 422, "invalid_request"),
    ("GET", "/v1/nothing", 404, "not_found"),
    ("PUT", "/v1/jobs", 405, "method_not_allowed"),
    ("POST", "/v1/models", 405, "method_not_allowed"),
]


@pytest.fixture
def small(sqlite_service: Service) -> Service:
    """The application with small limits."""
    return sqlite_service


@pytest.fixture
async def sqlite_service(
    sqlite_url: str, sqlite_database: Database, blob_url: str, redis_url: str
) -> Any:  # an async generator
    """The application on SQLite with small limits."""
    settings: Settings = make_settings(
        sqlite_url, blob_url, redis_url, max_items=20, max_body_bytes=16384
    )
    service = Service(settings, sqlite_database)
    await service.start()
    yield service
    await service.stop()


def check_problem(answer: Answer, path: str) -> dict[str, Any]:
    """Assert that an error has its family's whole form; return the problem."""
    if path == "/v1/score":
        assert answer.headers["Content-Type"].startswith("application/json")
        error: dict[str, Any] = answer.json["error"]
        assert error["message"]
        assert error["type"]
        assert error["code"]
        return {**error, "detail": error["message"]}
    problem: dict[str, Any] = answer.json
    assert answer.headers["Content-Type"].startswith("application/problem+json")
    assert problem["type"] == f"urn:scorekeep:error:{problem['code']}"
    assert problem["status"] == answer.status
    assert problem["title"]
    assert problem["detail"]
    assert problem["instance"]
    assert problem["request_id"] == answer.headers["X-Request-Id"]
    return problem


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/score"])
async def test_bad_bodies_name_the_field(small: Service, path: str) -> None:
    """Status, field and a sentence for every bad body, on both routes, in both forms."""
    for body, status, param, word in BAD_BODIES:
        answer = await small.request("POST", path, data=json.dumps(body), headers=JSON)
        problem = check_problem(answer, path)

        assert (answer.status, problem.get("param")) == (status, param), (body, problem)
        assert word in problem["detail"], (body, problem)


async def test_bad_job_fields_are_named(small: Service) -> None:
    """Status and field for what only jobs have."""
    for fields, status, param in BAD_FIELDS:
        answer = await small.post("/v1/jobs", {"model": "tiny", "items": ["a"], **fields})
        problem = check_problem(answer, "/v1/jobs")

        assert (answer.status, problem.get("param")) == (status, param), (fields, problem)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/score"])
async def test_bad_bytes_are_refused(small: Service, path: str) -> None:
    """What is no JSON, no UTF-8, too large or not as declared is refused, never a 500."""
    for body, headers, status in BAD_BYTES:
        answer = await small.request("POST", path, data=body, headers=headers)

        assert answer.status == status, (body[:50], headers, answer.body)
        problem = check_problem(answer, path)
        assert status != 413 or "max_body_bytes of 16384" in problem["detail"]


async def test_bad_paths_and_queries(small: Service) -> None:
    """Unknown ids and routes are 404, wrong methods 405, bad parameters 422 by name."""
    for method, path, status, code in BAD_PATHS:
        answer = await small.request(method, path)
        problem = check_problem(answer, path)

        assert (answer.status, problem["code"]) == (status, code), (method, path)
        assert status != 405 or answer.headers["Allow"]
        assert status != 422 or problem["param"]


async def test_compressed_bodies_are_read(small: Service) -> None:
    """A body in gzip is as good as a plain one."""
    body = gzip.compress(b'{"model": "tiny", "items": ["a"]}')

    answer = await small.request(
        "POST", "/v1/jobs", data=body, headers={**JSON, "Content-Encoding": "gzip"}
    )

    assert answer.status == 202


async def test_a_chunked_flood_is_cut_off(small: Service) -> None:
    """A body without a length is refused as soon as it is over the limit."""

    async def flood() -> Any:  # an async generator
        for _ in range(64):
            yield b" " * 1024

    answer = await small.request("POST", "/v1/jobs", data=flood(), headers=JSON)

    assert answer.status == 413


async def test_a_model_refuses_what_it_cannot_do(small: Service) -> None:
    """Once a worker describes the model, its refusals come at submission."""
    await small.report_ready()
    body = {"model": "tiny", "items": ["a"], "return_token_logprobs": True}

    answer = await small.post("/v1/score", body)

    assert answer.status == 422
    assert answer.json["error"]["param"] == "return_token_logprobs"


async def test_request_ids_are_kept_or_made(small: Service) -> None:
    """A plain word is kept; anything else is replaced, and errors carry it."""
    kept = await small.get("/v1/nothing", headers={"X-Request-Id": "abc-1"})
    made = await small.get("/v1/nothing", headers={"X-Request-Id": "a b"})

    assert kept.headers["X-Request-Id"] == kept.json["request_id"] == "abc-1"
    assert made.headers["X-Request-Id"].startswith("req_")
    assert kept.headers["X-Content-Type-Options"] == "nosniff"


async def test_a_broken_upload_is_no_job(small: Service) -> None:
    """A connection cut in the middle of a body leaves nothing behind."""
    _, writer = await asyncio.open_connection("127.0.0.1", int(small.url.rpartition(":")[2]))
    writer.write(
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b'Content-Length: 100\r\n\r\n{"model":'
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    assert (await small.get("/v1/jobs")).json["data"] == []
    assert (await small.get("/healthz")).status == 200


async def test_an_error_of_ours_is_a_500_without_its_text(
    small: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What we did not foresee is logged, and the client gets the request id only."""

    async def explode(*_: object) -> None:
        message = "secret"
        raise RuntimeError(message)

    monkeypatch.setattr("api.catalog.Catalog.statuses", explode)
    async with aiohttp.ClientSession() as session, session.get(small.url + "/v1/models") as answer:
        problem = json.loads(await answer.read())

    assert answer.status == 500
    assert problem["code"] == "internal"
    assert "secret" not in json.dumps(problem)
