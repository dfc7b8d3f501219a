"""Classify as vLLM answers it, predict as TEI does."""

from typing import Any

import pytest

from tests.api.service import Service


async def rows_of(service: Service, items: list[str], **fields: Any) -> list[list[float]]:
    """Return what a job of our own gives."""
    body = {"model": "tiny", "items": items, "activation": "model", **fields}
    job = (await service.post("/v1/jobs", body, Prefer="wait=20")).json
    rows: list[list[float]] = (await service.get(f"/v1/jobs/{job['id']}/scores")).json["scores"]
    return rows


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_vllms_form(served: Service, path: str) -> None:
    """The likeliest label and all probabilities of each input."""
    rows = await rows_of(served, ["a", "b"])

    answer = await served.post(path, {"model": "tiny", "input": ["a", "b"]})

    assert answer.status == 200, answer.body
    assert answer.json["object"] == "list"
    assert answer.json["usage"]["prompt_tokens"] == 2
    assert answer.json["data"] == [
        {
            "index": index,
            "label": ["negative", "positive"][row[1] > row[0]],
            "probs": row,
            "num_classes": 2,
        }
        for index, row in enumerate(rows)
    ]


async def test_one_bare_input(served: Service) -> None:
    """A string is one input; without an activation its numbers are logits."""
    (row,) = await rows_of(served, ["a"], activation="none")

    answer = await served.post(
        "/classify", {"model": "tiny", "input": "a", "use_activation": False}
    )

    assert [each["probs"] for each in answer.json["data"]] == [row]


async def test_an_input_that_fails_keeps_its_place(served: Service) -> None:
    """Null label and probabilities at its index."""
    answer = await served.post("/classify", {"model": "short", "input": ["far too long", "b"]})

    first, second = answer.json["data"]
    assert first == {"index": 0, "label": None, "probs": None, "num_classes": 2}
    assert second["label"] in {"negative", "positive"}
    assert answer.json["errors"][0]["index"] == 0


@pytest.mark.parametrize(
    ("inputs", "items", "queries"),
    [
        ("a", ["a"], None),
        (["a"], ["a"], None),
        (["q", "a"], ["a"], ["q"]),
        ([["a"], ["b"]], ["a", "b"], None),
        ([["q", "a"], ["q", "b"]], ["a", "b"], ["q", "q"]),
        ([["q", "a"], ["p", "b"]], ["a", "b"], ["q", "p"]),
        ([["q", "a"], ["b"]], ["a", "b"], ["q", ""]),
        ([], [], None),
    ],
)
async def test_teis_inputs(
    served: Service, inputs: Any, items: list[str], queries: list[str] | None
) -> None:
    """A text, a pair, or a list of either; a single input's classes are not nested."""
    fields = {} if queries is None else {"queries": queries}
    rows = await rows_of(served, items, **fields)

    answer = await served.post("/predict", {"model": "tiny", "inputs": inputs})

    expected = [
        sorted(
            (
                {"score": score, "label": label}
                for score, label in zip(row, ["negative", "positive"], strict=True)
            ),
            key=lambda each: -float(str(each["score"])),
        )
        for row in rows
    ]
    single = isinstance(inputs, str) or (bool(inputs) and isinstance(inputs[0], str))
    assert answer.status == 200, answer.body
    assert answer.json == (expected[0] if single else expected)


@pytest.mark.parametrize(
    ("inputs", "param"),
    [
        (["a", "b", "c"], "inputs"),
        ([["a"], "b"], "inputs"),
        ([["a"], []], "inputs[1]"),
        ([["a", "b", "c"]], "inputs[0]"),
        (3, "inputs"),
    ],
)
async def test_inputs_that_mean_nothing(served: Service, inputs: Any, param: str) -> None:
    """422 in TEI's form, with the place."""
    answer = await served.post("/predict", {"model": "tiny", "inputs": inputs})

    assert answer.status == 422
    assert answer.json["error_type"] == "Validation"
    assert answer.json["param"] == param


async def test_hugging_faces_parameters(served: Service) -> None:
    """``top_k`` and ``function_to_apply`` are honoured, and the answer is nested."""
    parameters = {"top_k": 1, "function_to_apply": "sigmoid"}

    answer = await served.post(
        "/predict", {"model": "tiny", "inputs": "a", "parameters": parameters}
    )

    (row,) = await rows_of(served, ["a"], activation="sigmoid")
    assert [[each["score"] for each in one] for one in answer.json] == [[max(row)]]
