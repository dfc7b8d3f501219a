"""What outlives this process, opened once and handed to every part that needs it."""

from dataclasses import dataclass

from contract.config import Settings
from storage.blobs import BlobStore
from storage.database import Database
from storage.queue import Queue

__all__ = ["Stores", "open_stores"]


@dataclass(frozen=True, slots=True)
class Stores:
    """Rows, bytes and hints. Belongs to one event loop."""

    database: Database
    blobs: BlobStore
    queue: Queue

    async def close(self) -> None:
        """Close every connection."""
        await self.queue.close()
        await self.database.close()


def open_stores(settings: Settings) -> Stores:
    """Open what ``settings`` name; nothing is connected before it is used."""
    return Stores(
        Database(settings.database, command_timeout_s=settings.database_timeout_s),
        BlobStore.open(settings.blobs),
        Queue(settings.redis_url),
    )
