"""PostgreSQL and Redis that can be killed and started again at the same address."""

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests import services
from tests.services import Postgres, free_port

__all__ = ["PostgresServer", "RedisServer", "run_postgres", "run_redis"]


class _Server:
    """One command, run again and again. ``kill`` and ``start`` may be called from a thread."""

    def __init__(self, command: list[str], folder: Path, **options: Any) -> None:
        self._command = command
        self._folder = folder
        self._options = options
        self._running = ExitStack()

    def start(self) -> None:
        """Start, and return when it answers."""
        self._process = self._running.enter_context(
            services._run(self._command, folder=self._folder, **self._options)
        )
        services._wait_for(self.is_up, self._process, self._folder)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal and wait for the end."""
        self._process.send_signal(number)
        self._process.wait(20)

    @property
    def pid(self) -> int:
        """The process id of the last start."""
        return self._process.pid

    def stop(self) -> None:
        """Stop it if it runs."""
        self._running.close()

    async def restart(self, number: int = signal.SIGKILL) -> None:
        """Kill, and start again."""
        await asyncio.to_thread(self.kill, number)
        await asyncio.to_thread(self.start)

    def is_up(self) -> bool:
        """Whether it answers."""
        raise NotImplementedError


class RedisServer(_Server):
    """A Redis without persistence: it comes back empty."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        command = [services._redis_binary(), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(folder), "--save", "", "--appendonly", "no", *arguments]
        super().__init__(command, folder)

    def is_up(self) -> bool:
        """Whether it answers."""
        return services._ping_redis(self.url)


class PostgresServer(_Server):
    """A PostgreSQL; SIGQUIT is its immediate shutdown."""

    def __init__(self, base: Path, **settings: str) -> None:
        self.port = free_port()
        self._base = base
        user = services._unprivileged_user(base)
        binaries = services._postgres_binaries(base)
        command = [str(binaries / "initdb"), "-D", str(base / "data"), "-U", "postgres"]
        command += ["-A", "trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        services._check_output(command, folder=base, user=user)
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(base),
            "max_connections": "200",
            "shared_buffers": "64MB",
        } | settings
        command = [str(binaries / "postgres"), "-D", str(base / "data"), "-p", str(self.port)]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        super().__init__(command, base, user=user, stop=signal.SIGINT)

    @property
    def url(self) -> str:
        """The address of its only database."""
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/postgres"

    def is_up(self) -> bool:
        """Whether it answers."""
        return services._ping_postgres(self.admin)

    @property
    def admin(self) -> Postgres:
        """For statements outside of any transaction, through its socket."""
        return Postgres(self._base, self.port, self._process)


@contextmanager
def run_redis(*arguments: str) -> Iterator[RedisServer]:
    """Run a Redis until the end of the ``with``."""
    with tempfile.TemporaryDirectory(prefix="scorekeep-redis-") as folder:
        server = RedisServer(Path(folder), *arguments)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def run_postgres(**settings: str) -> Iterator[PostgresServer]:
    """Run a PostgreSQL, with fsync, until the end of the ``with``."""
    base = Path(tempfile.mkdtemp(prefix="scorekeep-pg-", dir="/tmp"))
    try:
        server = PostgresServer(base, **settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(base, ignore_errors=True)
