"""The asyncio client: what it sends, what it returns, how it waits."""

import asyncio

import numpy as np
import pytest
import torch
from safetensors.torch import save

from contract.errors import (
    ConflictError,
    ForwardError,
    IllegalTransitionError,
    InputTooLongError,
    ScoreError,
)
from contract.jobs import JobState
from contract.models import ModelState
from scorekeep import AsyncClient
from scorekeep.tensors import parse_tensor
from tests.scorekeep.scripted import JOB_ID, Script, job, problem, scores


async def test_submit_sends_only_what_was_given(client: AsyncClient, script: Script) -> None:
    """Options that were left out are the service's to decide; nothing is waited for."""
    script.answer(job(), status=202)

    found = await client.submit(("a", "b"), model="sentiment", metadata={"k": "v"})

    assert found.state is JobState.QUEUED
    (call,) = script.calls
    assert (call.method, call.path) == ("POST", "/v1/jobs")
    assert call.json == {"items": ["a", "b"], "model": "sentiment", "metadata": {"k": "v"}}
    assert call.headers["Prefer"] == "respond-async"


@pytest.mark.parametrize(
    ("items", "sent"), [("one", "one"), ([(1, 2), [3]], [[1, 2], [3]]), ([], [])]
)
async def test_items_may_be_text_or_tokens(
    client: AsyncClient, script: Script, items: list[str], sent: object
) -> None:
    """One text, texts, or token ids in any sequence."""
    script.answer(job(), status=202)

    await client.submit(items)

    assert script.calls[0].json["items"] == sent


async def test_a_retried_submission_keeps_its_key(client: AsyncClient, script: Script) -> None:
    """The repetition of a submission is recognised; another submission is another job."""
    script.hang_up()
    script.answer(job(), status=202)
    script.answer(job(), status=202)
    script.answer(job(), status=202)

    await client.submit("a")
    await client.submit("a")
    await client.submit("a", idempotency_key="mine")

    keys = [call.headers["Idempotency-Key"] for call in script.calls]
    assert keys[0] == keys[1] != keys[2]
    assert keys[3] == '"mine"'


async def test_submit_can_wait(client: AsyncClient, script: Script) -> None:
    """wait_s becomes whole seconds of Prefer: wait."""
    script.answer(job("succeeded"))

    await client.submit("a", wait_s=0.2)

    assert script.calls[0].headers["Prefer"] == "wait=1"


async def test_wait_polls_until_the_end(client: AsyncClient, script: Script) -> None:
    """A job that has not ended is asked for again, with a long poll."""
    script.answer(job("running"))
    script.answer(job("partial"))

    found = await client.wait(JOB_ID)

    assert found.state is JobState.PARTIAL
    assert [call.query for call in script.calls] == [{"wait": "30"}, {"wait": "30"}]


async def test_wait_gives_up_in_time(client: AsyncClient, script: Script) -> None:
    """TimeoutError names the job and its state; with no time at all, it looks once."""
    script.answer(job("running"))

    with pytest.raises(TimeoutError, match=f"{JOB_ID} is still running after 0 s"):
        await client.wait(JOB_ID, timeout_s=0)
    assert script.calls[0].query == {}


async def test_score_is_submit_wait_and_fetch(client: AsyncClient, script: Script) -> None:
    """A job that takes longer than one exchange is waited for, then its scores are fetched."""
    script.answer(job("queued"), status=202)
    script.answer(job("succeeded"))
    script.answer(scores([[0.1, 0.9], None], errors=[{"index": 1, "code": "x", "message": "y"}]))

    found = await client.score(["a", "b"], model="sentiment", timeout_s=5)

    assert found.scores == [[0.1, 0.9], None]
    assert found.job == JOB_ID
    assert [call.path for call in script.calls] == [
        "/v1/jobs",
        f"/v1/jobs/{JOB_ID}",
        f"/v1/jobs/{JOB_ID}/scores",
    ]


async def test_score_may_wait_for_ever(client: AsyncClient, script: Script) -> None:
    """Without a time limit each exchange still has one."""
    script.answer(job("queued"), status=202)
    script.answer(job("succeeded"))
    script.answer(scores([[0.1, 0.9]]))

    found = await client.score("a", timeout_s=None)

    assert found.labels == ["negative", "positive"]
    assert script.calls[0].headers["Prefer"] == "wait=30"


async def test_a_failed_job_raises_its_own_error(client: AsyncClient, script: Script) -> None:
    """The class is the one of the code that was recorded, and says which job it was."""
    script.answer(job("failed", error={"code": "input_too_long", "message": "9 > 8"}))
    script.answer(job("failed", error={"code": "forward_failed", "message": "x", "status": 500}))

    with pytest.raises(InputTooLongError, match="9 > 8") as caught:
        await client.score("a")
    assert caught.value.__notes__ == [f"job: {JOB_ID}"]
    with pytest.raises(ForwardError):
        await client.score("a")


@pytest.mark.parametrize("state", ["cancelled", "expired", "failed"])
async def test_a_job_without_scores_says_so(
    client: AsyncClient, script: Script, state: str
) -> None:
    """Nobody gets an empty result for a job that was never scored."""
    script.answer(job(state))

    with pytest.raises(ConflictError, match=f"is {state}"):
        await client.score("a")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
async def test_hidden_states_are_exact(
    client: AsyncClient, script: Script, dtype: torch.dtype
) -> None:
    """Numpy gets the very numbers (bfloat16 widened), torch the very tensor."""
    states = torch.randn(3, 5).to(dtype)
    states[1] = float("nan")
    script.answer(save({"hidden_states": states}))
    script.answer(save({"hidden_states": states}))

    array = await client.hidden_states(JOB_ID)
    tensor = await client.hidden_states(JOB_ID, framework="torch")

    np.testing.assert_array_equal(array, states.float().numpy())
    assert array.dtype == (np.float16 if dtype is torch.float16 else np.float32)
    assert torch.equal(tensor.nan_to_num(), states.nan_to_num())
    assert tensor.dtype == dtype
    assert script.calls[0].path == f"/v1/jobs/{JOB_ID}/hidden_states"


async def test_one_row_of_hidden_states(client: AsyncClient, script: Script) -> None:
    """With item, one vector."""
    script.answer(save({"hidden_states": torch.ones(1, 5)}))

    row = await client.hidden_states(JOB_ID, item=7)

    assert row.shape == (5,)
    assert script.calls[0].path == f"/v1/jobs/{JOB_ID}/items/7/hidden_state"


def test_a_damaged_file_is_named() -> None:
    """Bytes that are not safetensors, or lack the tensor, are errors of our tree."""
    with pytest.raises(ScoreError, match="not safetensors"):
        parse_tensor(b"x", "hidden_states")
    with pytest.raises(ScoreError, match=r"no tensor 'hidden_states', only \['scores'\]"):
        parse_tensor(save({"scores": torch.ones(1)}), "hidden_states")


async def test_lists_go_page_by_page(client: AsyncClient, script: Script) -> None:
    """Iterate follows Link: next until there is none; filters stay."""
    script.answer(
        {"object": "list", "data": [job(), job()]},
        headers={"Link": '</v1/jobs?state=queued&cursor=abc%3D>; rel="next"'},
    )
    script.answer({"object": "list", "data": [job()]})

    found = [each async for each in client.iterate(state=JobState.QUEUED, model="m")]

    assert len(found) == 3
    assert [call.query for call in script.calls] == [
        {"state": "queued", "model": "m", "limit": "100"},
        {"state": "queued", "model": "m", "limit": "100", "cursor": "abc="},
    ]


async def test_cancel_and_delete(client: AsyncClient, script: Script) -> None:
    """Cancel returns the job; a job that has ended is a ConflictError; delete returns nothing."""
    script.answer(job("cancelled"))
    script.answer(problem("illegal_transition", 409), status=409)
    script.answer(b"", status=204)

    assert (await client.cancel(JOB_ID)).state is JobState.CANCELLED
    with pytest.raises(IllegalTransitionError):
        await client.cancel(JOB_ID)
    await client.delete(JOB_ID)

    assert [(call.method, call.path) for call in script.calls] == [
        ("POST", f"/v1/jobs/{JOB_ID}/cancel"),
        ("POST", f"/v1/jobs/{JOB_ID}/cancel"),
        ("DELETE", f"/v1/jobs/{JOB_ID}"),
    ]


async def test_models_and_the_secret(client: AsyncClient, script: Script) -> None:
    """What is served, by name; the newest secret of several."""
    script.answer({"data": [{"id": "m", "object": "model", "state": "failed", "reason": "no"}]})
    script.answer({"secrets": ["whsec_new", "whsec_old"]})

    (model,) = await client.models()

    assert (model.name, model.state, model.reason) == ("m", ModelState.FAILED, "no")
    assert await client.webhook_secret() == "whsec_new"


async def test_an_odd_id_stays_in_its_place(client: AsyncClient, script: Script) -> None:
    """An id cannot reach another route."""
    script.answer(problem("job_not_found", 404), status=404)

    with pytest.raises(ScoreError):
        await client.get("../models")
    assert script.calls[0].path == "/v1/jobs/../models"


async def test_a_closed_client_opens_again(script: Script) -> None:
    """close() ends connections, not the client; twice is harmless."""
    script.answer(job())
    client = AsyncClient(script.url)

    await client.close()
    await client.get(JOB_ID)
    await client.close()
    await client.close()

    assert len(asyncio.all_tasks()) == 1


async def test_a_cancellation_whose_answer_was_lost_is_no_error(script: Script) -> None:
    """Both requests carry one key, so that the second is answered as the first was."""
    script.hang_up()
    script.answer(job(state="cancelled"))
    async with AsyncClient(script.url) as client:
        found = await client.cancel(JOB_ID)

    first, second = (call.headers["Idempotency-Key"] for call in script.calls)
    assert first == second
    assert found.state is JobState.CANCELLED


async def test_a_retry_whose_answer_was_lost_is_no_error(script: Script) -> None:
    """The job is not found queued, and refused, by a second request: both carry one key."""
    script.hang_up()
    script.answer(job(), status=202)
    async with AsyncClient(script.url) as client:
        found = await client.retry(JOB_ID)

    first, second = (call.headers["Idempotency-Key"] for call in script.calls)
    assert first == second
    assert found.state is JobState.QUEUED


async def test_a_deletion_whose_answer_was_lost_is_done(script: Script) -> None:
    """What the repetition finds gone, the first removed: there is nothing left to do."""
    script.hang_up()
    script.answer({"code": "gone", "detail": "deleted"}, status=410)
    async with AsyncClient(script.url) as client:
        await client.delete(JOB_ID)

    assert [call.method for call in script.calls] == ["DELETE", "DELETE"]
