"""The database engine and ``transaction()``: the only thing that commits.

Also the only place for the database's clock, and for the translation of driver errors.
"""

import asyncio
import contextlib
import math
import re
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal
from weakref import WeakKeyDictionary

import asyncpg  # type: ignore[import-untyped]
from sqlalchemy import event, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from contract.errors import StoreUnavailableError
from storage.cancelling import kept_cancellation

__all__ = ["Database", "Transaction", "database_now"]

#: What a function of this package gets: a connection with a transaction open on it.
Transaction = AsyncConnection

_BUSY_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 5.0
#: How long a pooled connection may take to say that it lives, before it is used.
_PING_TIMEOUT_S = 2.0
#: For so long after its answer it is taken for alive, unless its end was seen meanwhile: a ping at
#: every use was a tenth of the client's and a quarter of the server's time in a short transaction.
_PING_EVERY_S = 1.0
#: When a connection is noticed that went silent in the middle of a command; by the kernel, if the
#: other side does not even acknowledge.
_COMMAND_TIMEOUT_S = 5.0
_TCP = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 5000}
_POOL_SIZE = 8
_POOL_OVERFLOW = 8
_BEGIN_ATTEMPTS = 5
_WRITES = "scorekeep_writes"
#: SQLSTATEs after which the same transaction may succeed: serialisation, deadlock, lock timeout,
#: statement timeout, and the classes of lost connections, resources and operator intervention.
_TRANSIENT_STATES = ("40001", "40P01", "55P03", "57014")
_TRANSIENT_CLASSES = ("08", "53", "57P", "58")
#: The same of SQLite; an error in a statement is none of these.
_TRANSIENT_SQLITE_CODES = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    }
)

#: ``DETAIL: Failing row contains (…)`` of the server, ``$17: 2500040000 (…)`` of the driver.
_VALUES = re.compile(r"\nDETAIL: .*|(?<=\$)\d+: .*", re.DOTALL)

#: When a connection was last asked whether it lives, and said so.
_answered_at: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

_NOW = {
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
    "postgresql": "(extract(epoch FROM statement_timestamp())::float8)",
}


def database_now(dialect: str) -> str:
    """Return the SQL for the database's clock in epoch seconds: the only clock of leases."""
    return _NOW[dialect]


class Database:
    """One engine on one event loop; another loop needs a ``Database`` of its own.

    On SQLite the writers of one process take turns on a lock, so that they never fight; writers
    of other processes are waited for.
    """

    def __init__(self, url: str, *, command_timeout_s: float = _COMMAND_TIMEOUT_S) -> None:
        self.dialect: Literal["sqlite", "postgresql"] = (
            "sqlite" if url.startswith("sqlite") else "postgresql"
        )
        if self.dialect == "sqlite":
            self._engine = _open_sqlite(url)
        else:
            self._engine = _open_postgresql(url, command_timeout_s)
        # Several reads of one snapshot must agree; SQLite's always do.
        isolation = {} if self.dialect == "sqlite" else {"isolation_level": "REPEATABLE READ"}
        self._reader = self._engine.execution_options(**{_WRITES: False}, **isolation)
        self._writer_turn: contextlib.AbstractAsyncContextManager[Any] = (
            asyncio.Lock() if self.dialect == "sqlite" else contextlib.nullcontext()
        )

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Open a transaction that may write; commit at the end, roll back on any exception.

        Raises ``StoreUnavailableError`` where the database cannot be reached, is locked or gave
        up. After such an error from the commit itself the outcome is unknown: read again.
        """
        async with self._writer_turn, self._connect(self._engine) as connection:
            with _translated():
                async with connection.begin():
                    yield connection

    @contextlib.asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Transaction]:
        """Open a transaction that only reads; on SQLite it does not wait for writers."""
        async with self._connect(self._reader) as connection:
            with _translated():
                async with connection.begin():
                    yield connection

    async def check(self) -> None:
        """Raise ``StoreUnavailableError`` unless the database answers."""
        async with self.snapshot() as tx:
            await tx.execute(text("SELECT 1"))

    async def close(self) -> None:
        """Close every connection."""
        await self._engine.dispose()

    @contextlib.asynccontextmanager
    async def _connect(self, engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        """Take a connection; only here is a plain ``OSError`` certainly the database's."""
        try:
            connection = await self._check_out(engine)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise _unavailable(error) from error
        except (DBAPIError, PoolTimeoutError) as error:
            raise _unavailable(error) from error
        try:
            yield connection
        finally:
            # A cancelled caller must still give its connection back.
            await asyncio.shield(connection.close())

    async def _check_out(self, engine: AsyncEngine) -> AsyncConnection:
        connection = None
        try:
            with kept_cancellation():
                connection = await engine.connect()
        except asyncio.CancelledError:
            if connection is not None:
                await connection.close()
            raise
        return connection


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (DBAPIError, TimeoutError) as error:
        _hide_values(error)
        if _is_transient(error):
            raise _unavailable(error) from error
        raise


def _hide_values(error: BaseException | None) -> None:
    """Drop the values that PostgreSQL and its driver quote: rows hold requests and secrets."""
    while error is not None:
        error.args = tuple(
            _VALUES.sub("", text) if isinstance(text, str) else text for text in error.args
        )
        if isinstance(error, asyncpg.PostgresError):
            error.detail = None
        error = error.__cause__


def _is_transient(error: Exception) -> bool:
    if not isinstance(error, DBAPIError):
        return True
    if error.connection_invalidated:
        return True
    state = str(getattr(error.orig, "sqlstate", None) or "")
    if state:
        return state in _TRANSIENT_STATES or state.startswith(_TRANSIENT_CLASSES)
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _TRANSIENT_SQLITE_CODES
    return isinstance(error, OperationalError | InterfaceError | InternalError)


def _unavailable(error: Exception) -> StoreUnavailableError:
    message = f"the database does not answer: {type(error).__name__}"
    return StoreUnavailableError(message, retry_after_s=2.0)


def _open_postgresql(url: str, command_timeout_s: float) -> AsyncEngine:
    engine = create_async_engine(
        url,
        hide_parameters=True,  # they are requests and secrets, and errors are logged
        pool_size=_POOL_SIZE,
        max_overflow=_POOL_OVERFLOW,
        pool_timeout=_CONNECT_TIMEOUT_S,
        pool_pre_ping=True,  # 0.1 ms; without it the first call after a restart fails
        connect_args={
            "timeout": _CONNECT_TIMEOUT_S,
            "command_timeout": command_timeout_s,
            "server_settings": {
                "application_name": "scorekeep",
                "idle_in_transaction_session_timeout": "60000",
                "lock_timeout": "4000",
                "jit": "off",  # compiling the claim takes longer than running it
                # So soon the server lets go of the locks of a client that vanished.
                "tcp_keepalives_idle": "3",
                "tcp_keepalives_interval": "1",
                "tcp_keepalives_count": "3",
                "tcp_user_timeout": "5000",
            },
        },
    )
    event.listen(engine.sync_engine, "handle_error", _give_up_silent)
    event.listen(engine.sync_engine, "connect", _watch_peer)
    engine.sync_engine.dialect.do_ping = _ping  # type: ignore[assignment, method-assign]  # it knows no timeout
    return engine


def _ping(connection: Any) -> bool:  # noqa: ANN401  # SQLAlchemy's
    """Tell whether a pooled connection lives; false makes the pool replace all that are as old."""
    driver = connection.driver_connection
    asked_at = time.monotonic()
    if asked_at - _answered_at.get(driver, -math.inf) < _PING_EVERY_S and not driver.is_closed():
        return True
    try:
        await_only(driver.execute("SELECT 1", timeout=_PING_TIMEOUT_S))
    except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        driver.terminate()  # a half-open one would not answer its farewell either
        return False
    _answered_at[driver] = asked_at
    return True


def _watch_peer(connection: Any, _record: Any) -> None:  # noqa: ANN401  # SQLAlchemy's event
    """Have the kernel end a connection whose other side has vanished."""
    peer = connection.driver_connection._transport.get_extra_info("socket")  # noqa: SLF001
    if peer.family == socket.AF_UNIX:
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP.items():
        if hasattr(socket, name):  # macOS has not all of them
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _give_up_silent(context: ExceptionContext) -> None:
    """Take a command that timed out for a dead connection, and its neighbours with it."""
    if isinstance(context.original_exception, TimeoutError):
        context.is_disconnect = True


def _open_sqlite(url: str) -> AsyncEngine:
    engine = create_async_engine(
        url,
        hide_parameters=True,  # they are requests and secrets, and errors are logged
        pool_size=_POOL_SIZE,
        max_overflow=_POOL_OVERFLOW,
        pool_timeout=_CONNECT_TIMEOUT_S,
        connect_args={"timeout": _BUSY_TIMEOUT_S},
    )
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    event.listen(engine.sync_engine, "invalidate", _roll_back_given_up)
    return engine


def _roll_back_given_up(connection: Any, _record: Any, _error: Any) -> None:  # noqa: ANN401  # SQLAlchemy's event
    """Roll back what a cancelled caller left open, before its connection is closed.

    Closing alone does not: SQLite keeps a closed connection, and its lock, as long as a statement
    is not at its end, which here is until the garbage collector finds the cursor. Only queued, so
    that a second cancellation cannot come between.
    """
    driver = connection.driver_connection
    if (opened := driver._connection) is not None:  # noqa: SLF001  # what it offers must be awaited
        driver._tx.put_nowait((None, opened.rollback))  # noqa: SLF001


def _prepare_sqlite(connection: Any, _record: Any) -> None:  # noqa: ANN401  # SQLAlchemy's event
    connection.isolation_level = None  # the driver would begin late, and not immediately
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Any) -> None:  # noqa: ANN401  # SQLAlchemy's event
    writes = connection.get_execution_options().get(_WRITES, True)
    for attempt in range(_BEGIN_ATTEMPTS):
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
        except OperationalError as error:
            # The busy timeout has no queue: a writer can be overtaken until it runs out.
            if not _is_busy(error) or attempt == _BEGIN_ATTEMPTS - 1:
                raise
        else:
            return


def _is_busy(error: OperationalError) -> bool:
    code = getattr(error.orig, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
