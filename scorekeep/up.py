"""Everything on one machine: Redis, migrations, worker and API as children of this process.

Starts them in order, says when the service is ready, starts again what ends, and stops all of them
in the reverse order.
"""

import asyncio
import fcntl
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import msgspec

from contract.config import Settings, load_settings
from contract.errors import SettingsError, UnavailableError
from scorekeep.launch import (
    API,
    MIGRATE,
    WORKER,
    LaunchOptions,
    find_registry,
    render_environment,
)
from scorekeep.redis_server import find_free_port, find_redis, prepare_redis
from scorekeep.supervisor import Child, Command, Supervisor, run_once

__all__ = ["Machine", "render_address", "up"]

_POLL_S = 0.05
_SAY_AGAIN_S = 15.0
_API_GRACE_S = 15.0
_REDIS_GRACE_S = 10.0
_DRAIN_MARGIN_S = 5.0


class _Reason(msgspec.Struct, frozen=True):
    part: str = ""
    code: str = ""
    detail: str = ""


class _Readiness(msgspec.Struct, frozen=True):
    """``GET /readyz``."""

    ready: bool
    reasons: list[_Reason] = []
    models: dict[str, str] = {}


class Machine:
    """The processes of one machine.

    ``report`` gets a line for whatever a person should know, ``output`` (a file descriptor, by
    default this process's own) what the children print.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        report: Callable[[str], None],
        *,
        worker: tuple[str, ...] = WORKER,
        api: tuple[str, ...] = API,
        migrate: tuple[str, ...] = MIGRATE,
        output: int | None = None,
    ) -> None:
        self._environment = dict(environment)
        self._settings = load_settings(environment)
        self._report = report
        self._worker, self._api, self._migrate = worker, api, migrate
        self._redis_folder = Path(self._settings.data_dir).absolute() / "redis"
        self._supervisor = Supervisor(report, output=output)

    async def start(self) -> None:
        """Start everything and return once a model is served.

        Raises ``UnavailableError`` where a child ends before that, or no model can be loaded.
        """
        if "SCOREKEEP_REDIS_URL" not in self._environment:
            await self._start_redis()
        await run_once(Command("migrate", self._migrate, self._environment))
        worker_grace_s = self._settings.drain_s + _DRAIN_MARGIN_S
        commands = (
            Command("worker", self._worker, self._environment, worker_grace_s),
            Command("api", self._api, self._environment, _API_GRACE_S),
        )
        children = [await self._supervisor.start(command) for command in commands]
        await _first_of(self._wait_until_ready(), children)

    @property
    def address(self) -> str:
        """The URL of the API."""
        return render_address(self._settings)

    async def stop(self) -> None:
        """Stop the API, then the worker, which finishes its batch, then Redis."""
        await self._supervisor.stop()

    def kill(self) -> None:
        """Kill all children now; queued and running jobs are taken up at the next start."""
        self._supervisor.kill()

    async def _start_redis(self) -> None:
        server = prepare_redis(self._redis_folder, find_redis())
        child = await self._supervisor.start(
            Command("redis", server.arguments, self._environment, _REDIS_GRACE_S)
        )
        await _first_of(server.wait(), [child])
        self._environment["SCOREKEEP_REDIS_URL"] = server.url

    async def _wait_until_ready(self) -> None:
        address, loop = self.address, asyncio.get_running_loop()
        say_again_at = loop.time() + _SAY_AGAIN_S
        async with aiohttp.ClientSession() as session:
            while True:
                found = await _read_readiness(session, address)
                if found is not None and found.ready:
                    self._report(_render_ready(address, found))
                    return
                _check_hopeful(found)
                if loop.time() >= say_again_at:
                    self._report(f"still starting: {_render_reasons(found)}")
                    say_again_at = loop.time() + _SAY_AGAIN_S
                await asyncio.sleep(_POLL_S)


def up(
    options: LaunchOptions,
    environment: Mapping[str, str],
    report: Callable[[str], None],
    machine: Callable[..., Machine] = Machine,
) -> None:
    """Run everything until SIGINT, SIGTERM or SIGHUP; a second one ends this process at once.

    Raises ``SettingsError`` and ``UnavailableError`` where it cannot start.
    """
    if options.port == 0:
        port = find_free_port(options.host or "127.0.0.1")
        options = LaunchOptions(options.data, options.config, options.models, options.host, port)
    merged = render_environment(options, environment)
    settings = load_settings(merged)
    folder = Path(settings.data_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        merged["SCOREKEEP_DATA_DIR"] = str(folder)
        merged["SCOREKEEP_CONFIG"] = str(find_registry(options, settings))
        asyncio.run(_run(machine(merged, report), report))


def render_address(settings: Settings) -> str:
    """Return the URL under which this machine reaches the API."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


async def _run(machine: Machine, report: Callable[[str], None]) -> None:
    stop = asyncio.Event()

    def be_told() -> None:
        if stop.is_set():
            machine.kill()
            os._exit(130)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, be_told)
    starting = asyncio.create_task(machine.start(), name="start")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await starting
            await stopping
        report("stopping")
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await machine.stop()


async def _first_of(ready: Coroutine[None, None, None], children: list[Child]) -> None:
    """Await ``ready``, unless one of the children ends first: that is an error."""
    waiting = asyncio.create_task(ready)
    ends = {asyncio.create_task(child.ended()): child for child in children}
    try:
        await asyncio.wait({waiting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            await waiting
            return
        for end, child in ends.items():
            if end.done():
                message = f"{child.name} ended while starting ({end.result()}); its log says why"
                raise UnavailableError(message)
    finally:
        for task in (waiting, *ends):
            task.cancel()
        await asyncio.gather(waiting, *ends, return_exceptions=True)


async def _read_readiness(session: aiohttp.ClientSession, address: str) -> _Readiness | None:
    try:
        timeout = aiohttp.ClientTimeout(total=5)
        async with session.get(f"{address}/readyz", timeout=timeout) as response:
            return msgspec.json.decode(await response.read(), type=_Readiness)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
        return None


def _check_hopeful(found: _Readiness | None) -> None:
    if found is not None and found.models and set(found.models.values()) == {"failed"}:
        message = f"no model can be served: {_render_reasons(found)}"
        raise UnavailableError(message)


def _render_reasons(found: _Readiness | None) -> str:
    if found is None:
        return "the API does not answer yet"
    return "; ".join(reason.detail or reason.code for reason in found.reasons) or "not ready"


def _render_ready(address: str, found: _Readiness) -> str:
    models = ", ".join(
        name if state == "ready" else f"{name} ({state})"
        for name, state in sorted(found.models.items())
    )
    return f"scorekeep is ready: {address}  models: {models}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second ``up`` off the folder; the lock ends with this process, however it ends."""
    with (folder / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            message = f"another scorekeep up is using {folder}; choose another with --data"
            raise SettingsError(message) from error
        yield
