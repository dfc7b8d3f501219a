"""Crash points: where a test asks the process to die as ``kill -9`` would, and nowhere else."""

import os

__all__ = ["CRASH_POINTS", "crash_here"]

#: In the order of a job's way. ``before_event`` is before a webhook is sent, ``after_event`` after
#: it was answered, ``before_record`` in the transaction that records it, ``after_record`` after.
CRASH_POINTS = (
    "after_claim",
    "after_forward",
    "after_blob",
    "before_commit",
    "after_commit",
    "before_event",
    "after_event",
    "before_record",
    "after_record",
)
_KILLED = 137


def crash_here(point: str, crash_at: str) -> None:
    """End the process at once if ``crash_at`` (``settings.crash_at``) names this ``point``."""
    if point == crash_at:
        os._exit(_KILLED)
