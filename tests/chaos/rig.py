"""An API and a worker in the test's own loop, on servers of their own that may be broken."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from contract.config import Settings
from storage.blobs import BlobStore
from storage.database import Database
from storage.queue import Queue
from tests.api.service import Service
from tests.chaos.proxy import Proxy
from tests.worker.harness import Bench, create_settings
from tests.worker.scorers import ArithmeticScorer

__all__ = ["Rig", "open_rig", "through"]


@dataclass
class Rig:
    """``scorer`` serves the model that ``service`` submits to."""

    settings: Settings
    service: Service
    bench: Bench
    scorer: ArithmeticScorer

    async def submit(self, count: int) -> list[str]:
        """Submit over HTTP; every answer is 202."""
        return list(await asyncio.gather(*(self.service.submit() for _ in range(count))))

    async def time_one(self) -> float:
        """Submit one job and return how long its end took."""
        started_at = time.monotonic()
        await self.bench.wait(await self.service.submit())
        return time.monotonic() - started_at


@contextlib.asynccontextmanager
async def open_rig(
    database_url: str, blob_url: str, redis_url: str, **changes: object
) -> AsyncIterator[Rig]:
    """Serve the API on these stores; the caller runs the worker."""
    settings = create_settings(database_url, blob_url, redis_url, **changes)
    bench = Bench(
        Database(settings.database),
        BlobStore.open(settings.blobs),
        Queue(settings.redis_url),
        settings,
    )
    service = Service(settings, bench.database)
    await service.start()
    try:
        yield Rig(settings, service, bench, ArithmeticScorer("tiny"))
    finally:
        await service.stop()
        await bench.queue.close()
        await bench.database.close()


def through(proxy: Proxy, url: str) -> str:
    """Return ``url`` with the proxy's port in the place of its own."""
    head, _, tail = url.rpartition(":")
    _, slash, path = tail.partition("/")
    return f"{head}:{proxy.port}{slash}{path}"
