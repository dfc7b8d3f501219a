"""Starts a command that cannot outlive the process that asked for it.

Run as a file, ``python tether.py PARENT_PID COMMAND…``, by ``scorekeep.supervisor``; standard
library only, so that it costs no more than the interpreter's start. On Linux the kernel is told to
kill this process when its parent dies (``PR_SET_PDEATHSIG``), which survives the ``exec`` of the
command. Elsewhere this process stays, and watches.
"""

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

__all__ = ["main", "tie", "watch"]

_PR_SET_PDEATHSIG = 1
_WATCH_EVERY_S = 0.5


def main(arguments: list[str]) -> int:
    """Become ``arguments[1:]``, or watch over it, on behalf of the process ``arguments[0]``."""
    parent, command = int(arguments[0]), arguments[1:]
    if platform.system() == "Linux":
        tie(parent)
        os.execvp(command[0], command)  # noqa: S606  # the supervisor's own command
    return watch(parent, command)


def tie(parent: int) -> None:
    """Let this process be killed when the thread of ``parent`` that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent:  # it died before the kernel was told
        sys.exit(1)


def watch(parent: int, command: Sequence[str]) -> int:
    """Run ``command``, pass SIGTERM and SIGINT on, kill it when ``parent`` is gone."""
    child = subprocess.Popen(command)  # noqa: S603  # the supervisor's own command
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: child.send_signal(received))
    while child.poll() is None:
        if os.getppid() != parent:
            child.kill()
        time.sleep(_WATCH_EVERY_S)
    return child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
