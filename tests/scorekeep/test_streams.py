"""Events over broken connections, and answers that take longer than one wait."""

import json
from typing import Any

import pytest

from contract.errors import ConflictError, UnavailableError
from contract.webhooks import EventType
from scorekeep import AsyncClient, Client
from tests.scorekeep.scripted import JOB_ID, Script, job


def event(sequence: int, kind: str) -> str:
    """Return one server-sent event of the service."""
    body = {"type": kind, "timestamp": "2026-11-30T10:00:00Z", "sequence": sequence, "data": {}}
    return f"id: {sequence}\nevent: {kind}\ndata: {json.dumps(body)}\n\n"


def state(name: str) -> str:
    """Return the first event of every stream: the job as it is."""
    return f"event: job.state\ndata: {json.dumps(job(name))}\n\n"


async def test_events_end_with_the_job(script: Script) -> None:
    """Comments and the state are passed over; after a terminal event nothing is asked again."""
    text = state("running") + ": still here\n\n" + event(7, "job.succeeded")
    script.answer(text.encode())

    async with AsyncClient(script.url) as client:
        found = [each async for each in client.events(JOB_ID)]

    assert [each.type for each in found] == [EventType.JOB_SUCCEEDED]
    assert [call.path for call in script.calls] == [f"/v1/jobs/{JOB_ID}/events"]


async def test_events_go_on_after_a_break(script: Script) -> None:
    """A stream that ends before the job, or breaks, is opened again after the last event."""
    script.answer((state("running") + event(3, "webhook.test")).encode())
    script.hang_up()
    script.answer((state("succeeded") + event(4, "job.succeeded")).encode())

    async with AsyncClient(script.url) as client:
        found = [each.sequence async for each in client.events(JOB_ID, after=2)]

    assert found == [3, 4]
    assert [call.headers.get("Last-Event-ID") for call in script.calls] == ["2", "3", "3"]


async def test_a_job_that_has_ended_has_no_more(script: Script) -> None:
    """The state alone tells the end."""
    script.answer(state("succeeded").encode())

    async with AsyncClient(script.url) as client:
        assert [each async for each in client.events(JOB_ID)] == []


async def test_a_service_that_stays_away_is_an_error(script: Script) -> None:
    """So many broken connections without an event between are given up."""
    for _ in range(6):  # aiohttp itself asks again on a connection that was kept
        script.hang_up()

    async with AsyncClient(script.url, max_retries=1) as client:
        with pytest.raises(UnavailableError, match="broke off"):
            _ = [each async for each in client.events(JOB_ID)]


def test_events_block(script: Script) -> None:
    """The blocking client yields them one by one, and may be left early."""
    script.answer((state("running") + event(1, "webhook.test") + event(2, "job.failed")).encode())
    script.answer((state("running") + event(1, "webhook.test")).encode())

    with Client(script.url) as client:
        every = [each.sequence for each in client.events(JOB_ID)]
        first = next(iter(client.events(JOB_ID)))

    assert every == [1, 2]
    assert first.sequence == 1


RANKED: dict[str, Any] = {
    "id": JOB_ID,
    "model": "tiny",
    "results": [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}],
}
CLASSIFIED: dict[str, Any] = {
    "id": JOB_ID,
    "created": 1,
    "model": "tiny",
    "data": [{"index": 0, "label": "positive", "probs": [0.1, 0.9], "num_classes": 2}],
}


def test_a_late_answer_is_asked_for_by_its_key(script: Script) -> None:
    """202 first, then the same body under the same key; the answer is typed."""
    script.answer(job(), status=202)
    script.answer(RANKED)
    script.answer(CLASSIFIED)

    with Client(script.url) as client:
        ranked = client.rerank("q", ["a", "b"], model="tiny", top_n=2, max_tokens_per_doc=9)
        classified = client.classify("a", model="tiny")

    first, second, third = script.calls
    assert [each.index for each in ranked.results] == [1, 0]
    assert classified.data[0].label == "positive"
    assert first.path == "/v1/rerank"
    assert first.json == {
        "query": "q",
        "documents": ["a", "b"],
        "model": "tiny",
        "top_n": 2,
        "return_documents": False,
        "max_tokens_per_doc": 9,
    }
    assert first.body == second.body
    assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"]
    assert third.json == {"input": "a", "model": "tiny"}


async def test_patience_ends(script: Script) -> None:
    """After ``timeout_s`` the job goes on without us."""
    script.answer(job(), status=202)

    async with AsyncClient(script.url) as client:
        with pytest.raises(TimeoutError, match=JOB_ID):
            await client.rerank("q", ["a"], timeout_s=0)


def test_a_refusal_is_its_class(script: Script) -> None:
    """The family's error form becomes the class of its code."""
    body = {"error": {"message": "no", "type": "invalid_request_error", "code": "conflict"}}
    script.answer(body, status=409, headers={"x-should-retry": "false"})

    with Client(script.url) as client, pytest.raises(ConflictError, match="no"):
        client.classify(["a"])


def test_results_of_a_bulk_are_streamed(script: Script) -> None:
    """One typed result a line, the last without its end as well."""
    lines = [{"line": n, "custom_id": f"row-{n}", "scores": [[0.5]]} for n in (3, 4)]
    script.answer("\n".join(json.dumps(line) for line in lines).encode())

    with Client(script.url) as client:
        found = list(client.bulk_results("blk_1", after=2))

    assert [each.line for each in found] == [3, 4]
    assert script.calls[0].query == {"after": "2"}


def test_a_bulk_is_waited_for(script: Script) -> None:
    """Until it has ended; the blocking client reaches every action."""
    base = {"id": "blk_1", "counts": {}, "created_at": "2026-11-30T10:00:00Z"}
    script.answer({**base, "state": "completed"})
    script.answer({**base, "state": "cancelled"})
    script.answer({"max_items": 10})

    with Client(script.url) as client:
        ended = client.wait_for_bulk("blk_1", timeout_s=5)
        acted = client.bulks.act("blk_1", "cancel")
        limits = client.limits()

    assert ended.state == "completed"
    assert acted.state == "cancelled"
    assert limits == {"max_items": 10}


async def test_errors_of_a_stream_are_classes(script: Script) -> None:
    """What is refused before the first line is raised as anywhere else."""
    body = {"code": "conflict", "detail": "not yet", "title": "", "status": 409}
    script.answer(body, status=409)

    async with AsyncClient(script.url) as client:
        with pytest.raises(ConflictError, match="not yet"):
            _ = [each async for each in client.bulk_results("blk_1")]
