"""docker-compose.yml by hand: each service's exact command and environment, on packaged servers.

No Docker engine is at hand, so only the addresses differ: postgres, redis and s3 are those that the
tests start, and the registry file lies in a temporary folder.
"""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml  # type: ignore[import-untyped]

from storage.blobs import BlobStore
from tests.e2e.stack import receiving, registry_file, wait_until_ready
from tests.services import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

ROOT = Path(__file__).parents[2]
ENTRYPOINT = [sys.executable, "-P", "-m", "scorekeep"]


def _services() -> dict[str, Any]:
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "docker-compose.yml").read_text())
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


@asynccontextmanager
async def _running(
    service: dict[str, Any], changed: dict[str, str], log: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {name: value for name, value in os.environ.items() if "SCOREKEEP" not in name}
    assert changed.keys() - {"SCOREKEEP_PORT"} <= {
        *service["environment"],
        "SCOREKEEP_WEBHOOK_ALLOW_HTTP",
        "SCOREKEEP_WEBHOOK_ALLOWED_NETWORKS",
    }
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *ENTRYPOINT,
            *service["command"],
            env={**environment, **service["environment"], **changed},
            stdout=file,
            stderr=file,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 30)


async def test_the_services_of_the_compose_file_score_together(
    tmp_path: Path, redis_url: str, postgres_url: str, s3_url: str
) -> None:
    """Migrate ends with 0; the others score, keep in S3, call back, and drain."""
    services = _services()
    config = registry_file(tmp_path, {"m": {"source": "builtin:deterministic"}})
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "compose.log"
    changed = {
        "SCOREKEEP_DATABASE_URL": postgres_url,
        "SCOREKEEP_REDIS_URL": redis_url,
        "SCOREKEEP_BLOB_URL": s3_url,
        "SCOREKEEP_CONFIG": str(config),
        "SCOREKEEP_WEBHOOK_ALLOW_HTTP": "1",
        "SCOREKEEP_WEBHOOK_ALLOWED_NETWORKS": "127.0.0.0/8",
    }
    api = changed | {"SCOREKEEP_HOST": "127.0.0.1", "SCOREKEEP_PORT": str(port)}

    async with AsyncExitStack() as stack, receiving() as receiver:
        migrate = await stack.enter_async_context(_running(services["migrate"], changed, log))
        assert await migrate.wait() == 0, log.read_text()
        started = [
            await stack.enter_async_context(_running(services[name], settings, log))
            for name, settings in (("api", api), ("worker", changed), ("deliveries", changed))
        ]
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await wait_until_ready(http, url)
        body = {"items": ["a", "b"], "webhook": receiver.url, "return_pooled_hidden_states": True}
        async with http.post(f"{url}/v1/jobs", json=body, headers={"Prefer": "wait=30"}) as r:
            job = await r.json()
        async with http.get(f"{url}/v1/jobs/{job['id']}/scores") as r:
            scores = await r.json()
        await receiver.wait_for(1)
        blobs = [blob.key async for blob in BlobStore.open(s3_url).list("")]
        for process in started:
            process.terminate()
        codes = [await asyncio.wait_for(process.wait(), 30) for process in started]

    assert job["state"] == "succeeded", log.read_text()
    assert len(scores["scores"]) == 2
    assert len(blobs) == 1
    assert codes == [0, 0, 0], log.read_text()
