"""The blocking client: the same methods, from any thread, also where a loop runs already."""

import inspect
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import scorekeep
from contract.errors import JobNotFoundError
from contract.jobs import JobState
from contract.webhooks import verify
from scorekeep import AsyncClient, Client
from tests.scorekeep.scripted import JOB_ID, Script, job, problem, scores


def test_it_has_every_method_with_the_same_arguments() -> None:
    """What AsyncClient can do, Client can do, spelled the same."""
    methods = {
        name: function
        for name, function in inspect.getmembers(AsyncClient, inspect.isfunction)
        if not name.startswith("_")
    }

    for name, function in methods.items():
        mine = inspect.signature(getattr(Client, name)).parameters
        assert list(mine) == list(inspect.signature(function).parameters), name


def test_each_method_does_what_its_name_says(script: Script, tmp_path: Path) -> None:
    """Every method reaches its route and returns the plain result."""
    data = save({"hidden_states": torch.zeros(2, 3)})
    with Client(script.url) as client:
        script.answer(job(), status=202)
        assert client.submit(["a"], wait_s=0).id == JOB_ID
        script.answer(job("running"))
        assert client.get(JOB_ID).state is JobState.RUNNING
        script.answer(job("succeeded"))
        assert client.wait(JOB_ID).state is JobState.SUCCEEDED
        script.answer(job("succeeded"))
        script.answer(scores([[0.5, 0.5]]))
        assert client.score(["a"]).scores == [[0.5, 0.5]]
        script.answer(scores([[0.5, 0.5]]))
        assert client.scores(JOB_ID).job == JOB_ID
        script.answer(data)
        assert client.hidden_states(JOB_ID).shape == (2, 3)
        script.answer(data)
        assert client.hidden_states_file(JOB_ID) == data
        script.answer({"data": [job()]})
        assert len(client.list().jobs) == 1
        script.answer({"data": [job()]}, headers={"Link": '</v1/jobs?cursor=x>; rel="next"'})
        script.answer({"data": [job()]})
        assert len(list(client.iterate())) == 2
        script.answer(job("cancelled"))
        assert client.cancel(JOB_ID).state is JobState.CANCELLED
        script.answer(b"", status=204)
        client.delete(JOB_ID)
        script.answer({"data": []})
        assert client.models() == []
        script.answer({"secrets": ["whsec_x"]})
        assert client.webhook_secret() == "whsec_x"

    assert script.answers == []


def test_errors_arrive_in_the_calling_thread(script: Script) -> None:
    """An error is raised where the method was called."""
    script.answer(problem("job_not_found", 404), status=404)

    with Client(script.url) as client, pytest.raises(JobNotFoundError):
        client.get(JOB_ID)


async def test_it_works_where_a_loop_runs(script: Script) -> None:
    """As in a notebook."""
    script.answer(job())

    with Client(script.url) as client:
        assert client.get(JOB_ID).id == JOB_ID


def test_closing_leaves_no_thread(script: Script) -> None:
    """close() ends the thread, also when called twice."""
    client = Client(script.url)

    client.close()
    client.close()

    assert "scorekeep-client" not in {thread.name for thread in threading.enumerate()}


def test_webhooks_are_verified_with_the_contract() -> None:
    """What a receiver imports is the very function that the tests of the contract check."""
    assert scorekeep.verify_webhook is verify
