"""Everything on one machine: order, readiness, failures, signals, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from contract.config import Settings
from contract.errors import SettingsError, UnavailableError
from scorekeep.launch import LaunchOptions, render_environment
from scorekeep.redis_server import find_free_port
from scorekeep.up import Machine, render_address, up
from tests.scorekeep.processes import PATIENT, PYTHON, READY, STUBBORN, is_gone, wait_until

_MIGRATE = (*PYTHON, "import os; assert os.environ['SCOREKEEP_REDIS_URL']")

#: ``scorekeep up`` with small children instead of the real ones.
_UP = f"""
import functools, os, sys
from pathlib import Path
from scorekeep.launch import LaunchOptions
from scorekeep.up import Machine, up
small = functools.partial(
    Machine,
    worker=(sys.executable, "-c", os.environ["TEST_WORKER"]),
    api=(sys.executable, "-c", {READY!r}),
    migrate={_MIGRATE!r},
)
up(LaunchOptions(data=Path(sys.argv[1]), models=["sentiment=x"], port=0), os.environ,
   functools.partial(print, flush=True), small)
"""


def _environment(folder: Path, **more: str) -> dict[str, str]:
    options = LaunchOptions(data=folder, host="127.0.0.1", port=find_free_port())
    return {**render_environment(options, {"PATH": os.environ["PATH"]}), **more}


def _machine(
    environment: dict[str, str], lines: list[str], *, worker: str = PATIENT, api: str = READY
) -> Machine:
    return Machine(
        environment,
        lines.append,
        worker=(*PYTHON, worker),
        api=(*PYTHON, api),
        migrate=_MIGRATE,
    )


class Up:
    """A running ``scorekeep up`` with small children."""

    def __init__(self, folder: Path, worker: str = PATIENT) -> None:
        self.process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", _UP, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TEST_WORKER": worker},
        )
        self.lines: list[str] = []

    def read_until(self, text: str) -> str:
        """Return the first line with ``text`` in it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return line
        pytest.fail(f"no {text!r} in {self.lines}")

    def children(self) -> list[psutil.Process]:
        """The processes that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Up]:
    """One that is ready."""
    running = Up(tmp_path)
    running.read_until("is ready")
    yield running
    running.process.kill()
    running.process.communicate()


async def test_all_start_and_all_stop(tmp_path: Path) -> None:
    """Redis, migrations, worker, API; one line with the address; nothing is left."""
    lines: list[str] = []
    environment = _environment(tmp_path)
    machine = _machine(environment, lines)

    await machine.start()
    children = machine._supervisor.children
    pids = [child.pid for child in children]
    await machine.stop()

    assert [child.name for child in children] == ["redis", "worker", "api"]
    assert lines == [f"scorekeep is ready: {machine.address}  models: judge (loading), sentiment"]
    assert all(pid is not None and is_gone(pid) for pid in pids)


async def test_a_redis_that_is_named_is_used(tmp_path: Path) -> None:
    """With SCOREKEEP_REDIS_URL no other is started."""
    lines: list[str] = []
    machine = _machine(_environment(tmp_path, SCOREKEEP_REDIS_URL="redis://127.0.0.1:1/0"), lines)

    await machine.start()
    names = [child.name for child in machine._supervisor.children]
    await machine.stop()

    assert names == ["worker", "api"]


@pytest.mark.parametrize("part", ["worker", "api"])
async def test_a_child_that_ends_while_starting_is_fatal(tmp_path: Path, part: str) -> None:
    """Nobody waits for a service that cannot come."""
    never_ready = _environment(tmp_path, TEST_MODEL_STATE="loading")
    machine = _machine(never_ready, [], **{part: "raise SystemExit(3)"})

    with pytest.raises(UnavailableError, match=rf"{part} ended while starting \(status 3\)"):
        await machine.start()
    await machine.stop()


async def test_no_model_at_all_is_fatal(tmp_path: Path) -> None:
    """Where every model failed, the reasons are the message."""
    machine = _machine(_environment(tmp_path, TEST_MODEL_STATE="failed"), [])

    with pytest.raises(UnavailableError, match="no model can be served: no such folder"):
        await machine.start()
    await machine.stop()


async def test_a_long_start_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits it says for what."""
    monkeypatch.setattr("scorekeep.up._SAY_AGAIN_S", 0.0)
    lines: list[str] = []
    slow = f"import time; time.sleep(0.3)\n{READY}"
    machine = _machine(_environment(tmp_path, TEST_MODEL_STATE="loading"), lines, api=slow)

    def report_and_stop(line: str) -> None:
        lines.append(line)
        if "no such folder" in line:
            raise UnavailableError(line)

    machine._report = report_and_stop
    with pytest.raises(UnavailableError):
        await machine.start()
    await machine.stop()

    assert lines[0] == "still starting: the API does not answer yet"
    assert lines[-1] == "still starting: no such folder"


def test_a_signal_stops_everything(started: Up) -> None:
    """SIGTERM: exit 0, no child left, the folder free for the next."""
    children = started.children()
    assert len(children) == 3

    started.process.send_signal(signal.SIGTERM)
    started.process.wait(15)

    assert started.process.returncode == 0
    assert all(is_gone(child.pid) for child in children)


def test_a_dead_child_is_replaced_and_said(started: Up) -> None:
    """A worker killed from outside is there again."""
    (worker,) = (child for child in started.children() if PATIENT in child.cmdline())

    worker.kill()

    assert "worker ended (SIGKILL); starting it again in 0.5 s" in started.read_until("ended")
    wait_until(lambda: any(PATIENT in child.cmdline() for child in started.children()))


def test_killed_it_leaves_nobody(started: Up) -> None:
    """SIGKILL cannot be handled; the children are gone within eight seconds all the same."""
    children = started.children()

    started.process.kill()

    wait_until(lambda: all(is_gone(child.pid) for child in children), timeout_s=8)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """Whoever cannot wait for the drain need not."""
    running = Up(tmp_path, STUBBORN)
    running.read_until("is ready")
    children = running.children()

    running.process.send_signal(signal.SIGINT)
    running.read_until("stopping")
    running.process.send_signal(signal.SIGINT)
    running.process.communicate(timeout=8)

    assert running.process.returncode == 130
    wait_until(lambda: all(is_gone(child.pid) for child in children))


def test_a_signal_while_starting_stops_it_too(tmp_path: Path) -> None:
    """Before anything is ready, Ctrl-C leaves nothing either."""
    code = _UP.replace(repr(_MIGRATE), repr((*PYTHON, "print('x'); import time; time.sleep(60)")))
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "TEST_WORKER": PATIENT},
    )
    itself = psutil.Process(process.pid)
    wait_until(lambda: len(itself.children()) == 2)
    children = itself.children()

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=15)

    assert process.returncode == 0
    assert all(is_gone(child.pid) for child in children)


def test_a_folder_has_one_master(started: Up, tmp_path: Path) -> None:
    """A second up on the same data folder is refused with a way out."""
    with pytest.raises(SettingsError, match=r"another scorekeep up is using .*--data"):
        up(LaunchOptions(data=tmp_path, models=["a=b"], port=0), {}, pytest.fail)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),  # noqa: S104
        ("::", "http://[::1]:8000"),
        ("box.example", "http://box.example:8000"),
    ],
)
def test_the_address_is_one_that_works(host: str, address: str) -> None:
    """An address to listen on is not always one to connect to."""
    assert re.fullmatch(r"http://\S+:\d+", address)
    assert render_address(Settings(host=host)) == address
