"""``POST /v1/score``: SGLang's route, which waits, and is a durable job behind it."""

import asyncio
from collections.abc import Mapping

import pytest

from contract.scores import Problem
from tests.api.service import Answer, Service

BODY = {"model": "tiny", "items": ["a", "b"]}


async def score(service: Service, body: Mapping[str, object], **options: object) -> Answer:
    """POST to the route and play the worker's part."""
    waiting = asyncio.create_task(service.post("/v1/score", body))
    claimed = await service.next_claim()
    await service.finish(claimed, **options)  # type: ignore[arg-type]
    return await waiting


async def test_the_answer_is_sglangs(service: Service) -> None:
    """200 with scores in input order, usage, and where the job is."""
    answer = await score(service, BODY)
    job = await service.get(answer.headers["Location"])

    assert answer.status == 200
    assert answer.json == {
        "scores": [[0.0, 0.0], [1.0, -1.0]],
        "model": "tiny",
        "usage": {
            "prompt_tokens": 7,
            "total_tokens": 7,
            "completion_tokens": 0,
            "computed_tokens": 7,
        },
        "object": "scoring",
        "pooled_hidden_states": None,
        "token_logprobs": None,
        "errors": [],
        "warnings": [],
    }
    assert job.json["state"] == "succeeded"
    assert job.json["priority"] == "interactive"


async def test_hidden_states_come_inline(service: Service) -> None:
    """Asked for, they are numbers, one row per item."""
    answer = await score(service, {**BODY, "return_pooled_hidden_states": True})

    assert answer.json["pooled_hidden_states"] == [[0.0] * 4, [1.0] * 4]


async def test_failed_items_are_null(service: Service) -> None:
    """Some items failed: 200, null in their place, and why."""
    answer = await score(service, {**BODY, "return_pooled_hidden_states": True}, failed=[0])

    assert answer.status == 200
    assert answer.json["scores"] == [None, [1.0, -1.0]]
    assert answer.json["pooled_hidden_states"] == [None, [1.0] * 4]
    assert answer.json["errors"][0]["code"] == "input_too_long"


async def test_no_items_is_an_empty_answer(service: Service) -> None:
    """``[]`` gives no rows."""
    answer = await score(service, {**BODY, "items": []})

    assert answer.status == 200
    assert answer.json["scores"] == []


@pytest.mark.parametrize("prefer", ["respond-async", "wait=0", "respond-async, wait=10"])
async def test_a_client_may_not_want_to_wait(service: Service, prefer: str) -> None:
    """202 at once, with the job."""
    answer = await service.post("/v1/score", BODY, Prefer=prefer)

    assert answer.status == 202
    assert answer.headers["Location"] == f"/v1/jobs/{answer.json['id']}"
    assert answer.headers["Retry-After"]
    applied = answer.headers.get("Preference-Applied")
    assert applied == ("respond-async" if "async" in prefer else None)


async def test_what_is_late_becomes_a_job(service: Service) -> None:
    """A wait that ends before the job is 202, and the job goes on."""
    answer = await service.post("/v1/score", BODY, Prefer="wait=1")
    await service.finish(await service.claim())

    job = await service.get(answer.headers["Location"])

    assert answer.status == 202
    assert answer.json["state"] == "queued"
    assert job.json["state"] == "succeeded"


@pytest.mark.parametrize(("recorded", "answered"), [(503, 503), (422, 422), (200, 500)])
async def test_a_failed_job_is_its_own_error(
    service: Service, recorded: int, answered: int
) -> None:
    """The job's problem is the answer, in OpenAI's form, with a status that is an error."""
    waiting = asyncio.create_task(service.post("/v1/score", BODY))
    (job,) = await service.next_claim()

    await service.fail(job, Problem("some_code", "why", recorded, "items[0]"))
    answer = await waiting

    assert answer.status == answered
    assert answer.json["error"]["code"] == "some_code"
    assert answer.json["error"]["message"] == "why"
    assert answer.json["error"]["param"] == "items[0]"


async def test_a_cancelled_job_is_an_error(service: Service) -> None:
    """Who waits for a job that somebody cancels learns it, and is not to try again."""
    waiting = asyncio.create_task(service.post("/v1/score", BODY))
    (job,) = await service.next_claim()
    await service.post(f"/v1/jobs/{job.id}/cancel", {})

    await service.finish([job])
    answer = await waiting

    assert answer.status == 409
    assert answer.json["error"]["code"] == "cancelled"
    assert answer.headers["x-should-retry"] == "false"


async def test_many_waiters_each_get_their_own(service: Service) -> None:
    """A hundred at once: each answer belongs to its request."""
    bodies = [{"model": "tiny", "items": ["x"] * (1 + index % 5)} for index in range(100)]
    waiting = [asyncio.create_task(service.post("/v1/score", body)) for body in bodies]

    done = 0
    while done < len(bodies):
        claimed = await service.next_claim()
        await service.finish(claimed)
        done += len(claimed)
    answers = await asyncio.gather(*waiting)

    counts = [len(answer.json["scores"]) for answer in answers]
    assert counts == [len(body["items"]) for body in bodies]
