"""Bulks on the real processes: killed workers, several hosts, a re-score that is cut off."""

import asyncio
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy import text

from storage.database import Database
from tests.e2e.stack import Stack
from tests.services import free_port

ROWS = 6000
MODELS = {"m": {"source": "builtin:deterministic"}}
_QUICK = {
    "SCOREKEEP_LEASE_S": "2",
    "SCOREKEEP_HEARTBEAT_S": "0.5",
    "SCOREKEEP_SWEEP_S": "0.3",
    "SCOREKEEP_MAX_CRASHES": "50",
}


async def _start_slow_worker(stack: Stack) -> asyncio.subprocess.Process:
    """A worker that takes its time, so that a test meets it at work on any machine."""
    stack.environment["CHAOS_FORWARD_S"] = "0.0005"
    return await stack.start("tests.chaos.worker", str(stack.folder / "ledger"))


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_killed_workers_leave_each_row_once(
    tmp_path: Path, redis_url: str, postgres_url: str
) -> None:
    """Workers die again and again: the bulk ends, every row is there once, with its own score."""
    async with Stack(tmp_path, redis_url, MODELS, postgres_url, _QUICK) as stack:
        bulk = await _start(stack, [f"text {n % 100}" for n in range(ROWS)], cache="off")
        kills = 0
        worker = await stack.start_worker()
        while kills < 3:
            seen = bulk["counts"]["scored"]
            while bulk["counts"]["scored"] == seen and bulk["state"] in {"validating", "running"}:
                bulk = await _get(stack, bulk["id"])
                await asyncio.sleep(0.02)
            await stack.kill(worker)
            kills += 1
            worker = await stack.start_worker()
        bulk = await _wait(stack, bulk["id"])
        results = await _results(stack.url, bulk["id"])

    assert bulk["counts"]["scored"] == ROWS
    assert [line["custom_id"] for line in results] == [f"r{n}" for n in range(ROWS)]
    assert all(line["scores"] == results[n % 100]["scores"] for n, line in enumerate(results))


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_several_hosts_work_on_one_bulk(
    tmp_path: Path, redis_url: str, postgres_url: str, s3_url: str
) -> None:
    """Three workers and two APIs share nothing but PostgreSQL, Redis and S3: all work on it."""
    settings = {**_QUICK, "SCOREKEEP_BLOB_URL": s3_url, "SCOREKEEP_CLAIM_JOBS": "1"}
    async with Stack(tmp_path, redis_url, MODELS, postgres_url, settings) as stack:
        for name in ("host-1", "host-2", "host-3"):
            stack.environment["SCOREKEEP_DATA_DIR"] = str(tmp_path / name)
            await _start_slow_worker(stack)
        stack.environment |= {
            "SCOREKEEP_DATA_DIR": str(tmp_path / "host-4"),
            "SCOREKEEP_PORT": str(free_port()),
        }
        other = f"http://127.0.0.1:{stack.environment['SCOREKEEP_PORT']}"
        await stack.start("api")
        await _workers(stack, 3)
        bulk = await _start(stack, [f"text {n}" for n in range(ROWS)], hidden_states=True)
        bulk = await _wait(stack, bulk["id"])
        results = await _results(other, bulk["id"])
        database = Database(postgres_url)
        async with database.snapshot() as tx:
            statement = text("SELECT worker, count(*) FROM jobs WHERE bulk_id = :id GROUP BY 1")
            shares = (await tx.execute(statement, {"id": bulk["id"]})).all()
        await database.close()
    kept = await asyncio.to_thread(lambda: list(tmp_path.glob("host-*/**/*.safetensors")))

    assert [line["custom_id"] for line in results] == [f"r{n}" for n in range(ROWS)]
    assert all(line["scores"][0] for line in results)
    assert len(shares) == 3, shares
    assert not kept  # all bytes are in S3


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_rescore_that_was_cut_off_goes_on(
    tmp_path: Path, redis_url: str, postgres_url: str
) -> None:
    """API and worker are killed amid a re-score; it ends by itself, and so does one begun anew.

    What was scored before the kill is in the cache although the first one had not ended.
    """
    async with Stack(tmp_path, redis_url, MODELS, postgres_url, _QUICK) as stack:
        worker = await _start_slow_worker(stack)
        first = await _start(stack, [f"text {n}" for n in range(ROWS)], cache="off")
        await _wait(stack, first["id"])
        body = {"source": {"bulk": first["id"]}, "model": "m"}
        _, _, bulk = await stack.post("/v1/rescore", body)
        while bulk["counts"]["scored"] < ROWS // 4:
            bulk = await _get(stack, bulk["id"])
            await asyncio.sleep(0.01)
        await stack.kill(worker)
        await _until_known(postgres_url, ROWS // 8)
        await stack.kill(stack.api_process)
        stack.api_process = await stack.start("api")
        await stack.wait_for("/healthz")
        await stack.post(f"/v1/bulks/{bulk['id']}/pause", {})
        await stack.start_worker()
        _, _, again = await stack.post("/v1/rescore", body)
        again = await _wait(stack, again["id"])
        await stack.post(f"/v1/bulks/{bulk['id']}/resume", {})
        bulk = await _wait(stack, bulk["id"])

    assert bulk["counts"]["scored"] == again["counts"]["scored"] == ROWS
    assert bulk["counts"]["from_cache"] == 0
    assert ROWS // 8 <= again["counts"]["from_cache"] < ROWS


async def _start(stack: Stack, texts: Sequence[str], **fields: Any) -> dict[str, Any]:
    """Upload a line per text and start a bulk."""
    lines = [{"custom_id": f"r{n}", "item": each} for n, each in enumerate(texts)]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", io.BytesIO(data), filename="in.jsonl")
    _, _, file = await stack.request("POST", "/v1/files", data=form)
    status, _, bulk = await stack.post(
        "/v1/bulks", {"input_file_id": file["id"], "model": "m", **fields}
    )
    assert status == 202, bulk
    return dict(bulk)


async def _get(stack: Stack, bulk_id: str) -> dict[str, Any]:
    return dict((await stack.get(f"/v1/bulks/{bulk_id}"))[2])


async def _wait(stack: Stack, bulk_id: str) -> dict[str, Any]:
    """Return the completed bulk."""
    async with asyncio.timeout(90):
        while (bulk := await _get(stack, bulk_id))["state"] != "completed":
            assert bulk["state"] in {"validating", "running"}, bulk
            await asyncio.sleep(0.05)
    return bulk


async def _results(url: str, bulk_id: str) -> list[dict[str, Any]]:
    address = f"{url}/v1/bulks/{bulk_id}/results"
    async with aiohttp.ClientSession() as http, http.get(address) as answer:
        assert answer.status == 200
        return [json.loads(line) for line in (await answer.read()).splitlines()]


async def _workers(stack: Stack, count: int) -> None:
    """Return when so many workers serve."""
    database = Database(stack.database_url)
    found = 0
    async with asyncio.timeout(60):
        while found < count:
            async with database.snapshot() as tx:
                ready = text("SELECT count(*) FROM workers WHERE CAST(models AS text) LIKE :like")
                found = (await tx.execute(ready, {"like": '%"ready"%'})).scalar_one()
            await asyncio.sleep(0.05)
    await database.close()


async def _until_known(database_url: str, lines: int) -> None:
    """Return when the cache knows so many lines."""
    database = Database(database_url)
    known = 0
    async with asyncio.timeout(30):
        while known < lines:
            async with database.snapshot() as tx:
                known = (await tx.execute(text("SELECT count(*) FROM score_cache"))).scalar_one()
            await asyncio.sleep(0.05)
    await database.close()
