"""``python -m tests.chaos.lag FILE api|worker …``: a process of ours that writes down its loop lag.

The event loop is woken every 10 ms; how late the latest of a second's wakes was is written to FILE,
a line a second. The process is otherwise what ``python -m api`` or ``python -m worker`` runs.
"""

import asyncio
import sys
from asyncio import AbstractEventLoop
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import api.__main__
import worker.__main__

_WAKE_S = 0.01
_LINE_S = 1.0


class LagWriter:
    """Measures one loop, for as long as it runs."""

    def __init__(self, loop: AbstractEventLoop, path: Path) -> None:
        self._loop = loop
        self._file = path.open("a", buffering=1)
        self._worst_s = 0.0
        self._line_at = self._due_at = loop.time()
        self._plan()

    def _plan(self) -> None:
        self._due_at = self._loop.time() + _WAKE_S
        self._loop.call_at(self._due_at, self._wake)

    def _wake(self) -> None:
        now = self._loop.time()
        self._worst_s = max(self._worst_s, now - self._due_at)
        if now - self._line_at >= _LINE_S:
            self._file.write(f"{self._worst_s:.6f}\n")
            self._worst_s, self._line_at = 0.0, now
        self._plan()


def create_runner(path: Path) -> type[asyncio.Runner]:
    """Return a Runner whose main loop, the one that is made by a factory, is measured."""

    class MeasuredRunner(asyncio.Runner):  # type: ignore[misc]  # final, but for this
        def __init__(
            self,
            *,
            debug: bool | None = None,
            loop_factory: Callable[[], AbstractEventLoop] | None = None,
        ) -> None:
            def make() -> AbstractEventLoop:
                assert loop_factory is not None
                loop = loop_factory()
                LagWriter(loop, path)
                return loop

            super().__init__(debug=debug, loop_factory=make if loop_factory else None)

    return MeasuredRunner


def main() -> int:
    """Run the process."""
    path, kind, *rest = sys.argv[1:]
    with (
        mock.patch.object(asyncio, "Runner", create_runner(Path(path))),
        mock.patch.object(sys, "argv", [kind, *rest]),
    ):
        return {"api": api.__main__.main, "worker": worker.__main__.main}[kind]()


if __name__ == "__main__":
    sys.exit(main())
