"""OpenAI's stock client against the files and batches routes, only ``base_url`` changed."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.bulk.bench import Bulks, batch_line, render

ENDED = {"completed", "failed", "cancelled", "expired"}


def connect(bulks: Bulks) -> AsyncOpenAI:
    """Return the stock client."""
    return AsyncOpenAI(base_url=f"{bulks.service.url}/v1", api_key="none", max_retries=0)


async def run(client: AsyncOpenAI, lines: list[dict[str, Any]], endpoint: Any, **extra: Any) -> Any:
    """Upload, create, and wait for the end."""
    file = await client.files.create(file=("in.jsonl", render(lines)), purpose="batch")
    batch: Any = await client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,
        completion_window="24h",
        **extra,
    )
    async with asyncio.timeout(25):
        while batch.status not in ENDED:
            batch = await client.batches.retrieve(batch.id)
            await asyncio.sleep(0.02)
    return batch


async def read(client: AsyncOpenAI, file_id: str) -> list[dict[str, Any]]:
    """Download a file's lines."""
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


async def test_upload_run_and_download(bulks: Bulks) -> None:
    """The whole way of a batch; what fails is in the error file, the rest in the output file."""
    await bulks.start_worker()
    async with connect(bulks) as client:
        lines = [batch_line(f"r{n}", model="short", items=[f"t {n}"]) for n in range(5)]
        lines.append(batch_line("long", model="short", items=["far too long to fit in"]))
        batch = await run(client, lines, "/v1/score", metadata={"who": "me"})
        output = await read(client, batch.output_file_id)
        errors = await read(client, batch.error_file_id)
        listed = [each.id async for each in client.batches.list(limit=1)]

    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 6, "completed": 5, "failed": 1}
    assert batch.metadata == {"who": "me"}
    assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(5)]
    assert output[0]["response"]["status_code"] == 200
    assert len(output[0]["response"]["body"]["scores"][0]) == 2
    assert errors[0]["custom_id"] == "long"
    assert errors[0]["response"]["status_code"] == 422
    assert errors[0]["error"]["code"] == "input_too_long"
    assert listed == [batch.id]


async def test_rerank_and_classify(sqlite_bulks: Bulks) -> None:
    """The other endpoints answer with their own bodies."""
    await sqlite_bulks.start_worker()
    async with connect(sqlite_bulks) as client:
        rank = batch_line(
            "a", "/v1/rerank", model="tiny", query="q", documents=["x", "y", "z"], top_n=2
        )
        ranked = await run(client, [rank], "/v1/rerank")
        results = (await read(client, ranked.output_file_id))[0]["response"]["body"]["results"]
        line = batch_line("b", "/v1/classify", model="tiny", input=["x", "y"])
        classified = await run(client, [line], "/v1/classify")
        data = (await read(client, classified.output_file_id))[0]["response"]["body"]["data"]

    assert len(results) == 2
    assert results[0]["relevance_score"] >= results[1]["relevance_score"]
    assert [each["index"] for each in data] == [0, 1]
    assert data[0]["num_classes"] == 2
    assert sum(data[0]["probs"]) == pytest.approx(1)
    assert data[0]["label"] == ["negative", "positive"][data[0]["probs"][1] > 0.5]


async def test_a_duplicate_id_names_both_lines(sqlite_bulks: Bulks) -> None:
    """Lines 3 and 9 with one custom_id: both are named and nothing runs (sglang#1415)."""
    await sqlite_bulks.start_worker()
    lines = [batch_line(f"r{n}", model="tiny", items=["a"]) for n in range(10)]
    lines[8]["custom_id"] = lines[2]["custom_id"]
    async with connect(sqlite_bulks) as client:
        batch = await run(client, lines, "/v1/score")
    jobs = await sqlite_bulks.service.get("/v1/jobs")

    assert batch.status == "failed"
    error = batch.errors.data[0]
    assert error.code == "duplicate_custom_id"
    assert error.message == "lines 3 and 9 have the same custom_id"
    assert error.line == 9
    assert batch.output_file_id is None
    assert jobs.json["data"] == []


async def test_a_batch_of_bad_lines_tells_it(sqlite_bulks: Bulks) -> None:
    """Every line is invalid: the status tells it, there is an error file, counts are right."""
    await sqlite_bulks.start_worker()
    lines = [batch_line(f"r{n}", "/v1/nowhere", items=["a"]) for n in range(3)]
    async with connect(sqlite_bulks) as client:
        batch = await run(client, lines, "/v1/score")
        errors = await read(client, batch.error_file_id)
        after = await run(client, [batch_line("a", model="tiny", items=["b"])], "/v1/score")

    assert batch.status == "failed"
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 0, "failed": 3}
    assert [line["error"]["line"] for line in errors] == [1, 2, 3]
    assert after.status == "completed"  # what failed counts against nobody


async def test_good_lines_run_when_asked_to(sqlite_bulks: Bulks) -> None:
    """With ``on_invalid: skip`` bad lines go to the error file and the others run."""
    await sqlite_bulks.start_worker()
    lines = [batch_line("good", model="tiny", items=["a"]), batch_line("bad", items=["a"])]
    async with connect(sqlite_bulks) as client:
        batch = await run(client, lines, "/v1/score", extra_body={"on_invalid": "skip"})
        errors = await read(client, batch.error_file_id)
        output = await read(client, batch.output_file_id)

    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
    assert [line["custom_id"] for line in output] == ["good"]
    assert [line["custom_id"] for line in errors] == ["bad"]
    assert "name the model" in errors[0]["error"]["message"]


async def test_cancel_and_expiry(bulks: Bulks) -> None:
    """A cancelled batch ends as cancelled, one whose window passed as expired."""
    await bulks.service.report_ready()
    line = [batch_line("a", model="tiny", items=["a"])]
    async with connect(bulks) as client:
        file = await client.files.create(file=("in.jsonl", render(line)), purpose="batch")
        endpoint: Any = "/v1/score"
        created: Any = [
            await client.batches.create(
                input_file_id=file.id, endpoint=endpoint, completion_window="24h"
            )
            for _ in range(2)
        ]
        cancelling = await client.batches.cancel(created[0].id)
        from sqlalchemy import text  # noqa: PLC0415  # the clock is the database's

        async with bulks.service.database.transaction() as tx:
            await tx.execute(
                text("UPDATE bulks SET deadline_at = 1 WHERE id = :id"), {"id": created[1].id}
            )
        for index, wanted in enumerate(("cancelled", "expired")):
            await bulks.wait(created[index].id)
            batch = await client.batches.retrieve(created[index].id)
            assert batch.status == wanted
            assert batch.request_counts is not None
            assert batch.request_counts.completed == 0
    assert cancelling.status in {"cancelling", "cancelled", "finalizing"}


async def test_files_come_and_go(sqlite_bulks: Bulks) -> None:
    """Files of several parts are read back whole, listed, and deleted with their bytes."""
    data = bytes(range(256)) * 40_000
    async with connect(sqlite_bulks) as client:
        file = await client.files.create(file=("big.jsonl", data), purpose="batch")
        small = await client.files.create(
            file=("small.jsonl", b"x"),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        listed = [each.id async for each in client.files.list(purpose="batch", limit=1)]
        content = (await client.files.content(file.id)).content
        shown = await client.files.retrieve(file.id)
        deleted = await client.files.delete(file.id)
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
        with pytest.raises(openai.UnprocessableEntityError):
            await client.files.create(file=("a", b"x"), purpose="assistants")
    from api.bulk.access import BULKS  # noqa: PLC0415

    await sqlite_bulks.service.app[BULKS].purge_files_once()
    left = [blob.key async for blob in sqlite_bulks.service.blobs.list("files")]

    assert content == data
    assert (shown.bytes, shown.filename) == (len(data), "big.jsonl")
    assert small.expires_at is not None
    assert listed == [small.id, file.id]
    assert deleted.deleted
    assert all(small.id in key for key in left)


async def test_what_a_batch_may_not_be(sqlite_bulks: Bulks) -> None:
    """Wrong endpoints, windows, files and bodies are refused in OpenAI's form."""
    post = sqlite_bulks.service.post
    file_id = await sqlite_bulks.upload(b"{}\n")
    good = {"input_file_id": file_id, "endpoint": "/v1/score", "completion_window": "24h"}
    for change, param in (
        ({"endpoint": "/v1/chat/completions"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"on_invalid": "maybe"}, "on_invalid"),
        ({"nonsense": 1}, "nonsense"),
    ):
        answer = await post("/v1/batches", good | change)
        assert answer.status == 422, change
        assert answer.json["error"]["param"] == param
    assert (await post("/v1/batches", good | {"input_file_id": "file-none"})).status == 404
    get = sqlite_bulks.service.get
    assert (await get("/v1/files/file-none")).status == 404
    assert (await get("/v1/batches?after=x")).status == 404
    request = sqlite_bulks.service.request
    assert (await post("/v1/files", {})).status == 422
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    broken = await request("POST", "/v1/files", data=b"--b\r\nnonsense", headers=headers)
    assert broken.status in {400, 422}
    nothing = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    assert (await request("POST", "/v1/files", data=nothing, headers=headers)).status == 422
