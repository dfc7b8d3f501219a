"""The job life cycle: which states exist and which moves between them are legal.

Every process agrees on this table. ``storage.jobs`` enforces it inside the database transaction;
the API and the client only read it.
"""

from enum import StrEnum

from contract.errors import IllegalTransitionError

__all__ = ["LANES", "RETRYABLE", "TERMINAL", "TRANSITIONS", "JobState", "Lane", "check_transition"]


class JobState(StrEnum):
    """Where a job stands. The value is what SQL rows, JSON bodies and webhooks carry."""

    QUEUED = "queued"  #: accepted and recorded; no worker holds it
    RUNNING = "running"  #: a worker holds a lease on it
    SUCCEEDED = "succeeded"  #: every item has its score, and the blob is durable
    PARTIAL = "partial"  #: some items have scores, the others say why not
    FAILED = "failed"  #: no item has a score; ``error`` says why
    CANCELLED = "cancelled"  #: a client asked us to stop before it finished
    EXPIRED = "expired"  #: its deadline in the queue passed before a worker could take it


class Lane(StrEnum):
    """Which queue a job waits in; a lane is served before those behind it, with ageing."""

    INTERACTIVE = "interactive"  #: somebody waits for the answer
    NORMAL = "normal"  #: a job that is polled or calls back
    BULK = "bulk"  #: fills what the others leave


#: The lanes in the order in which they are served; SQL keeps the position.
LANES: tuple[Lane, ...] = (Lane.INTERACTIVE, Lane.NORMAL, Lane.BULK)

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED, JobState.EXPIRED}),
    JobState.RUNNING: frozenset(
        {
            JobState.SUCCEEDED,
            JobState.PARTIAL,
            JobState.FAILED,
            JobState.CANCELLED,
            JobState.QUEUED,
        }
    ),
    JobState.SUCCEEDED: frozenset(),
    JobState.PARTIAL: frozenset({JobState.QUEUED}),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset(),
    JobState.EXPIRED: frozenset({JobState.QUEUED}),
}

#: No worker and no sweep moves these: only a client's retry may, which begins a new generation.
TERMINAL = frozenset(JobState) - {JobState.QUEUED, JobState.RUNNING}
#: What a client may retry: items without a score are left, and nobody asked to stop.
RETRYABLE = frozenset(state for state in TERMINAL if JobState.QUEUED in TRANSITIONS[state])


def check_transition(current: JobState, wanted: JobState) -> None:
    """Raise ``IllegalTransitionError`` unless ``current`` may become ``wanted``."""
    if wanted not in TRANSITIONS[current]:
        raise IllegalTransitionError(current=current, wanted=wanted)
