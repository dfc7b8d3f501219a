"""Every bad input is refused by name before anything runs, or line by line when asked to."""

import gzip
import io
import json
from typing import Any

import aiohttp
import pytest

from tests.bulk.bench import Bulks, batch_line, render, rows


async def refused(bulks: Bulks, data: bytes, **fields: Any) -> list[dict[str, Any]]:
    """Run a bulk that must be refused whole; return its errors."""
    bulk = await bulks.run(data, **fields)
    assert bulk["state"] == "failed", bulk
    assert (await bulks.service.get("/v1/jobs")).json["data"] == []
    return list(bulk["errors"])


@pytest.mark.parametrize(
    ("data", "line", "code", "message"),
    [
        (b"", None, "empty_file", "no lines"),
        (b"\n\n\n", None, "empty_file", "no lines"),
        (b"hello\n", 1, "malformed_request", "not valid JSON"),
        (b'{"item": "a"}\n\n{"item": "b"}\n', 2, "malformed_request", "not valid JSON"),
        (b'{"item": "a"}\n{"item": ', 2, "malformed_request", "not valid JSON"),
        (b"[1]\n", 1, "invalid_request", "Expected `object`"),
        (b'{"item": "a", "colour": 1}\n', 1, "invalid_request", "colour"),
        (b'{"custom_id": "", "item": "a"}\n', 1, "invalid_request", "1 to 512"),
        (b'{"custom_id": "\\u0000", "item": "a"}\n', 1, "invalid_request", "NUL"),
        (b'{"item": "a", "model": 3}\n', 1, "invalid_request", "Expected"),
        (render([batch_line("a", "/v1/other", items=["x"])]), 1, "invalid_request", "url must be"),
        (
            render([batch_line("a", items=["x"]) | {"method": "GET"}]),
            1,
            "invalid_request",
            "method must be POST",
        ),
        (render([{"item": "x", "label_token_ids": []}]), 1, "invalid_request", "empty"),
        (b'{"item": "' + b"x" * 5000 + b'"}\n', 1, "too_large", "max_line_bytes"),
        (b'{"custom_id": "a", "item": "' + b"x" * 3000 + b'"}\n', 1, "too_large", "max_job_tokens"),
        (render([{"item": "x", "query": "y" * 3000}]), 1, "too_large", "max_job_tokens of 700"),
        (
            render([{"items": ["a", "b", "c"], "label_token_ids": list(range(7))}]),
            1,
            "too_large",
            "21 scores, which exceed the limit max_scores of 20",
        ),
        (gzip.compress(render(rows(100)))[:-20], None, "malformed_request", "ends too early"),
        (b"\x1f\x8bnonsense", None, "malformed_request", "gzip is broken"),
        (b"PAR1nonsense", None, "malformed_request", "not Parquet"),
        (render(rows(3)) + render(rows(1)), 4, "duplicate_custom_id", "lines 1 and 4"),
    ],
)
async def test_bad_lines_are_named(
    short_lines: Bulks, data: bytes, line: int | None, code: str, message: str
) -> None:
    """The error says which line, and what is wrong with it."""
    errors = await refused(short_lines, data)

    assert errors[0].get("line") == line
    assert errors[0]["code"] == code
    assert message in errors[0]["message"]


async def test_an_unknown_model_is_named(short_lines: Bulks) -> None:
    """So is what is served."""
    errors = await refused(short_lines, render(rows(1)), model="nobody")

    assert errors[0]["code"] == "unknown_model"
    assert "served are" in errors[0]["message"]


async def test_one_broken_line_among_many(short_lines: Bulks) -> None:
    """It is found; asked to, the others run all the same."""
    await short_lines.start_worker()
    data = render(rows(5000)) + b"broken\n" + render([{"custom_id": "last", "item": "z"}])
    errors = await refused(short_lines, data)
    bulk = await short_lines.run(data, on_invalid="skip")
    results = await short_lines.results(bulk["id"], after=4999)

    assert [error["line"] for error in errors] == [5001]
    assert bulk["counts"]["lines_completed"] == 5001
    assert bulk["counts"]["lines_failed"] == 1
    assert [line["custom_id"] for line in results] == ["row-4999", "line-5001", "last"]
    assert results[1]["errors"][0]["code"] == "malformed_request"


async def test_only_so_many_bad_lines_are_listed(short_lines: Bulks) -> None:
    """A file of nothing but bad lines does not fill the database with them."""
    bulk = await short_lines.run(b"x\n" * 500)

    assert len(bulk["errors"]) == 100
    assert bulk["counts"]["lines_failed"] == 500


async def test_gzip_in_members_and_parquet(short_lines: Bulks) -> None:
    """Packed files run as plain ones do; columns are named."""
    await short_lines.start_worker()
    lines = render(rows(2000))
    packed = gzip.compress(lines[:9000]) + gzip.compress(lines[9000:])
    plain = await short_lines.run(lines)
    unpacked = await short_lines.run(packed, cache="off")
    results = await short_lines.results(plain["id"])

    assert await short_lines.results(unpacked["id"]) == results

    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet  # noqa: PLC0415

    sink = io.BytesIO()
    table = pyarrow.table(
        {"uid": [f"row-{n}" for n in range(2000)], "text": [f"text {n}" for n in range(2000)]}
    )
    parquet.write_table(table, sink)
    columns = {"item": "text", "id": "uid"}
    bulk = await short_lines.run(sink.getvalue(), columns=columns, cache="off")
    wrong = await short_lines.run(sink.getvalue(), columns={"item": "body"})

    assert await short_lines.results(bulk["id"]) == results
    assert wrong["state"] == "failed"
    assert "no column 'body'; there are: uid, text" in wrong["errors"][0]["message"]
    url = f"/v1/bulks/{bulk['id']}/results"
    for kind, read in (
        ("application/vnd.apache.parquet", parquet.read_table),
        ("application/vnd.apache.arrow.stream", lambda f: pyarrow.ipc.open_stream(f).read_all()),
    ):
        answer = await short_lines.service.get(url, headers={"Accept": kind})
        found = read(io.BytesIO(answer.body)).to_pylist()
        assert [row["custom_id"] for row in found] == [f"row-{n}" for n in range(2000)]
        assert found[7]["scores"] == pytest.approx(results[7]["scores"][0])
    refused_type = await short_lines.service.get(url, headers={"Accept": "text/csv"})
    assert refused_type.status == 406


async def test_uris_stay_within_the_allowed_stores(short_lines: Bulks) -> None:
    """A URI below an allowed prefix is read; any other is refused."""
    await short_lines.start_worker()
    folder = short_lines.service.settings.bulk_input_urls.removeprefix("file://")
    with open(f"{folder}/in.jsonl", "wb") as file:  # noqa: ASYNC230  # a test's own file
        file.write(render(rows(10)))
    base = f"file://{folder}"
    answer = await short_lines.service.post(
        "/v1/bulks", {"model": "tiny", "input_uri": f"{base}/in.jsonl"}
    )
    bulk = await short_lines.wait(answer.json["id"])
    gone = await short_lines.service.post("/v1/bulks", {"input_uri": f"{base}/none.jsonl"})
    missing = await short_lines.wait(gone.json["id"])

    assert bulk["counts"]["scored"] == 10
    assert bulk["source"] == {"uri": f"{base}/in.jsonl"}
    assert missing["state"] == "failed"
    assert missing["errors"][0]["code"] == "not_found"
    for uri in ("file:///etc/passwd", f"{base}/../x", f"{base}x/y", "s3://bucket/a", base):
        refusal = await short_lines.service.post("/v1/bulks", {"input_uri": uri})
        assert refusal.status == 422, uri
        assert refusal.json["param"] == "input_uri"


async def test_what_a_bulk_may_not_be(short_lines: Bulks) -> None:
    """Requests that cannot be meant are refused, and name the field."""
    file_id = await short_lines.upload(b"{}")
    for body, param in (
        ({}, "input_file_id"),
        ({"input_file_id": file_id, "input_uri": "file:///x"}, "input_file_id"),
        ({"input_file_id": file_id, "columns": {"colour": "x"}}, "columns"),
        ({"input_file_id": file_id, "columns": {"id": "x"}}, "columns.item"),
        ({"input_file_id": file_id, "cache": "maybe"}, "cache"),
        ({"input_file_id": file_id, "metadata": {"a": "\u0000"}}, "metadata"),
    ):
        answer = await short_lines.service.post("/v1/bulks", body)
        assert answer.status == 422, body
        assert answer.json["param"] == param, json.dumps(body)
    assert (await short_lines.service.post("/v1/bulks", {"input_file_id": "x"})).status == 404
    bulk = await short_lines.run(b"x\n")
    assert (await short_lines.service.get(f"/v1/bulks/{bulk['id']}/results?after=x")).status == 422
    assert (await short_lines.service.post(f"/v1/bulks/{bulk['id']}/retry", {})).status == 409
    running = await short_lines.start(rows(1))
    await short_lines.wait(running, "running")
    assert (await short_lines.service.post(f"/v1/bulks/{running}/retry", {})).status == 409
    request = short_lines.service.request
    assert (await request("DELETE", f"/v1/bulks/{running}")).status == 409


async def test_a_file_beyond_the_limit_is_refused(short_lines: Bulks) -> None:
    """Also one whose size nobody declared."""
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", io.BytesIO(b"x" * 2_000_001), filename="a")
    answer = await short_lines.service.request("POST", "/v1/files", data=form)

    assert answer.status == 413
    assert "max_file_bytes of 2000000" in answer.json["error"]["message"]


@pytest.mark.parametrize(("name", "value"), [("a", "x\0"), ("a\0", "x")])
async def test_metadata_that_sql_cannot_hold_is_refused(
    bulks: Bulks, name: str, value: str
) -> None:
    """Of bulks, of batches, and in what is filtered by: by name, on either database."""
    post = bulks.service.post
    await bulks.service.report_ready()
    file_id = await bulks.upload(b"{}\n")
    bulk = {"input_file_id": file_id, "model": "tiny", "metadata": {name: value}}
    batch = {"input_file_id": file_id, "endpoint": "/v1/score", "completion_window": "24h"}
    found = {"filter": {f"metadata.{name}": value}}
    model = {"filter": {"model": name + value}}

    refused = await post("/v1/bulks", bulk)
    refused_batch = await post("/v1/batches", batch | {"metadata": {name: value}})
    filtered = [await post("/v1/rescore", {"source": source}) for source in (found, model)]

    assert (refused.status, refused.json["param"]) == (422, "metadata")
    assert (refused_batch.status, refused_batch.json["error"]["param"]) == (422, "metadata")
    assert [(each.status, each.json["param"]) for each in filtered] == [(422, "source.filter")] * 2
