"""Worker processes for tests: started as users start them, watched through their log."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from contract.config import PREFIX, Settings

__all__ = ["start_worker", "write_registry"]

ROOT = Path(__file__).parents[2]


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
def start_worker(settings: Settings, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``python -m worker``; kill it at the end if it still runs."""
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "worker", *arguments], env=environment_of(settings), cwd=ROOT
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
