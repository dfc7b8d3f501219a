"""Hints through Redis: *there is work*, and *a job ended*. The only place that knows Redis and arq.

Each model has an arq queue of its own, so that a worker hears only of what it can do.
Redis never knows what the work is or how it ended. A hint that is lost, late or doubled is
harmless, so nothing here raises when Redis is away.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

import msgspec
from arq.connections import ArqRedis
from arq.constants import (
    default_queue_name,
    in_progress_key_prefix,
    job_key_prefix,
    retry_key_prefix,
)
from arq.jobs import serialize_job
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as ClosedError
from redis.exceptions import RedisError

from contract.errors import UnavailableError
from storage.cancelling import kept_cancellation
from storage.statements import parse_hint, parse_hinted_model

__all__ = ["FUNCTION", "Queue"]

#: The name of the arq function that workers register.
FUNCTION = "score"

_logger = logging.getLogger(__name__)
_FINISHED = "scorekeep:finished"
_HINTED = "scorekeep:hinted:"
_HINT_TIMEOUT_S = 0.5
_HINTS_PER_PIPELINE = 500
_HINT_KEPT_MS = 3_600_000
_CONNECT_TIMEOUT_S = 2.0
_SOCKET_TIMEOUT_S = 2.0
_LISTEN_BEAT_S = 1.5
_RECONNECT_S = (0.05, 0.1, 0.25, 0.5, 1.0)
_FAILURES = (RedisError, OSError, TimeoutError)
_serialize = msgspec.msgpack.Encoder(enc_hook=repr).encode
_deserialize: Callable[[bytes], Any] = msgspec.msgpack.Decoder().decode
_ids = msgspec.json.Decoder(list[str])


class _ArqPool(ArqRedis):
    """arq closes its pool by a name that redis-py has since deprecated."""

    async def close(self, close_connection_pool: bool | None = None) -> None:  # noqa: FBT001
        await self.aclose(close_connection_pool)


class _Sending(AbstractConnection):
    """A connection whose sending does not swallow the cancellation of its task."""

    async def send_packed_command(
        self,
        command: bytes | str | Iterable[bytes],
        check_health: bool = True,  # noqa: FBT001, FBT002  # redis-py's
    ) -> None:
        """See redis-py. What was sent has no reader then, so the connection is closed."""
        try:
            with kept_cancellation():
                await super().send_packed_command(command, check_health)
        except asyncio.CancelledError:
            await self.disconnect(nowait=True)
            raise


class _Pool(ConnectionPool):
    """Opens nothing more once it is closed, which redis-py calls to disconnect it.

    Else a command that is late would leave a connection behind that nobody closes.
    """

    _closed = False

    def make_connection(self) -> AbstractConnection:
        """Make one, over TCP, TLS or a Unix socket, that ends when its task is cancelled."""
        kind = type("SendingConnection", (_Sending, self.connection_class), {})
        made: AbstractConnection = kind(**self.connection_kwargs)
        return made

    async def ensure_connection(self, connection: AbstractConnection) -> None:
        """Raise redis-py's ``ConnectionError`` if the pool was closed, before or meanwhile."""
        if not self._closed:
            await super().ensure_connection(connection)
        if self._closed:
            await connection.disconnect(nowait=True)
            message = "the connections to Redis were closed"
            raise ClosedError(message)

    async def disconnect(self, inuse_connections: bool = True) -> None:  # noqa: FBT001, FBT002
        """Close every connection, for good."""
        self._closed = True
        await super().disconnect(inuse_connections)


class Queue:
    """One Redis, used from one event loop."""

    def __init__(self, redis_url: str) -> None:
        self._url = redis_url
        self._redis: Redis = Redis(connection_pool=self._open_pool(_SOCKET_TIMEOUT_S))
        self._is_down = False

    async def hint(self, hints: Sequence[str]) -> bool:
        """Tell the workers of their models that these jobs (``JobRow.hint``) wait.

        Takes at most half a second and never raises for Redis; false if it may not have arrived.
        A hint may be repeated at will: it is written whole every time.
        """
        if not hints:
            return True
        try:
            async with asyncio.timeout(_HINT_TIMEOUT_S):
                for start in range(0, len(hints), _HINTS_PER_PIPELINE):
                    await self._send(hints[start : start + _HINTS_PER_PIPELINE])
        except _FAILURES as error:
            self._note_failure(error)
            return False
        self._note_success()
        return True

    async def forget(self, hints: Sequence[str]) -> None:
        """Remove what arq keeps of the attempts before ``hints``, whose worker died."""
        names: dict[str, list[str]] = {}
        for hint in hints:
            claim = parse_hint(hint)
            queue = _name_queue(parse_hinted_model(hint))
            names.setdefault(queue, []).append(f"{claim.id}:{claim.attempt - 1}")
        if not names:
            return
        prefixes = (job_key_prefix, in_progress_key_prefix, retry_key_prefix)
        try:
            async with asyncio.timeout(_HINT_TIMEOUT_S), self._redis.pipeline() as pipe:
                for queue, some in names.items():
                    pipe.delete(*(prefix + name for name in some for prefix in prefixes))
                    pipe.zrem(queue, *some)
                await pipe.execute()
        except _FAILURES as error:
            self._note_failure(error)

    async def publish_finished(self, ids: Sequence[str]) -> bool:
        """Wake whoever waits for these jobs; false if Redis is away: waiters poll as well."""
        if not ids:
            return True
        try:
            async with asyncio.timeout(_HINT_TIMEOUT_S):
                await self._redis.publish(_FINISHED, msgspec.json.encode(list(ids)))
        except _FAILURES as error:
            self._note_failure(error)
            return False
        self._note_success()
        return True

    async def finished(self) -> AsyncGenerator[str, None]:
        """Yield ids of jobs as they end, for ever; reconnects, and then may have missed some."""
        async with contextlib.aclosing(self._hear(_FINISHED)) as heard:
            async for data in heard:
                with contextlib.suppress(msgspec.DecodeError):  # somebody else's
                    for job_id in _ids.decode(data):
                        yield job_id

    async def hinted(self, model: str) -> AsyncGenerator[None, None]:
        """Yield when ``model``'s jobs were hinted, for ever; may miss some, as ``finished`` may."""
        async with contextlib.aclosing(self._hear(_HINTED + model)) as heard:
            async for _ in heard:
                yield

    async def _hear(self, channel: str) -> AsyncGenerator[bytes, None]:
        failures = 0
        while True:
            try:
                async with contextlib.aclosing(self._listen(channel)) as heard:
                    async for data in heard:
                        failures = 0
                        yield data
            except _FAILURES as error:
                self._note_failure(error)
            await asyncio.sleep(_RECONNECT_S[min(failures, len(_RECONNECT_S) - 1)])
            failures += 1

    def arq_pool(self) -> ArqRedis:
        """Return a pool of its own for one ``arq.Worker``, which closes it."""
        return _ArqPool(
            self._open_pool(_SOCKET_TIMEOUT_S),
            job_serializer=_serialize,
            job_deserializer=_deserialize,
        )

    def worker_options(self, model: str, *, job_timeout_s: float = 60.0) -> dict[str, Any]:
        """Return what ``arq.Worker`` needs to hear of ``model``'s jobs, beside its functions.

        Each call opens a new pool.

        The reasons, measured, are in shared/design/durability.md §2: short polls, a job timeout
        that frees the hints of dead workers, no results, tries without end.
        """
        return {
            "queue_name": _name_queue(model),
            "redis_pool": self.arq_pool(),
            "job_serializer": _serialize,
            "job_deserializer": _deserialize,
            "poll_delay": 0.01,
            "queue_read_limit": 1000,
            "max_jobs": 16,
            "max_tries": 1_000_000,
            "keep_result": 0,
            "job_timeout": job_timeout_s,
            "job_completion_wait": int(job_timeout_s) + 1,
            "health_check_interval": 60,
            "handle_signals": False,
            "log_results": False,
        }

    async def check(self) -> None:
        """Raise ``UnavailableError`` unless Redis answers."""
        try:
            async with asyncio.timeout(_HINT_TIMEOUT_S * 2):
                await self._redis.ping()
        except _FAILURES as error:
            message = f"Redis does not answer: {type(error).__name__}"
            raise UnavailableError(message, retry_after_s=2.0) from error

    async def close(self) -> None:
        """Close every connection."""
        await self._redis.aclose(close_connection_pool=True)

    async def _send(self, hints: Sequence[str]) -> None:
        now_ms = int(time.time() * 1000)
        async with self._redis.pipeline(transaction=False) as pipe:
            scores: dict[str, dict[str, float]] = {}
            models = {parse_hinted_model(hint) for hint in hints}
            for hint in hints:
                claim = parse_hint(hint)
                name = f"{claim.id}:{claim.attempt}"
                payload = serialize_job(
                    FUNCTION, (claim.id,), {}, None, now_ms, serializer=_serialize
                )
                # Not NX: where the set was lost and the key kept, the hint must still arrive.
                pipe.set(job_key_prefix + name, payload, px=_HINT_KEPT_MS)
                scores.setdefault(_name_queue(parse_hinted_model(hint)), {})[name] = now_ms
            for queue, some in scores.items():
                pipe.zadd(queue, some)
                pipe.pexpire(queue, _HINT_KEPT_MS)  # a model that nobody serves leaves nothing
            for model in models:
                pipe.publish(_HINTED + model, b"")
            await pipe.execute()

    async def _listen(self, channel: str) -> AsyncGenerator[bytes, None]:
        pubsub = self._redis.pubsub(ignore_subscribe_messages=True)
        try:
            await pubsub.subscribe(channel)
            heard_at = time.monotonic()
            while True:
                message = await pubsub.get_message(timeout=_LISTEN_BEAT_S)
                if message is not None and message["type"] == "message":
                    yield message["data"]
                if message is not None:
                    heard_at = time.monotonic()
                elif time.monotonic() - heard_at > 2 * _LISTEN_BEAT_S:
                    error = "a half-open connection"
                    raise TimeoutError(error)
                else:
                    await pubsub.ping()
                self._note_success()
        finally:
            await pubsub.aclose()  # type: ignore[no-untyped-call]

    def _open_pool(self, socket_timeout_s: float) -> ConnectionPool:
        return _Pool.from_url(
            self._url,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            health_check_interval=15,
            retry=Retry(ExponentialBackoff(cap=0.1, base=0.02), 2),
            **self._keepalive(),
        )

    def _keepalive(self) -> dict[str, Any]:
        if self._url.startswith("unix"):
            return {}
        options = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
        return {"socket_keepalive": True, "socket_keepalive_options": options}

    def _note_failure(self, error: BaseException) -> None:
        if not self._is_down:
            self._is_down = True
            _logger.warning(
                "Redis is away, workers sweep the database", extra={"error": type(error).__name__}
            )

    def _note_success(self) -> None:
        if self._is_down:
            self._is_down = False
            _logger.info("Redis is back")


def _name_queue(model: str) -> str:
    return f"{default_queue_name}:{model}"
