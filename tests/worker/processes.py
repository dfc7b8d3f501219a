"""Worker processes for tests: started as users start them, watched through the store."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from contract.config import PREFIX, Settings

__all__ = ["ROOT", "WorkerProcess", "start_worker", "write_registry"]

ROOT = Path(__file__).parents[2]
#: Generous: it ends a test that hangs, and slows none that does not.
_EXIT_TIMEOUT_S = 45


@dataclass
class WorkerProcess:
    """A running ``python -m worker``."""

    process: "subprocess.Popen[bytes]"
    output: IO[str]

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def wait(self) -> int:
        """Return the exit code of a process that is about to end."""
        return await asyncio.to_thread(self.process.wait, _EXIT_TIMEOUT_S)

    def read_log(self) -> str:
        """Return what it wrote to standard error so far."""
        self.output.seek(0)
        return self.output.read()


def write_registry(folder: Path) -> Path:
    """Write a registry with one deterministic model, ``sums``."""
    path = folder / "scorekeep.toml"
    path.write_text('[models.sums]\nsource = "builtin:deterministic"\n')
    return path


def environment_of(settings: Settings) -> dict[str, str]:
    """Render settings as the environment that makes them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    for name, value in msgspec.structs.asdict(settings).items():
        if value != getattr(Settings(), name):
            kept[PREFIX + name.upper()] = str(int(value) if isinstance(value, bool) else value)
    return kept | {"OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def start_worker(settings: Settings, *arguments: str, **variables: str) -> Iterator[WorkerProcess]:
    """Run ``python -m worker``; kill it at the end if it still runs.

    ``variables`` are set beside those that ``settings`` make.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "worker", *arguments],
            env=environment_of(settings) | variables,
            cwd=ROOT,
            stderr=output,
        )
        worker = WorkerProcess(process, output)
        try:
            yield worker
        finally:
            process.kill()
            process.wait(_EXIT_TIMEOUT_S)
            sys.stderr.write(worker.read_log())  # pytest shows it where the test failed
