"""Workers die, Redis forgets: every job still ends once, with the right scores."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from redis.asyncio import Redis

from contract.webhooks import verify
from tests.e2e.stack import Stack, receiving
from tests.tiny_models import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

JOBS = 200
SHORT_LEASE = {
    "SCOREKEEP_LEASE_S": "3",
    "SCOREKEEP_HEARTBEAT_S": "0.5",
    "SCOREKEEP_SWEEP_S": "0.3",
    "SCOREKEEP_CLAIM_JOBS": "16",
}


def _bodies(webhook: str | None = None) -> list[dict[str, object]]:
    extra = {"webhook": webhook} if webhook else {}
    return [{"model": "tiny", "items": [f"text number {n}"], **extra} for n in range(JOBS)]


async def _scores(stack: Stack, ids: list[str]) -> list[list[float]]:
    gate = asyncio.Semaphore(20)

    async def fetch(job_id: str) -> list[float]:
        async with gate:
            _, _, body = await stack.get(f"/v1/jobs/{job_id}/scores")
            row: list[float] = body["scores"][0]
            return row

    return list(await asyncio.gather(*(fetch(job_id) for job_id in ids)))


async def _expected(stack: Stack) -> list[list[float]]:
    """The same texts in one job of a healthy worker."""
    items = [str(body["items"][0]) for body in _bodies()]  # type: ignore[index]
    _, _, answer = await stack.post("/v1/score", {"model": "tiny", "items": items})
    scores: list[list[float]] = answer["scores"]
    return scores


def _same(ours: list[list[float]], expected: list[list[float]]) -> bool:
    return all(a == pytest.approx(b, abs=1e-5) for a, b in zip(ours, expected, strict=True))


async def test_the_only_worker_is_killed_in_the_middle(tmp_path: Path, redis_url: str) -> None:
    """200 jobs, kill -9 once some are done and some run, a new worker: 200 right, 200 event ids."""
    make_tiny(tmp_path / "m", "BertForSequenceClassification", num_labels=2)
    models = {"tiny": {"source": str(tmp_path / "m")}}

    async with (
        Stack(tmp_path, redis_url, models, settings=SHORT_LEASE) as stack,
        receiving() as receiver,
    ):
        worker = await stack.start_worker()
        await stack.wait_for("/readyz")
        ids = await stack.submit_many(_bodies(receiver.url))
        await stack.kill(worker)
        states = [(await stack.get(f"/v1/jobs/{job_id}"))[2]["state"] for job_id in ids]
        unfinished = sum(state in {"queued", "running"} for state in states)

        await stack.start_worker()
        jobs = await stack.finish(ids)
        await receiver.wait_for(JOBS)
        secret = (await stack.get("/v1/webhooks/default/secret"))[2]["key"]
        events = {
            headers["webhook-id"]: verify(body, headers, secret).data["id"]
            for headers, body in receiver.received
        }

        assert unfinished > 0
        assert Counter(job["state"] for job in jobs.values()) == {"succeeded": JOBS}
        assert _same(await _scores(stack, ids), await _expected(stack))
        assert sorted(events.values()) == sorted(ids)


async def test_redis_forgets_everything(tmp_path: Path, redis_url: str) -> None:
    """FLUSHALL with 200 jobs queued: all finish, since SQL is the queue of record."""
    make_tiny(tmp_path / "m", "BertForSequenceClassification", num_labels=2)
    models = {"tiny": {"source": str(tmp_path / "m")}}

    async with Stack(tmp_path, redis_url, models, settings=SHORT_LEASE) as stack:
        ids = await stack.submit_many(_bodies())
        async with Redis.from_url(redis_url) as redis:
            await redis.flushall()
        await stack.start_worker()
        jobs = await stack.finish(ids)

        assert Counter(job["state"] for job in jobs.values()) == {"succeeded": JOBS}
        assert _same(await _scores(stack, ids), await _expected(stack))


async def test_a_model_that_cannot_load_says_so(tmp_path: Path, redis_url: str) -> None:
    """Its jobs fail with the reason, ``/readyz`` names it, and the other model goes on."""
    make_tiny(tmp_path / "good", "BertForSequenceClassification", num_labels=2)
    models = {
        "good": {"source": str(tmp_path / "good")},
        "broken": {"source": str(tmp_path / "nowhere")},
    }

    async with Stack(tmp_path, redis_url, models, settings=SHORT_LEASE) as stack:
        ids = await stack.submit_many([{"model": "broken", "items": ["x"]}])
        await stack.start_worker()
        job = (await stack.finish(ids))[ids[0]]
        await stack.wait_for("/readyz")
        _, _, ready = await stack.get("/readyz")
        status, _, answer = await stack.post("/v1/score", {"model": "good", "items": ["x"]})

        assert job["state"] == "failed"
        assert job["error"]["code"] == "model_unavailable"
        assert "nowhere" in job["error"]["message"]
        assert ready["models"] == {"good": "ready", "broken": "failed"}
        assert any("nowhere" in reason["detail"] for reason in ready["reasons"])
        assert (status, len(answer["scores"])) == (200, 1)
