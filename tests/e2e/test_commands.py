"""The commands of whoever keeps a service running: dead jobs, the doctor, backup and restore."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
_MODELS = {
    "cheap": {"source": "builtin:deterministic"},
    "broken": {"source": "/nowhere/at/all"},
}


async def scorekeep(stack: Stack, *arguments: str) -> tuple[int, str, str]:
    """Run ``scorekeep …`` in the environment of the service; return code, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scorekeep", *arguments),
        env=stack.environment,
        stdout=PIPE,
        stderr=PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), err.decode()


async def read_scores(stack: Stack, ids: list[str]) -> dict[str, Any]:
    """Return the scores of finished jobs."""
    return {job_id: (await stack.get(f"/v1/jobs/{job_id}/scores"))[2]["scores"] for job_id in ids}


async def test_dead_jobs_are_listed_and_retried(tmp_path: Path, redis_url: str) -> None:
    """``jobs list --state failed`` finds it, ``retry`` queues it again, ``show`` tells."""
    async with Stack(tmp_path, redis_url, _MODELS) as stack:
        await stack.start_worker()
        (job_id,) = await stack.submit_many([{"model": "broken", "items": ["a"]}])
        ended = await stack.finish([job_id])
        listed = await scorekeep(stack, "jobs", "list", "--state", "failed", "--json")
        retried = await scorekeep(stack, "jobs", "retry", job_id, "--json")
        again = await stack.finish([job_id])
        shown = await scorekeep(stack, "jobs", "show", job_id)
        unknown = await scorekeep(stack, "jobs", "retry", "job_" + "0" * 32)

    assert ended[job_id]["error"]["code"] == "model_unavailable"
    assert listed[0] == 0
    assert [job["id"] for job in json.loads(listed[1])] == [job_id]
    assert retried[0] == 0
    assert json.loads(retried[1])["state"] == "queued"
    assert again[job_id]["attempt"] == 2
    assert "model_unavailable" in shown[1]
    assert unknown[0] == 1
    assert "there is no job" in unknown[2]


async def test_a_backup_comes_back(tmp_path: Path, redis_url: str) -> None:
    """Taken under load, restored elsewhere, mended by the doctor: every score is as it was."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    bodies = [{"model": "cheap", "items": [f"text {n}", "x"]} for n in range(60)]
    models = {"cheap": _MODELS["cheap"]}  # the doctor would name the other
    async with Stack(tmp_path / "old", redis_url, models) as stack:
        await stack.start_worker("--model", "cheap")
        ids = await stack.submit_many(bodies[:30])
        await stack.finish(ids)
        more = asyncio.create_task(stack.submit_many(bodies[30:]))
        taken = await scorekeep(stack, "backup", str(tmp_path / "copy"))
        await stack.finish(await more)
        scores = await read_scores(stack, ids)
        clean = await scorekeep(stack, "doctor")
        await stack.stop_all()

    new = Stack(tmp_path / "new", redis_url, models)
    restored = await scorekeep(new, "restore", str(tmp_path / "copy"))
    again = await scorekeep(new, "restore", str(tmp_path / "copy"))
    lost = next((tmp_path / "new" / "data" / "blobs").rglob("*.safetensors"))
    await asyncio.to_thread(lost.unlink)
    found = await scorekeep(new, "doctor")
    mended = await scorekeep(new, "doctor", "--repair")
    async with new:
        await new.start_worker("--model", "cheap")
        await new.finish(ids)
        after = await read_scores(new, ids)
        last = await scorekeep(new, "doctor", "--deep")

    assert [clean[0], taken[0], restored[0], again[0]] == [0, 0, 0, 2], (clean, taken, restored)
    assert "blobs" in taken[1]
    assert "exists already" in again[2]
    assert (found[0], mended[0], last[0]) == (1, 0, 0), (found, mended, last)
    assert "rows without bytes: 0" not in found[1]
    assert "(repaired)" in mended[1]
    assert after == scores
