"""Crash points: where a test asks the process to die as ``kill -9`` would, and nowhere else."""

import os

__all__ = ["CRASH_POINTS", "crash_here"]

#: In the order of a job's way. ``after_event`` is after a webhook was answered and before that is
#: recorded.
CRASH_POINTS = (
    "after_claim",
    "after_forward",
    "after_blob",
    "before_commit",
    "after_commit",
    "after_event",
)
_KILLED = 137


def crash_here(point: str, crash_at: str) -> None:
    """End the process at once if ``crash_at`` (``settings.crash_at``) names this ``point``."""
    if point == crash_at:
        os._exit(_KILLED)
