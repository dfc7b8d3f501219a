"""Corners that whole bulks seldom reach: spilt ids, broken Parquet, readers whose work raises."""

import io
import json
import math
import struct
import sys
from typing import Any

import aiohttp
import pytest

from api.bulk import duplicates
from api.bulk.access import BULKS
from api.bulk.duplicates import DuplicateFinder
from contract.errors import StoreUnavailableError
from storage.bulks import get_bulk
from tests.bulk.bench import Bulks, batch_line, render, rows

pyarrow = pytest.importorskip("pyarrow")


def test_ids_that_went_to_disk_are_still_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that grew to its file is read back: every later line of an id is named."""
    monkeypatch.setattr(duplicates, "_SPILL_BYTES", 100)
    with DuplicateFinder() as finder:
        for line in range(1, 2001):
            finder.add(f"id-{line}", line)
        finder.add("id-7", 2001)
        finder.add("id-1999", 2002)
        finder.add("id-7", 2003)
        found = sorted(finder.duplicates())

    assert found == [(7, 2001), (7, 2003), (1999, 2002)]


async def test_a_service_without_pyarrow_writes_jsonl_alone(
    sqlite_bulks: Bulks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for a table it says what is missing."""
    bulk = await sqlite_bulks.run(b"x\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    url = f"/v1/bulks/{bulk['id']}/results"
    kind = "application/vnd.apache.parquet"
    answer = await sqlite_bulks.service.get(url, headers={"Accept": kind})

    assert answer.status == 406
    assert "scorekeep[parquet]" in answer.json["detail"]


async def test_readers_outlive_a_store_that_is_away(
    sqlite_bulks: Bulks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reader and sweep look again; only what nobody foresaw ends them."""
    runner = sqlite_bulks.service.app[BULKS]
    calls: list[str] = []

    async def fail() -> bool:
        calls.append("x")
        if len(calls) % 2:
            message = "away"
            raise StoreUnavailableError(message)
        message = "unforeseen"
        raise RuntimeError(message)

    monkeypatch.setattr(runner, "read_once", fail)
    monkeypatch.setattr(runner, "sweep_once", fail)
    monkeypatch.setattr("api.bulk.runner._SWEEP_S", 0.01)
    for service in (runner.read, runner.sweep):
        calls.clear()
        with pytest.raises(RuntimeError, match="unforeseen"):
            await service()
        assert len(calls) >= 2


async def test_a_batch_whose_output_cannot_be_written_says_so(
    sqlite_bulks: Bulks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as failed, and is not tried for ever."""

    async def explode(*_: Any) -> None:
        message = "unforeseen"
        raise RuntimeError(message)

    monkeypatch.setattr("api.bulk.runner.write_outputs", explode)
    await sqlite_bulks.start_worker()
    file_id = await sqlite_bulks.upload(render([batch_line("a", model="tiny", items=["x"])]))
    body = {"input_file_id": file_id, "endpoint": "/v1/score", "completion_window": "24h"}
    batch = (await sqlite_bulks.service.post("/v1/batches", body)).json
    ended = await sqlite_bulks.wait(batch["id"])

    assert ended["state"] == "failed"
    assert ended["errors"] == [{"code": "internal", "message": "RuntimeError"}]


async def test_a_cache_that_cannot_be_filled_harms_no_bulk(
    sqlite_bulks: Bulks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines are scored; the cache goes without them, and is not tried for ever."""

    async def explode(*_: Any) -> bool:
        message = "unforeseen"
        raise RuntimeError(message)

    monkeypatch.setattr("api.bulk.runner.index", explode)
    await sqlite_bulks.start_worker()
    bulk = await sqlite_bulks.run(rows(5))
    await sqlite_bulks.wait_until_indexed(bulk["id"])
    async with sqlite_bulks.service.database.snapshot() as tx:
        row = await get_bulk(tx, "default", bulk["id"])

    assert bulk["counts"]["scored"] == 5
    assert row.state == "completed"
    assert row.indexed_lines == 5


async def test_fields_of_an_upload_are_bounded(sqlite_bulks: Bulks) -> None:
    """A field that is too long, or no number of seconds, is refused by name."""
    for name, value in (("purpose", "x" * 5000), ("expires_after[seconds]", "soon")):
        form = aiohttp.FormData({"purpose": "batch"} | {name: value})
        form.add_field("file", io.BytesIO(b"x"), filename="a")
        answer = await sqlite_bulks.service.request("POST", "/v1/files", data=form)

        assert answer.status == 422, answer.body
        assert answer.json["error"]["param"] in name


async def test_hidden_states_of_a_deleted_job_are_nan(sqlite_bulks: Bulks) -> None:
    """The set keeps its shape; the rows whose bytes were deleted are NaN, and results say gone."""
    await sqlite_bulks.start_worker()
    lines = [{"custom_id": f"r{n}", "item": "x", "query": f"q{n}"} for n in range(3)]
    bulk = await sqlite_bulks.run(lines, hidden_states=True)
    jobs = (await sqlite_bulks.service.get("/v1/jobs")).json["data"]
    await sqlite_bulks.service.request("DELETE", f"/v1/jobs/{jobs[0]['id']}")

    url = f"/v1/bulks/{bulk['id']}/hidden_states"
    shard = (await sqlite_bulks.service.get(url)).json["shards"][0]["file"]
    data = (await sqlite_bulks.service.get(f"{url}/{shard}")).body
    header = int.from_bytes(data[:8], "little")
    values = struct.unpack(f"<{3 * 16}f", data[8 + header :])
    results = await sqlite_bulks.results(bulk["id"])

    assert json.loads(data[8 : 8 + header])["hidden_states"]["shape"] == [3, 16]
    missing = [n for n in range(3) if math.isnan(values[16 * n])]
    assert [n for n, line in enumerate(results) if line["errors"]] == missing
    assert len(missing) == 1
    assert results[missing[0]]["errors"][0]["code"] == "gone"
