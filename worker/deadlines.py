"""The hard deadline: what runs in a thread and cannot be stopped, and since when.

A heartbeat proves that the process lives, not that it moves. Whoever starts something that may
hang registers it here; the lease keeper's thread looks, and ends the process when one is overdue.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["HardDeadline"]


class HardDeadline:
    """Keeps what is running. Safe to use from any thread."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._running: dict[object, tuple[str, float]] = {}
        self._moved_at = time.monotonic()

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Count the body of the ``with`` as running from its start to its end."""
        token = object()
        with self._lock:
            self._running[token] = (what, time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                del self._running[token]

    def move(self) -> None:
        """Say that the event loop turns."""
        self._moved_at = time.monotonic()

    def find_overdue(self) -> str | None:
        """Return what has been running longer than the limit, or None."""
        now = time.monotonic()
        if now - self._moved_at > self._limit_s:
            return "event loop"
        with self._lock:
            running = list(self._running.values())
        return next((what for what, since in running if now - since > self._limit_s), None)
