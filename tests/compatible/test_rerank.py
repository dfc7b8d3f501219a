"""Rerank as Cohere, Jina, vLLM and TEI spell it."""

from typing import Any

import pytest

from tests.api.service import Service
from tests.compatible.conftest import scores_of

DOCUMENTS = ["Paris is in France.", "Bread.", "The Seine flows through Paris."]
BODY: dict[str, Any] = {"model": "tiny", "query": "Where is Paris?", "documents": DOCUMENTS}


async def order_of(service: Service) -> list[tuple[int, float]]:
    """Return index and score of the documents, the best first."""
    scores = await scores_of(service, DOCUMENTS, BODY["query"])
    return sorted(enumerate(scores), key=lambda each: -each[1])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_come_by_relevance(served: Service, path: str) -> None:
    """Each path: the best first, with the job's id, usage and Cohere's meta."""
    expected = await order_of(served)

    answer = await served.post(path, BODY)
    job = await served.get(answer.headers["Location"])

    assert answer.status == 200, answer.body
    found = [(each["index"], each["relevance_score"]) for each in answer.json["results"]]
    assert found == expected
    assert answer.json["id"] == job.json["id"]
    assert answer.json["usage"]["prompt_tokens"] == answer.json["meta"]["tokens"]["input_tokens"]
    assert answer.json["meta"]["billed_units"] == {"search_units": 1}


@pytest.mark.parametrize(
    ("path", "asked", "there"),
    [
        ("/rerank", None, True),
        ("/v1/rerank", None, True),
        ("/v1/rerank", False, False),
        ("/v2/rerank", None, False),
        ("/v2/rerank", True, True),
    ],
)
async def test_documents_come_back(
    served: Service, path: str, asked: bool | None, there: bool
) -> None:
    """VLLM and Jina send the documents back, Cohere's v2 does not, unless told otherwise."""
    extra = {} if asked is None else {"return_documents": asked}

    answer = await served.post(path, {**BODY, "top_n": 1, **extra})

    (best,) = answer.json["results"]
    assert best.get("document") == ({"text": DOCUMENTS[best["index"]]} if there else None)


async def test_documents_may_be_objects(served: Service) -> None:
    """``{"text": …}`` is a document too."""
    objects = [{"text": each} for each in DOCUMENTS]

    plain = await served.post("/v1/rerank", BODY)
    answer = await served.post("/v1/rerank", {**BODY, "documents": objects})

    assert answer.json["results"] == plain.json["results"]


async def test_long_documents_are_cut(served: Service) -> None:
    """``max_tokens_per_doc`` cuts each document; the score is that of its beginning."""
    expected = await scores_of(served, [each[:5] for each in DOCUMENTS], BODY["query"])

    answer = await served.post("/v2/rerank", {**BODY, "max_tokens_per_doc": 5})
    pairs = {"model": "tiny", "text_1": BODY["query"], "text_2": DOCUMENTS}
    score = await served.post("/score", pairs | {"max_tokens_per_doc": 5})
    whole = await served.post("/score", pairs | {"max_tokens_per_doc": 0})

    found = {each["index"]: each["relevance_score"] for each in answer.json["results"]}
    assert found == dict(enumerate(expected))
    assert [each["score"] for each in score.json["data"]] == expected
    assert [each["score"] for each in whole.json["data"]] == await scores_of(
        served, DOCUMENTS, BODY["query"]
    )


async def test_what_does_not_fit(served: Service) -> None:
    """Cohere's v2 cuts; on the others such a document has an error and no place."""
    body = {**BODY, "model": "short", "query": "q", "documents": ["short", "rather too long"]}

    cut = await served.post("/v2/rerank", body)
    failed = await served.post("/v1/rerank", body)

    assert len(cut.json["results"]) == 2
    assert [each["index"] for each in failed.json["results"]] == [0]
    assert failed.json["errors"][0]["index"] == 1


@pytest.mark.parametrize("top_n", [0, 99])
async def test_top_n_beyond_is_all(served: Service, top_n: int) -> None:
    """VLLM's 0, and more than there are, mean all."""
    answer = await served.post("/rerank", {**BODY, "top_n": top_n})

    assert len(answer.json["results"]) == 3


async def test_teis_form(served: Service) -> None:
    """With ``texts`` the answer is TEI's bare list, with the texts where asked for."""
    expected = await order_of(served)
    body = {"model": "tiny", "query": BODY["query"], "texts": DOCUMENTS}

    plain = await served.post("/rerank", body)
    texts = await served.post("/rerank", {**body, "return_text": True})
    raw = await served.post("/rerank", {**body, "raw_scores": True})

    assert plain.json == [{"index": index, "score": score} for index, score in expected]
    assert [each["text"] for each in texts.json] == [DOCUMENTS[index] for index, _ in expected]
    logits = await scores_of(served, DOCUMENTS, BODY["query"], activation="none")
    assert {each["index"]: each["score"] for each in raw.json} == dict(enumerate(logits))


async def test_teis_truncation(served: Service) -> None:
    """A text that does not fit fails the request in TEI's form, unless ``truncate`` is set."""
    body = {"model": "short", "query": "q", "texts": ["short", "rather too long"]}

    failed = await served.post("/rerank", body)
    cut = await served.post("/rerank", {**body, "truncate": True})
    job = await served.get(failed.headers["Location"])

    assert failed.status == 422
    assert failed.json["error_type"] == "Validation"
    assert "item 1" in failed.json["error"]
    assert failed.json["errors"][0]["code"] == "input_too_long"
    assert job.json["state"] == "partial"
    assert len(cut.json) == 2


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("name", ["instruct", "instruction"])
async def test_the_task_may_be_said(served: Service, path: str, name: str) -> None:
    """As SGLang and vLLM spell it, it is the job's ``instruction``; left out it is the model's."""
    body = {**BODY, "model": "told"}
    asked = [
        {"items": DOCUMENTS, "query": BODY["query"], "model": "told", "activation": "model"} | extra
        for extra in ({"instruction": "Find bread."}, {})
    ]

    answer = await served.post(path, body | {name: "Find bread."})
    default = await served.post(path, body)
    scores = [(await served.post("/v1/score", each)).json["scores"] for each in asked]
    jobs = [await served.get(each.headers["Location"]) for each in (answer, default)]

    for found, rows in zip((answer, default), scores, strict=True):
        ranked = {each["index"]: each["relevance_score"] for each in found.json["results"]}
        assert ranked == {index: row[1] for index, row in enumerate(rows)}
    hashes = [job.json["receipt"]["instruction_hash"] for job in jobs]
    assert hashes[0] != hashes[1]
    assert scores[0] != scores[1]


@pytest.mark.parametrize(
    ("path", "extra", "param", "message"),
    [
        ("/v1/rerank", {"instruct": "x"}, "instruction", "takes no instruction"),
        ("/v1/rerank", {"instruct": "x", "instruction": "x"}, "instruct", "either"),
        ("/v1/rerank", {"instruct": "x" * 4097}, "instruct", "4096"),
        ("/v2/rerank", {"instruction": 5}, "instruction", "str"),
    ],
)
async def test_a_task_that_is_refused(
    served: Service, path: str, extra: dict[str, Any], param: str, message: str
) -> None:
    """422 by name, where the model has no place for it or the body is wrong."""
    answer = await served.post(path, {**BODY, **extra})

    assert answer.status == 422
    told = answer.json if path == "/v2/rerank" else answer.json["error"]
    assert message in told["message"]
    assert param in str(told)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": "q", "documents": ["a"], "texts": ["a"]}, "texts"),
        ("/rerank", {"query": "q"}, None),
        ("/v1/rerank", {"documents": ["a"]}, None),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "q", "documents": [{"title": "a"}]}, "documents[0]"),
        ("/v2/rerank", {"query": "q", "documents": ["a"], "rank_fields": []}, "rank_fields"),
    ],
)
async def test_bad_bodies_are_named(
    served: Service, path: str, body: dict[str, Any], param: str | None
) -> None:
    """422, with the field."""
    answer = await served.post(path, {"model": "tiny", **body})

    assert answer.status == 422
    assert param is None or param in answer.json["error"]["param"]


async def test_errors_have_the_familys_form(served: Service) -> None:
    """Cohere's clients read ``message``, vLLM's ``error``, TEI's ``error_type``."""
    unknown = {**BODY, "model": "nobody"}

    cohere = await served.post("/v2/rerank", unknown)
    vllm = await served.post("/v1/rerank", unknown)
    tei = await served.post("/rerank", {"model": "nobody", "query": "q", "texts": ["a"]})
    broken = await served.request("POST", "/predict", data=b"{", headers=JSON)
    method = await served.get("/predict")

    assert cohere.status == vllm.status == tei.status == 404
    assert "nobody" in cohere.json["message"]
    assert vllm.json["error"]["code"] == "unknown_model"
    assert tei.json["error_type"] == "Validation"
    assert broken.status == 400
    assert broken.json["error_type"] == "Validation"
    assert method.status == 405
    assert method.json["error_type"] == "Validation"


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("prefer", ["respond-async", "wait=0"])
async def test_it_may_be_a_job(served: Service, prefer: str) -> None:
    """202 at once with the job; later the scores are there, and the same key finds them."""
    first = await served.post(
        "/v1/rerank", {**BODY, "user": "me"}, Prefer=prefer, Idempotency_Key="k"
    )
    job = await served.get(f"{first.headers['Location']}?wait=20")
    again = await served.post("/v1/rerank", {**BODY, "user": "me"}, Idempotency_Key="k")
    other = await served.post("/v1/rerank", BODY, Idempotency_Key="k")

    assert first.status == 202
    assert job.json["state"] == "succeeded"
    assert job.json["metadata"] == {"user": "me"}
    assert again.status == 200
    assert again.json["id"] == first.json["id"]
    assert again.headers["Idempotent-Replayed"] == "true"
    assert other.status == 422
    assert other.json["error"]["code"] == "idempotency_key_reused"


@pytest.mark.parametrize(
    ("priority", "lane"), [(0, "interactive"), (-1, "interactive"), (5, "normal")]
)
async def test_priorities_are_lanes(served: Service, priority: int, lane: str) -> None:
    """The lower the number, the more urgent."""
    answer = await served.post("/v2/rerank", {**BODY, "priority": priority})
    job = await served.get(answer.headers["Location"])

    assert job.json["priority"] == lane


async def test_the_wait_that_was_applied_is_named(served: Service) -> None:
    """``Preference-Applied`` names the limit where more was asked for."""
    answer = await served.post("/v1/rerank", BODY, Prefer="wait=3600")

    assert answer.headers["Preference-Applied"] == "wait=60"
