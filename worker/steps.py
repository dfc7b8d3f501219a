"""How long each step of a batch took: for the log of slow jobs, and for the jobs' traces."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from contract.origins import parse_origin
from contract.tracing import add_span
from storage.claims import ClaimedJob

__all__ = ["Steps"]

_LOG = logging.getLogger(__name__)
#: Of one batch, no more are logged one by one.
_LOGGED = 8


class Steps:
    """Measures the steps of one batch, from its claim on. Belongs to the event loop."""

    def __init__(self, jobs: Sequence[ClaimedJob]) -> None:
        self._jobs = jobs
        self._began_at = time.time()
        self._began = time.monotonic()
        self._taken: dict[str, tuple[float, float]] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure what happens within."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._taken[name] = (began - self._began, time.monotonic() - self._began)

    def end(self, *, slow_s: float) -> None:
        """Log the jobs where the batch took longer than ``slow_s``, and trace them."""
        took_s = time.monotonic() - self._began
        if took_s > slow_s:
            self._log_slow(took_s)
        for job in self._jobs:
            if job.origin is not None:
                self._trace(job, took_s)

    def _log_slow(self, took_s: float) -> None:
        steps = {f"{name}_s": round(end - begin, 3) for name, (begin, end) in self._taken.items()}
        for job in self._jobs[:_LOGGED]:
            extra = {
                "action": "slow_job",
                "job": job.id,
                "request_id": parse_origin(job.origin).request_id,
                "attempt": job.attempt,
                "model": job.model,
                "items": job.item_count,
                "waited_s": round(job.waited_s, 3),
                "took_s": round(took_s, 3),
                "batch_jobs": len(self._jobs),
            }
            _LOG.warning("slow job", extra=extra | steps)

    def _trace(self, job: ClaimedJob, took_s: float) -> None:
        """Add the job's spans to the trace of the request that submitted it."""
        origin = parse_origin(job.origin)
        whole = add_span(
            f"job {job.model}",
            kind="consumer",
            parent=origin.traceparent,
            began_at=self._began_at,
            ended_at=self._began_at + took_s,
            job=job.id,
            request_id=origin.request_id,
            attempt=job.attempt,
            items=job.item_count,
            batch_jobs=len(self._jobs),
            waited_s=job.waited_s,
        )
        for name, (begin, end) in self._taken.items():
            began_at, ended_at = self._began_at + begin, self._began_at + end
            add_span(name, parent=whole, began_at=began_at, ended_at=ended_at, job=job.id)
