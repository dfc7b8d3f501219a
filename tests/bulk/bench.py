"""A client's view of bulks in tests: upload, start, wait, read; and workers started at will."""

import asyncio
import io
import json
from collections.abc import Sequence
from typing import Any

import aiohttp

from api.bulk.access import BULKS
from contract.models import ModelConfig
from storage.bulks import get_bulk
from tests.api.service import Service
from worker.engine.deterministic import SOURCE, DeterministicScorer
from worker.engine.encoding import encode
from worker.loading import Engine
from worker.main import Worker

MODELS = {
    "tiny": ModelConfig(source=SOURCE),
    "other": ModelConfig(source=SOURCE),
    "short": ModelConfig(source=SOURCE, max_tokens=8),
}
ENDED = {"completed", "failed", "cancelled", "expired"}


class Bulks:
    """The service's bulks, and its workers."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._workers: list[tuple[Worker, asyncio.Task[int]]] = []

    async def start_worker(self, **models: ModelConfig) -> None:
        """Serve the models, and return when the API knows them."""
        configs = models or MODELS
        engine = Engine(lambda name, _: DeterministicScorer(name, configs[name]), encode)
        worker = Worker(self.service.settings, configs, engine)
        self._workers.append((worker, asyncio.create_task(worker.run())))
        async with asyncio.timeout(20):
            while True:
                known = (await self.service.get("/v1/models")).json["data"]
                ready = {model["id"] for model in known if model["state"] == "ready"}
                if set(configs) <= ready:
                    return
                await asyncio.sleep(0.02)

    async def wait_until_unserved(self) -> None:
        """Return when the API knows that the workers are gone: it looks once a second."""
        async with asyncio.timeout(20):
            ready = True
            while ready:
                await asyncio.sleep(0.02)
                known = (await self.service.get("/v1/models")).json["data"]
                ready = any(model["state"] == "ready" for model in known)

    async def stop_workers(self) -> None:
        """Drain the workers."""
        for worker, task in self._workers:
            worker.stop()
            async with asyncio.timeout(20):
                await task
        self._workers.clear()

    async def upload(self, data: bytes, filename: str = "in.jsonl") -> str:
        """Upload a file and return its id."""
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", io.BytesIO(data), filename=filename)
        answer = await self.service.request("POST", "/v1/files", data=form)
        assert answer.status == 200, answer.body
        return str(answer.json["id"])

    async def start(self, lines: Sequence[dict[str, Any]] | bytes, **fields: Any) -> str:
        """Start a bulk on these lines and return its id."""
        data = lines if isinstance(lines, bytes) else render(lines)
        file_id = await self.upload(data)
        body = {"model": "tiny", "input_file_id": file_id, **fields}
        answer = await self.service.post("/v1/bulks", body)
        assert answer.status == 202, answer.body
        return str(answer.json["id"])

    async def rescore(self, bulk: str | None = None, **fields: Any) -> dict[str, Any]:
        """Score a bulk, or another source, again and return the bulk at its end."""
        body = fields if bulk is None else {"source": {"bulk": bulk}, **fields}
        answer = await self.service.post("/v1/rescore", body)
        assert answer.status == 202, answer.body
        return await self.wait(str(answer.json["id"]))

    async def run(self, lines: Sequence[dict[str, Any]] | bytes, **fields: Any) -> dict[str, Any]:
        """Start a bulk and return it at its end."""
        return await self.wait(await self.start(lines, **fields))

    async def get(self, bulk_id: str) -> dict[str, Any]:
        """Return the bulk."""
        return dict((await self.service.get(f"/v1/bulks/{bulk_id}")).json)

    async def wait(self, bulk_id: str, *states: str) -> dict[str, Any]:
        """Return the bulk when it is in one of ``states``: ended, by default."""
        async with asyncio.timeout(25):
            while True:
                bulk = await self.get(bulk_id)
                if bulk["state"] in (states or ENDED):
                    return bulk
                await asyncio.sleep(0.02)

    async def wait_until_indexed(self, bulk_id: str, tenant: str = "default") -> None:
        """Return when the cache knows a bulk that has ended."""
        indexed = False
        while not indexed:
            await self.service.app[BULKS].read_once()
            async with self.service.database.snapshot() as tx:
                row = await get_bulk(tx, tenant, bulk_id)
            indexed = row.indexed_lines == row.ingested_lines

    async def results(self, bulk_id: str, after: int = 0) -> list[dict[str, Any]]:
        """Return the results that there are."""
        answer = await self.service.get(f"/v1/bulks/{bulk_id}/results", params={"after": after})
        assert answer.status == 200, answer.body
        return [json.loads(line) for line in answer.body.splitlines()]


def render(lines: Sequence[dict[str, Any]]) -> bytes:
    """Render JSONL."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def rows(count: int) -> list[dict[str, Any]]:
    """Return lines of one item each."""
    return [{"custom_id": f"row-{n}", "item": f"text {n}"} for n in range(count)]


def batch_line(custom_id: str, url: str = "/v1/score", **body: Any) -> dict[str, Any]:
    """Return a line as OpenAI's batches have them."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
