"""A bulk on the real processes, whose workers are killed while it runs."""

import asyncio
import io
import json
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.stack import Stack

ROWS = 6000


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_killed_workers_leave_each_row_once(
    tmp_path: Path, redis_url: str, postgres_url: str
) -> None:
    """Workers die again and again: the bulk ends, every row is there once, with its own score."""
    models = {"m": {"source": "builtin:deterministic"}}
    settings = {
        "SCOREKEEP_LEASE_S": "2",
        "SCOREKEEP_HEARTBEAT_S": "0.5",
        "SCOREKEEP_SWEEP_S": "0.3",
        "SCOREKEEP_MAX_CRASHES": "50",
    }
    lines = b"".join(
        json.dumps({"custom_id": f"r{n}", "item": f"text {n % 100}"}).encode() + b"\n"
        for n in range(ROWS)
    )
    async with Stack(tmp_path, redis_url, models, postgres_url, settings) as stack:
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", io.BytesIO(lines), filename="in.jsonl")
        _, _, file = await stack.request("POST", "/v1/files", data=form)
        body = {"input_file_id": file["id"], "model": "m", "cache": "off"}
        _, _, bulk = await stack.post("/v1/bulks", body)
        kills = 0
        worker = await stack.start_worker()
        while kills < 3:
            seen = bulk["counts"]["scored"]
            while bulk["counts"]["scored"] == seen and bulk["state"] in {"validating", "running"}:
                _, _, bulk = await stack.get(f"/v1/bulks/{bulk['id']}")
                await asyncio.sleep(0.02)
            await stack.kill(worker)
            kills += 1
            worker = await stack.start_worker()
        async with asyncio.timeout(60):
            while bulk["state"] != "completed":
                _, _, bulk = await stack.get(f"/v1/bulks/{bulk['id']}")
                await asyncio.sleep(0.1)
        url = f"{stack.url}/v1/bulks/{bulk['id']}/results"
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            raw = await answer.read()
    results = [json.loads(line) for line in raw.splitlines()]

    assert bulk["counts"]["scored"] == ROWS
    assert [line["custom_id"] for line in results] == [f"r{n}" for n in range(ROWS)]
    assert all(line["scores"] == results[n % 100]["scores"] for n, line in enumerate(results))
