"""A tethered command does not outlive its parent, in either of the two ways."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scorekeep import tether
from tests.scorekeep.processes import PATIENT, is_gone, wait_until

#: Starts a tethered child, prints its pid, and waits to be killed.
_PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, sys.argv[1], str(os.getpid()), sys.executable, "-c", sys.argv[2]],
    start_new_session=True,
)
print(child.pid, flush=True)
time.sleep(60)
"""

#: The same with the way that other systems than Linux take.
_WATCHER = f"""
import platform, runpy, sys
platform.system = lambda: "Darwin"
sys.argv = sys.argv[1:]
runpy.run_path({tether.__file__!r}, run_name="__main__")
"""


@pytest.mark.parametrize("way", ["kernel", "watch"])
def test_the_command_dies_with_its_parent(tmp_path: Path, way: str) -> None:
    """Killed with SIGKILL, the parent takes the command along, though in another session."""
    script = Path(tether.__file__)
    if way == "watch":
        script = tmp_path / "watch.py"
        script.write_text(_WATCHER.replace("sys.argv = sys.argv[1:]", ""))
    pid_file = tmp_path / "pid"
    command = f"import os; open({str(pid_file)!r}, 'w').write(str(os.getpid()) + '.')\n{PATIENT}"
    parent = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", _PARENT, str(script), command], stdout=subprocess.PIPE
    )
    wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("."))
    pid = int(pid_file.read_text()[:-1])

    parent.kill()
    parent.communicate()

    wait_until(lambda: is_gone(pid), timeout_s=8)


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    """Between fork and prctl the parent may have died: then the command never starts."""
    ended = subprocess.run(  # noqa: S603
        [sys.executable, tether.__file__, "1", sys.executable, "-c", "print('ran')"],
        capture_output=True,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (1, b"")


def test_the_command_takes_the_place_of_the_tether() -> None:
    """On Linux the pid is the command's own, and so is the exit code."""
    child = subprocess.Popen(  # noqa: S603
        [
            sys.executable,
            tether.__file__,
            str(os.getpid()),
            sys.executable,
            "-c",
            "import os, sys; print(os.getpid()); sys.exit(7)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    printed, _ = child.communicate()

    assert (int(printed), child.returncode) == (child.pid, 7)


def test_watching_passes_on_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel cannot help, the tether ends as the command ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    try:
        code = tether.main([str(os.getppid()), sys.executable, "-c", "raise SystemExit(5)"])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    assert code == 5


def test_watching_passes_on_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM to the tether is SIGTERM to the command."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    command = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    try:
        code = tether.watch(os.getppid(), [sys.executable, "-c", command])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    assert code == -signal.SIGTERM


def test_watching_kills_when_the_parent_is_gone() -> None:
    """A parent that is not ours any more is a parent that died."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = tether.watch(os.getppid() + 1, [sys.executable, "-c", PATIENT])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    assert code == -signal.SIGKILL


def test_a_refusing_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the tie nothing is started."""

    class Refusing:
        def prctl(self, *_arguments: int) -> int:
            return -1

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: Refusing())
    with pytest.raises(OSError, match=r".*"):
        tether.main([str(os.getppid()), "true"])
    monkeypatch.undo()
    monkeypatch.setattr("scorekeep.tether.tie", lambda parent: None)
    became: list[list[str]] = []
    monkeypatch.setattr("os.execvp", lambda _name, command: became.append(command))
    monkeypatch.setattr("scorekeep.tether.watch", lambda *_: 0)

    tether.main(["1", "true", "x"])

    assert became == [["true", "x"]]
