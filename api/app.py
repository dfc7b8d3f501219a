"""The application put together: middleware, routes, and what lives as long as it does."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from importlib.metadata import PackageNotFoundError, version

import msgspec
from aiohttp import web

from api.auth import KEYRING, Keyring, auth_middleware
from api.bulk.access import BULKS
from api.bulk.inputs import BulkInput
from api.bulk.runner import BulkRunner
from api.catalog import Catalog
from api.connections import GuardedRunner
from api.limits import GATE, Gate, limits_middleware
from api.middleware import errors_middleware, prepare_headers, request_id_middleware
from api.observing import METRICS, RequestMetrics, observe_middleware
from api.openapi.document import build_document
from api.routes import (
    batches,
    bulk_events,
    bulks,
    compare,
    compatible,
    dashboard,
    deliveries,
    documentation,
    events,
    files,
    health,
    jobs,
    models,
    operations,
    overview,
    rescore,
    results,
    vectors,
    webhooks,
)
from api.shared_reads import SharedReads
from api.state import (
    BLOBS,
    CATALOG,
    DATABASE,
    DIGESTS,
    DOCUMENT,
    QUEUE,
    READS,
    SETTINGS,
    SUBMITTER,
    WAITERS,
)
from api.submitter import Submitter
from api.tensor_files import DigestCache
from api.waiting import Waiters
from contract.config import Settings
from contract.errors import StoreUnavailableError
from contract.models import ModelConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.queue import Queue

__all__ = ["create_app", "create_runner"]

_log = logging.getLogger(__name__)
#: Bulks whose inputs one process reads at a time, so that a small one need not wait for a huge one.
_BULK_READERS = 3
_RESTART_S = 1.0
_SHUTDOWN_S = 10.0
_CANCEL_AGAIN_S = 0.2
_IDLE_CONNECTION_S = 75.0
_KEEP_ALIVE_S = 15.0
_WRITE_USES_S = 30.0


def create_app(settings: Settings, registry: Mapping[str, ModelConfig]) -> web.Application:
    """Return the application. ``registry`` names models before any worker reports them.

    The database must be migrated. Connections open when the application starts.
    """
    app = web.Application(
        middlewares=[
            request_id_middleware,
            observe_middleware,
            errors_middleware,
            auth_middleware(settings),
            limits_middleware,
        ],
        client_max_size=settings.max_body_bytes,
    )
    app[SETTINGS] = settings
    app[METRICS] = RequestMetrics()
    app[events.KEEP_ALIVE_S] = _KEEP_ALIVE_S
    app.cleanup_ctx.append(_stores)
    app.cleanup_ctx.append(_services(registry))
    app.on_response_prepare.append(prepare_headers)
    app.on_shutdown.append(_let_waiters_go)
    ours = [jobs, results, events, compatible, models, health, webhooks, deliveries, operations]
    ours += [files, batches, bulks, rescore, compare, vectors, documentation, overview, dashboard]
    for resource in [*ours, bulk_events]:
        resource.add_routes(app)
    app[DOCUMENT] = msgspec.json.encode(
        build_document(app, version=_version(), server=settings.public_url)
    )
    return app


def _version() -> str:
    try:
        return version("scorekeep")
    except PackageNotFoundError:
        return "0"


def create_runner(app: web.Application, *, shutdown_s: float = _SHUTDOWN_S) -> web.AppRunner:
    """Return the server of ``app``. Bodies arrive as sent: ``bodies`` unpacks them."""
    return GuardedRunner(
        app,
        header_timeout_s=app[SETTINGS].header_timeout_s,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=_IDLE_CONNECTION_S,
        shutdown_timeout=shutdown_s,
    )


async def _stores(app: web.Application) -> AsyncIterator[None]:
    settings = app[SETTINGS]
    app[DATABASE] = Database(settings.database, command_timeout_s=settings.database_timeout_s)
    app[BLOBS] = BlobStore.open(settings.blobs)
    app[QUEUE] = Queue(settings.redis_url)
    app[READS] = SharedReads(app[DATABASE])
    yield
    await app[READS].close()
    await app[QUEUE].close()
    await app[DATABASE].close()


def _services(
    registry: Mapping[str, ModelConfig],
) -> Callable[[web.Application], AsyncIterator[None]]:
    async def services(app: web.Application) -> AsyncIterator[None]:
        app[CATALOG] = Catalog(app[DATABASE], registry, alive_within_s=app[SETTINGS].alive_within_s)
        app[DIGESTS] = DigestCache()
        app[WAITERS] = waiters = Waiters(app[DATABASE], app[QUEUE])
        app[GATE] = gate = Gate(app[DATABASE], app[SETTINGS])
        app[SUBMITTER] = submitter = Submitter(app[DATABASE], app[QUEUE], gate)
        given = BulkInput(app[DATABASE], app[BLOBS], app[SETTINGS])
        app[BULKS] = runner = BulkRunner(given, app[CATALOG], app[QUEUE])
        services = [submitter.run, submitter.hint, waiters.listen, waiters.poll]
        services += [runner.read] * _BULK_READERS + [runner.sweep]
        app[KEYRING] = Keyring(app[DATABASE])
        services += [gate.run, _write_uses_of(app[KEYRING])]
        tasks = [asyncio.create_task(_keep_running(service)) for service in services]
        yield
        await _cancel(tasks)
        with contextlib.suppress(StoreUnavailableError):  # last use is only about right
            await app[KEYRING].write_uses()
        await app[KEYRING].close()

    return services


def _write_uses_of(keyring: Keyring) -> Callable[[], Coroutine[None, None, None]]:
    async def write_uses() -> None:
        while True:
            await asyncio.sleep(_WRITE_USES_S)
            try:
                await keyring.write_uses()
            except StoreUnavailableError as error:  # they are kept for the next time
                _log.warning("uses of keys wait", extra={"reason": error.message})

    return write_uses


async def _keep_running(service: Callable[[], Awaitable[None]]) -> None:
    """Run a service for ever: one that ends by an error is logged and started again."""
    while True:
        try:
            await service()
        except Exception:  # noqa: BLE001  # the edge of a service, which starts again
            _log.exception(
                "a service ended",
                extra={"action": "service_ended", "service": service.__qualname__},
            )
        await asyncio.sleep(_RESTART_S)


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    """End the tasks. A cancel that arrives inside redis-py may be lost there: it is repeated."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)


async def _let_waiters_go(app: web.Application) -> None:
    app[WAITERS].stop()
