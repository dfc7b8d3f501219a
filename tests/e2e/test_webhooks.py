"""Webhooks through the real processes: verified by others' libraries, and never in a log."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from replicate.webhook import Webhooks, WebhookSigningSecret
from standardwebhooks import Webhook

from contract.errors import SignatureError
from contract.webhooks import verify
from tests.e2e.stack import Stack, receiving

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
