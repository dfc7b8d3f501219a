"""vLLM's score request on ``/score`` and ``/v1/score``, beside SGLang's."""

from typing import Any

import pytest

from tests.api.service import Service
from tests.compatible.conftest import scores_of


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("left", "right"),
    [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")],
)
async def test_one_query_many_documents(served: Service, path: str, left: str, right: str) -> None:
    """1:N in each spelling: a row per document, equal to SGLang's route, kept as a job."""
    expected = await scores_of(served, ["a", "b"], "q")

    answer = await served.post(path, {"model": "tiny", left: "q", right: ["a", "b"]})
    job = await served.get(answer.headers["Location"])

    assert answer.status == 200, answer.body
    assert answer.json["object"] == "list"
    assert answer.json["model"] == "tiny"
    assert answer.json["usage"] == {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0}
    assert answer.json["data"] == [
        {"index": 0, "score": expected[0], "object": "score"},
        {"index": 1, "score": expected[1], "object": "score"},
    ]
    assert job.json["id"] == answer.json["id"]
    assert job.json["state"] == "succeeded"


async def test_pairs_are_scored_as_pairs(served: Service) -> None:
    """N:N: each document with the query in its place, in one job."""
    expected = [
        *await scores_of(served, ["a"], "p"),
        *await scores_of(served, ["b"], "q"),
        *await scores_of(served, ["c"], "p"),
    ]

    answer = await served.post(
        "/score", {"model": "tiny", "text_1": ["p", "q", "p"], "text_2": ["a", "b", "c"]}
    )

    assert [each["score"] for each in answer.json["data"]] == expected


async def test_one_pair(served: Service) -> None:
    """1:1, both sides as bare strings."""
    expected = await scores_of(served, ["a"], "q")

    answer = await served.post("/v1/score", {"model": "tiny", "text_1": "q", "text_2": "a"})

    assert [each["score"] for each in answer.json["data"]] == expected


async def test_no_activation_gives_logits(served: Service) -> None:
    """``use_activation: false`` gives what the head gives."""
    expected = await scores_of(served, ["a"], "q", activation="none")

    body = {"model": "tiny", "text_1": "q", "text_2": "a", "use_activation": False}
    answer = await served.post("/score", body)

    assert answer.json["data"][0]["score"] == expected[0]


async def test_what_is_too_long_is_null(served: Service) -> None:
    """The pair that does not fit is null at its index, and ``errors`` says why."""
    body = {"model": "short", "text_1": "q", "text_2": ["a", "much too long for it", "b"]}

    answer = await served.post("/score", body)

    assert answer.status == 200
    assert [each["score"] is None for each in answer.json["data"]] == [False, True, False]
    assert answer.json["errors"][0]["code"] == "input_too_long"


@pytest.mark.parametrize(("tokens", "kept"), [(-1, "qmuch to"), (4, "qmuc")])
async def test_the_prompt_is_cut(served: Service, tokens: int, kept: str) -> None:
    """``truncate_prompt_tokens`` cuts the document to the model's limit, or to its own."""
    expected = await scores_of(served, [kept], model="short")

    body = {"model": "short", "text_1": "q", "text_2": "much too long for it"}
    answer = await served.post("/score", {**body, "truncate_prompt_tokens": tokens})

    assert answer.json["data"][0]["score"] == expected[0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": "q", "text_2": "a", "label_token_ids": [1]}, "label_token_ids"),
        ({"queries": "q", "documents": ["a"], "query": "q"}, "query"),
        ({"text_1": "q", "documents": ["a"]}, "documents"),
        ({"text_1": "q"}, "text_1"),
        ({"text_1": "q", "text_2": None}, "text_2"),
        ({"text_1": [], "text_2": ["a"]}, "text_1"),
        ({"text_1": ["p", "q"], "text_2": ["a"]}, "text_1"),
        ({"text_1": "q", "text_2": "a", "priority": "high"}, "priority"),
        ({"text_1": "q", "text_2": "a", "chat_template": "x"}, "chat_template"),
    ],
)
async def test_a_mixture_is_refused(served: Service, body: dict[str, Any], param: str) -> None:
    """422 in OpenAI's form, which names the field."""
    answer = await served.post("/v1/score", {"model": "tiny", **body})

    assert answer.status == 422
    assert answer.json["error"]["param"] == param
    assert answer.json["error"]["type"] == "invalid_request_error"


async def test_no_pairs_are_an_empty_answer(served: Service) -> None:
    """Two empty sides: no rows."""
    answer = await served.post("/score", {"model": "tiny", "text_1": [], "text_2": []})

    assert answer.json["data"] == []


async def test_a_causal_model_ranks_its_labels(served: Service) -> None:
    """A causal model without labels of its own says what it needs."""
    answer = await served.post("/score", {"model": "judge", "text_1": "q", "text_2": "a"})

    assert answer.status == 422
    assert answer.json["error"]["param"] == "label_token_ids"


async def test_activation_model_is_softmax_over_labels(served: Service) -> None:
    """Of a causal model ``activation: model`` is ``apply_softmax``, but of a single label."""
    body = {"model": "judge", "items": ["a"], "labels": ["yes", "no"]}
    model = await served.post("/v1/score", {**body, "activation": "model"})
    softmax = await served.post("/v1/score", {**body, "apply_softmax": True})
    single = await served.post(
        "/v1/score", {"model": "judge", "items": ["a"], "labels": ["yes"], "activation": "model"}
    )

    assert model.json["scores"] == softmax.json["scores"]
    assert single.json["scores"][0][0] < 1.0


async def test_pairs_may_name_the_task(served: Service) -> None:
    """VLLM's ``instruction`` is the job's; a model without a place for it refuses it by name."""
    body = {"text_1": "q", "text_2": ["a", "b"], "instruction": "Find bread."}
    own = {"query": "q", "items": ["a", "b"], "activation": "model", "model": "told"}

    answer = await served.post("/score", body | {"model": "told"})
    expected = await served.post("/v1/score", own | {"instruction": "Find bread."})
    refused = await served.post("/score", body | {"model": "tiny"})

    assert [each["score"] for each in answer.json["data"]] == [
        row[1] for row in expected.json["scores"]
    ]
    assert refused.status == 422
    assert refused.json["error"]["param"] == "instruction"
