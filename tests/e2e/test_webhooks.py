"""Webhooks through the real processes: verified by others' libraries, and never in a log."""

import asyncio
import io
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from openai import OpenAI
from replicate.webhook import Webhooks, WebhookSigningSecret
from standardwebhooks import Webhook

from contract.errors import SignatureError
from contract.webhooks import verify
from tests.e2e.stack import Stack, receiving
from tests.services import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
MARK = "a-payload-that-must-not-be-logged"


async def test_signed_events_arrive_and_nothing_secret_is_logged(
    tmp_path: Path, redis_url: str
) -> None:
    """Endpoint, rotation, test event, redelivery; at DEBUG the logs hold no secret, no payload."""
    settings = {"SCOREKEEP_LOG_LEVEL": "DEBUG", "SCOREKEEP_SWEEP_S": "0.1"}
    models = {"m": {"source": "builtin:deterministic"}}
    async with Stack(tmp_path, redis_url, models, settings=settings) as stack, receiving() as to:
        _, _, made = await stack.post("/v1/webhook_endpoints", {"url": to.url})
        path = f"/v1/webhook_endpoints/{made['id']}"
        _, _, rotated = await stack.post(f"{path}/rotate", {})
        _, _, default = await stack.get("/v1/webhooks/default/secret")
        await stack.start_worker("--deliveries-only")
        _, _, sent = await stack.post(f"{path}/test", {})
        await to.wait_for(1)
        body = {"items": [MARK], "metadata": {"who": MARK}, "webhook": to.url}
        _, _, job = await stack.post("/v1/jobs", body)
        await stack.post(f"/v1/jobs/{job['id']}/cancel", {})
        async with asyncio.timeout(30):  # in flight until it is recorded
            log: dict[str, Any] = {"data": []}
            while [each["state"] for each in log["data"]] != ["delivered"] * 2:
                _, _, log = await stack.get(f"/v1/jobs/{job['id']}/deliveries")
        status, _, again = await stack.post(f"/v1/deliveries/{log['data'][0]['id']}/redeliver", {})
        async with asyncio.timeout(30), to.arrived:
            await to.arrived.wait_for(lambda: len(to.received) >= 4)
        logged = stack.log

    secrets = [made["secret"], rotated["secret"], default["key"]]
    assert (status, again["event"]) == (202, log["data"][0]["event"])
    assert to.received[0][0]["webhook-id"] == sent["event"]
    assert len(to.ids) == 2
    assert all(secret.removeprefix("whsec_") not in logged for secret in secrets)
    assert MARK not in logged
    for headers, raw in to.received:
        signers = [secret for secret in secrets if is_signed_by(secret, headers, raw)]
        assert signers in ([default["key"]], [made["secret"], rotated["secret"]])
        for secret in signers:
            check_everywhere(secret, headers, raw)


async def test_a_bulk_calls_back_from_processes(
    tmp_path: Path, redis_url: str, postgres_url: str
) -> None:
    """Two APIs sweep, two processes deliver, one is killed: one end, ascending progress."""
    settings = {
        "SCOREKEEP_SWEEP_S": "0.1",
        "SCOREKEEP_LEASE_S": "2",
        "SCOREKEEP_HEARTBEAT_S": "0.5",
    }
    settings["SCOREKEEP_WEBHOOK_TIMEOUT_S"] = "1"
    models = {"m": {"source": "builtin:deterministic"}}
    async with (
        Stack(tmp_path, redis_url, models, postgres_url, settings) as stack,
        receiving() as to,
    ):
        stack.environment["SCOREKEEP_PORT"] = str(free_port())
        await stack.start("api")
        delivering = await stack.start_worker("--deliveries-only")
        await stack.start_worker()
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        lines = b"".join(b'{"item": "text %d"}\n' % n for n in range(4000))
        form.add_field("file", io.BytesIO(lines), filename="in.jsonl")
        _, _, file = await stack.request("POST", "/v1/files", data=form)
        body = {"input_file_id": file["id"], "model": "m", "webhook": to.url}
        _, _, bulk = await stack.post("/v1/bulks", body)
        await to.wait_for(1)
        await stack.kill(delivering)
        async with asyncio.timeout(60):
            while bulk["state"] != "completed":
                _, _, bulk = await stack.get(f"/v1/bulks/{bulk['id']}")
                await asyncio.sleep(0.05)
            log: list[dict[str, Any]] = []
            while not log or any(each["state"] == "pending" for each in log):
                _, _, page = await stack.get(f"/v1/bulks/{bulk['id']}/deliveries?limit=100")
                log = page["data"]
                await asyncio.sleep(0.05)

    told = {headers["webhook-id"]: msgspec.json.decode(raw) for headers, raw in to.received}
    events = sorted(told.values(), key=lambda event: int(event["sequence"]))
    kinds = [event["type"] for event in events]
    done = [event["data"]["counts"]["lines_completed"] for event in events]
    assert set(told) == {each["event"] for each in log}
    assert kinds[-1] == "batch.completed"
    assert set(kinds[:-1]) <= {"batch.progress"}
    assert len(kinds) <= 20
    assert done == sorted(set(done))
    assert events[-1]["data"]["counts"] == bulk["counts"]


def is_signed_by(secret: str, headers: dict[str, str], raw: bytes) -> bool:
    """Tell whether a signature is this secret's."""
    try:
        return verify(raw, headers, secret).sequence > 0
    except SignatureError:
        return False


def check_everywhere(secret: str, headers: dict[str, str], raw: bytes) -> None:
    """Let every library verify."""
    Webhook(secret).verify(raw.decode(), headers)
    client = OpenAI(api_key="-", webhook_secret=secret)
    client.webhooks.unwrap(raw.decode(), headers)
    client.close()
    Webhooks.validate(
        headers=headers, body=raw.decode(), secret=WebhookSigningSecret(key=secret), tolerance=60
    )
