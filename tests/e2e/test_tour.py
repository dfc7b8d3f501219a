"""The tour: what Scorekeep does, start to end, in one story. Newcomers begin here.

A job is submitted over HTTP, a worker scores it, the scores and hidden states are fetched, and a
signed webhook announces the end.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from contract.webhooks import EventType, verify
from tests.e2e.stack import Stack, receiving
from tests.tiny_models import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def test_a_job_from_submission_to_webhook(tmp_path: Path, redis_url: str) -> None:
    """Submit, wait, read scores and vectors, verify the event, cancel too late, delete."""
    make_tiny(tmp_path / "bert", "BertForSequenceClassification", num_labels=2)
    models = {"sentiment": {"source": str(tmp_path / "bert")}}

    async with Stack(tmp_path, redis_url, models) as stack, receiving() as receiver:
        # The API answers before any worker runs; a job is kept until one does.
        status, headers, job = await stack.post(
            "/v1/jobs",
            {
                "model": "sentiment",
                "items": ["a fine film", "a dull film", "seen it"],
                "apply_softmax": True,
                "return_pooled_hidden_states": True,
                "webhook": receiver.url,
                "metadata": {"batch": "first"},
            },
        )
        assert (status, job["state"]) == (202, "queued")
        assert headers["Location"] == f"/v1/jobs/{job['id']}"

        await stack.start_worker()
        done = (await stack.finish([job["id"]]))[job["id"]]
        assert done["state"] == "succeeded"
        assert done["counts"] == {"total": 3, "succeeded": 3, "failed": 0}
        assert done["receipt"]["architecture"] == "BertForSequenceClassification"

        _, _, scores = await stack.get(f"/v1/jobs/{job['id']}/scores")
        assert [len(row) for row in scores["scores"]] == [2, 2, 2]
        assert [sum(row) for row in scores["scores"]] == pytest.approx([1, 1, 1], abs=1e-6)

        _, _, raw = await stack.get(f"/v1/jobs/{job['id']}/hidden_states")
        vectors = load(raw)["hidden_states"]
        assert vectors.dtype == np.float32
        assert vectors.shape[0] == 3
        assert np.isfinite(vectors).all()

        await receiver.wait_for(1)
        _, _, secret = await stack.get("/v1/webhooks/default/secret")
        event_headers, body = receiver.received[0]
        event = verify(body, event_headers, secret["key"])
        assert event.type is EventType.JOB_SUCCEEDED
        assert event.data["id"] == job["id"]

        status, _, problem = await stack.post(f"/v1/jobs/{job['id']}/cancel", {})
        assert (status, problem["code"]) == (409, "illegal_transition")

        status, _, _ = await stack.request("DELETE", f"/v1/jobs/{job['id']}")
        assert status in {200, 204}
        assert (await stack.get(f"/v1/jobs/{job['id']}"))[0] == 410
        blobs = [path for path in (tmp_path / "data" / "blobs").rglob("*") if path.is_file()]
        assert blobs == []


async def test_sglang_clients_are_answered_at_once(tmp_path: Path, redis_url: str) -> None:
    """``POST /v1/score`` waits and answers SGLang's body; the job behind it is durable."""
    make_tiny(tmp_path / "llama", "LlamaForCausalLM")
    models = {"judge": {"source": str(tmp_path / "llama")}}

    async with Stack(tmp_path, redis_url, models) as stack:
        await stack.start_worker()
        await stack.wait_for("/readyz")
        status, headers, answer = await stack.post(
            "/v1/score",
            {"query": "is it", "items": [" good", " bad"], "label_token_ids": [5, 6, 7]},
        )

        assert status == 200, answer
        assert (answer["object"], answer["model"]) == ("scoring", "judge")
        assert [len(row) for row in answer["scores"]] == [3, 3]
        assert all(0 < score < 1 for row in answer["scores"] for score in row)
        assert answer["usage"]["completion_tokens"] == 0
        assert (await stack.get(headers["Location"]))[2]["state"] == "succeeded"
