"""Keeps child processes running, and stops them in order: knows commands, nothing of the service.

Every child is tied to this process by ``scorekeep.tether`` and dies with it. Use it from the main
thread: on Linux a child dies with the *thread* that started it.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.errors import UnavailableError

__all__ = ["Child", "Command", "Supervisor", "render_status", "run_once"]

_TETHER = str(Path(__file__).with_name("tether.py"))
_STEADY_AFTER_S = 60.0
_KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Command:
    """A child to be: what to run, with which environment, and how long its end may take."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    grace_s: float = 10.0


class Child:
    """One command, started again with back-off whenever it ends before ``stop`` is called."""

    def __init__(
        self,
        command: Command,
        report: Callable[[str], None],
        *,
        back_off_s: float = 0.5,
        output: int | None = None,
    ) -> None:
        self._command = command
        self._report = report
        self._first_back_off_s = back_off_s
        self._output = output
        self._last_status = ""
        self._process: Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self.starts = 0

    @property
    def name(self) -> str:
        """The command's name."""
        return self._command.name

    @property
    def pid(self) -> int | None:
        """The process id, while it runs."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process is not None else None

    async def start(self) -> None:
        """Start the command and begin to watch it."""
        self._process = await self._spawn()
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def ended(self) -> str:
        """Return how it ended, once it has ended for the first time."""
        await self._ended.wait()
        return self._last_status

    async def stop(self) -> None:
        """Ask it to end, kill it if that takes longer than its grace; return when it is gone."""
        self._stopping.set()
        if self._keeper is None:
            return
        if self.pid is not None:
            self._signal(signal.SIGTERM)
        _, pending = await asyncio.wait({self._keeper}, timeout=self._command.grace_s)
        if pending:
            self._report(f"{self.name} is still running after {self._command.grace_s:g} s: killed")
            self._signal(signal.SIGKILL)
        await asyncio.wait_for(self._keeper, timeout=_KILL_WAIT_S)

    def kill(self) -> None:
        """Kill it now."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _spawn(self) -> Process:
        self.starts += 1
        return await asyncio.create_subprocess_exec(
            *_tethered(self._command.arguments),
            env=dict(self._command.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,  # Ctrl-C reaches us alone, and we stop them in order
        )

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        back_off_s = self._first_back_off_s
        while self._process is not None:
            started = loop.time()
            self._last_status = render_status(await self._process.wait())
            self._ended.set()
            if self._stopping.is_set():
                return
            if loop.time() - started > _STEADY_AFTER_S:
                back_off_s = self._first_back_off_s
            self._report(
                f"{self.name} ended ({self._last_status}); starting it again in {back_off_s:g} s"
            )
            if await self._is_stopped_within(back_off_s):
                return
            back_off_s = min(back_off_s * 2, 30.0)
            self._process = await self._spawn()
            if self._stopping.is_set():  # stop() came while it started, and signalled the old one
                self._signal(signal.SIGTERM)

    async def _is_stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), timeout=seconds)
        except TimeoutError:
            return False
        return True


class Supervisor:
    """Children in the order in which they were started; ``stop`` ends them in the reverse.

    ``output`` is a file descriptor for what they print; None is this process's own.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        *,
        back_off_s: float = 0.5,
        output: int | None = None,
    ) -> None:
        self._report = report
        self._back_off_s = back_off_s
        self._output = output
        self.children: list[Child] = []

    async def start(self, command: Command) -> Child:
        """Start a command and keep it running."""
        child = Child(command, self._report, back_off_s=self._back_off_s, output=self._output)
        self.children.append(child)
        await child.start()
        return child

    async def stop(self) -> None:
        """Stop the last started first, each before the next; return when all are gone."""
        for child in reversed(self.children):
            await child.stop()

    def kill(self) -> None:
        """Kill all of them now."""
        for child in self.children:
            child.kill()


async def run_once(command: Command, *, timeout_s: float = 120.0) -> None:
    """Run a command that ends by itself.

    Raises ``UnavailableError`` with the end of what it printed where it fails.
    """
    process = await asyncio.create_subprocess_exec(
        *_tethered(command.arguments),
        env=dict(command.environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), timeout=timeout_s)
    except TimeoutError as error:
        message = f"{command.name} has not ended after {timeout_s:g} s"
        raise UnavailableError(message) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        tail = printed.decode(errors="replace").strip()[-2000:]
        message = f"{command.name} failed ({render_status(process.returncode or 0)}):\n{tail}"
        raise UnavailableError(message)


def render_status(code: int) -> str:
    """Say an exit code in words: ``status 1``, or ``SIGKILL``."""
    if code < 0:
        return signal.Signals(-code).name
    return f"status {code}"


def _tethered(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-I", "-S", _TETHER, str(os.getpid()), *arguments]
