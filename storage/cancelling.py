"""Cancellation that arrives: ``asyncio.wait_for`` of Python 3.11 may swallow it.

Where what it waits for ends in the same step in which its task is cancelled, it returns the result
and the task goes on (https://github.com/python/cpython/issues/86296, mended in 3.12). redis-py and
SQLAlchemy's pool wait so: a task that loops for ever would never end.
"""

import asyncio
import contextlib
from collections.abc import Iterator

__all__ = ["kept_cancellation"]


@contextlib.contextmanager
def kept_cancellation() -> Iterator[None]:
    """Raise ``CancelledError`` at the end where this task was cancelled meanwhile and went on."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
