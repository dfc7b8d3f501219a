"""What the application holds, under typed keys: the only place that names them."""

from aiohttp import web

from api.auth import IDENTITY
from api.catalog import Catalog
from api.shared_reads import SharedReads
from api.submitter import Submitter
from api.tensor_files import DigestCache
from api.waiting import Waiters
from contract.config import Settings
from storage.blobs import BlobStore
from storage.database import Database
from storage.queue import Queue

__all__ = [
    "BLOBS",
    "CATALOG",
    "DATABASE",
    "DIGESTS",
    "DOCUMENT",
    "QUEUE",
    "READS",
    "SETTINGS",
    "SUBMITTER",
    "WAITERS",
    "tenant_of",
]

SETTINGS = web.AppKey("settings", Settings)
#: The OpenAPI document, as JSON.
DOCUMENT = web.AppKey("document", bytes)
DATABASE = web.AppKey("database", Database)
BLOBS = web.AppKey("blobs", BlobStore)
DIGESTS = web.AppKey("digests", DigestCache)
QUEUE = web.AppKey("queue", Queue)
#: How jobs are looked at, by however many at once.
READS = web.AppKey("reads", SharedReads)
CATALOG = web.AppKey("catalog", Catalog)
SUBMITTER = web.AppKey("submitter", Submitter)
WAITERS = web.AppKey("waiters", Waiters)


def tenant_of(request: web.Request) -> str:
    """Return whose request this is. Every query is made in this name; there is no default."""
    return request[IDENTITY].tenant
