"""Who asks, and what they may do: the only place that reads keys.

Everything needs a key but what is listed here. Where keys are off there is one tenant, and the web
page of somebody else is kept from using the browser's way to a service on loopback.
"""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web

from api.shared_reads import SharedReads
from contract.config import Settings, is_loopback
from contract.errors import ForbiddenError, StoreUnavailableError, UnauthorizedError
from contract.keys import Scope, hash_key, is_same_hash, parse_prefix
from storage import keys
from storage.database import Database
from storage.tenancy import acting_as

__all__ = [
    "IDENTITY",
    "KEYRING",
    "OPEN_PATHS",
    "Identity",
    "Keyring",
    "auth_middleware",
    "check_again",
    "scope_of",
]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: What needs no key: liveness, readiness (its details do), and what is the same for everybody.
OPEN_PATHS = frozenset({"/", "/docs", "/favicon.ico", "/healthz", "/openapi.json", "/readyz"})
_OPEN_PREFIXES = ("/dashboard/", "/docs/")
#: What is about the installation, not about a tenant.
_ADMIN_PATHS = frozenset({"/metrics", "/v1/overview", "/v1/overview/events", "/v1/workers"})
#: Looking at these is as good as forging webhooks.
_SECRET_PREFIX = "/v1/webhooks/default/"  # noqa: S105  # a path
_DEFAULT_TENANT = "default"
_KEPT_KEYS = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose request this is. ``key_id`` None: keys are off, or the path needs none."""

    tenant: str
    scopes: frozenset[Scope]
    key_id: str | None = None


IDENTITY = web.RequestKey("identity", Identity)
_NOBODY = Identity("", frozenset())
_EVERYBODY = Identity(_DEFAULT_TENANT, frozenset(Scope))


class Keyring:
    """The keys as last read; a revoked one is refused within ``kept_s``. Belongs to the loop.

    When a key was used last is written by ``write_uses``, never by a request.
    """

    def __init__(self, database: Database, *, kept_s: float = 1.0) -> None:
        self._database = database
        self._kept_s = kept_s
        self._reads = SharedReads(database)
        self._known: OrderedDict[str, tuple[Identity, float]] = OrderedDict()
        self._used_at: dict[str, float] = {}

    async def identify(self, key: str) -> Identity:
        """Return whose key this is. Raises ``UnauthorizedError`` for one that is not valid."""
        digest, now = hash_key(key), time.monotonic()
        known = self._known.get(digest)
        if known is None or known[1] <= now:
            known = await self._look_up(key, digest, now)
        identity = known[0]
        if identity.key_id is not None:
            self._used_at[identity.key_id] = now
        return identity

    async def write_uses(self) -> int:
        """Record when keys were used since the last time; return how many."""
        used, self._used_at = self._used_at, {}
        if used:
            now = time.monotonic()
            ages_s = {key_id: now - used_at for key_id, used_at in used.items()}
            try:
                async with self._database.transaction() as tx:
                    await keys.mark_used(tx, ages_s)
            except BaseException:
                self._used_at = used | self._used_at
                raise
        return len(used)

    async def close(self) -> None:
        """Let the looks at keys that are under way come to their end."""
        await self._reads.close()

    async def _look_up(self, key: str, digest: str, now: float) -> tuple[Identity, float]:
        self._known.pop(digest, None)
        prefix = parse_prefix(key)
        row = None
        if prefix is not None:  # anything else is not worth a look into the database
            row = await self._reads.read(prefix, lambda tx: keys.find_key(tx, prefix))
        if row is None or not is_same_hash(row.hash, digest) or not row.is_valid:
            message = "the key is not valid: unknown, revoked or expired"
            raise UnauthorizedError(message, param="Authorization")
        kept_s = self._kept_s if row.left_s is None else min(self._kept_s, row.left_s)
        known = Identity(row.tenant, frozenset(row.scopes), row.id), now + kept_s
        self._known[digest] = known
        while len(self._known) > _KEPT_KEYS:
            self._known.popitem(last=False)
        return known


KEYRING = web.AppKey("keyring", Keyring)


def scope_of(method: str, path: str) -> Scope | None:
    """Return what a key must be allowed for this request; None: it needs no key."""
    if path in OPEN_PATHS or path.startswith(_OPEN_PREFIXES):
        return None
    if path in _ADMIN_PATHS:
        return Scope.ADMIN
    if method in {"GET", "HEAD"} and not path.startswith(_SECRET_PREFIX):
        return Scope.READ
    return Scope.SUBMIT


def auth_middleware(settings: Settings) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the middleware that identifies a request and lets its handler act as the tenant."""

    @web.middleware
    async def authenticate(request: web.Request, handler: _Handler) -> web.StreamResponse:
        scope = scope_of(request.method, request.path)
        if settings.requires_keys:
            request[IDENTITY] = await _identify(request, scope)
        else:
            _check_origin(request, settings)
            request[IDENTITY] = _EVERYBODY
        with acting_as(request[IDENTITY].tenant):
            return await handler(request)

    return authenticate


async def check_again(request: web.Request) -> None:
    """Raise ``UnauthorizedError`` where the key of a request that lasts is not valid any more.

    A store that is away says nothing of keys.
    """
    if request[IDENTITY].key_id is not None:
        with contextlib.suppress(StoreUnavailableError):
            await _identify(request, scope_of(request.method, request.path))


async def _identify(request: web.Request, scope: Scope | None) -> Identity:
    given = request.headers.getall("Authorization", [])
    if scope is None and not given:
        return _NOBODY
    try:
        identity = await request.app[KEYRING].identify(_parse_bearer(given))
    except UnauthorizedError:
        if scope is None:
            return _NOBODY
        raise
    if scope is not None and scope not in identity.scopes:
        message = f"the key lacks the scope {scope}; it has {', '.join(sorted(identity.scopes))}"
        raise ForbiddenError(message, param="Authorization")
    return identity


def _parse_bearer(given: list[str]) -> str:
    if not given:
        message = "send a key: Authorization: Bearer sk_…"
        raise UnauthorizedError(message, param="Authorization")
    scheme, _, key = given[0].partition(" ")
    if len(given) > 1 or scheme.lower() != "bearer":
        message = "Authorization must be one header: Bearer and the key"
        raise UnauthorizedError(message, param="Authorization")
    return key.strip()


def _check_origin(request: web.Request, settings: Settings) -> None:
    """Refuse what a browser sends for another site, while nothing but loopback protects us.

    Its ``Origin`` is then not ours; a name that was rebound to loopback is not ours either. Who
    says ``SCOREKEEP_AUTH=off`` has something else in front.
    """
    if settings.auth == "off":
        return
    host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
    public = urlsplit(settings.public_url).netloc
    if host and host != public and not is_loopback(_strip_port(host)):
        message = f"the Host {host[:100]!r} is not this service on loopback"
        raise ForbiddenError(message, param="Host")
    if origin is not None and urlsplit(origin).netloc not in {host, public} - {""}:
        message = f"the Origin {origin[:100]!r} is another site"
        raise ForbiddenError(message, param="Origin")


def _strip_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[")
    return host.partition(":")[0].lower()
