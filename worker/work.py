"""A claimed job on its way through the steps, what is to be written about a batch, and counts."""

import time
from dataclasses import dataclass, field

from storage.claims import Claim, ClaimedJob
from storage.outcomes import JobOutcome
from storage.score_cache import CacheEntry
from worker.batcher import Ticket
from worker.engine.merging import EarlierScores
from worker.engine.seam import JobScores, PreparedJob

__all__ = ["Conclusion", "Counts", "Work"]


@dataclass(slots=True)
class Counts:
    """What this worker did since it started."""

    completed: int = 0
    items: int = 0
    tokens: int = 0
    fenced: int = 0
    released: int = 0
    retried: int = 0
    commits: int = 0
    commit_s: float = 0.0
    from_cache: int = 0


@dataclass(slots=True, eq=False)
class Work:
    """One claimed job on its way. ``error`` ends it; a retryable one gives it back to the queue."""

    job: ClaimedJob
    prepared: PreparedJob | None = None
    ticket: Ticket | None = None
    scores: JobScores | None = None
    error: Exception | None = None
    #: what it keeps of what was scored before, and which of its sequences are still to be scored
    earlier: EarlierScores | None = None
    places: list[int] | None = None
    #: under which its scores are kept for others, and whether its own come from there
    cache_key: str = ""
    is_known: bool = False
    started_at: float = field(default_factory=time.monotonic)

    @property
    def claim(self) -> Claim:
        """What fences every write about this job."""
        return Claim(self.job.id, self.job.attempt)


@dataclass(slots=True)
class Conclusion:
    """What is to be written about a batch."""

    outcomes: list[JobOutcome] = field(default_factory=list)
    again: list[Work] = field(default_factory=list)
    released: list[Work] = field(default_factory=list)
    blob_key: str | None = None
    data: bytes = b""
    entries: list[CacheEntry] = field(default_factory=list)
    #: blobs that hold scores which were kept and written anew
    earlier_keys: set[str] = field(default_factory=set)
