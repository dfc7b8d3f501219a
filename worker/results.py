"""From what a model yielded to what is recorded: the only place for that translation."""

import hashlib
from collections.abc import Sequence

import msgspec

from contract import errors
from contract.errors import ScoreError
from contract.jobs import JobState
from contract.results import StoredResult
from contract.scores import ItemError, Problem
from storage.claims import ClaimedJob
from storage.outcomes import JobOutcome
from storage.refs import TensorRef
from worker.batcher import Ticket
from worker.engine.encoding import EncodedTensor
from worker.engine.seam import JobScores, Reading
from worker.isolation import Failure

__all__ = ["fail_job", "has_scores", "list_readings", "render_outcome", "render_problem"]

_JSON = msgspec.json.Encoder()
_SORTED_JSON = msgspec.json.Encoder(order="sorted")
_STATUS_OF_CODE = {
    kind.code: kind.http_status
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ScoreError)
}


def render_problem(error: Exception) -> Problem:
    """Return what a client may know of ``error``: our own errors in full, of others the type."""
    if isinstance(error, ScoreError):
        return Problem(error.code, error.message, error.http_status, error.param)
    return Problem("internal", f"the worker met an unexpected {type(error).__name__}", 500)


def fail_job(job: ClaimedJob, problem: Problem) -> JobOutcome:
    """Return the outcome of a job that has no scores at all."""
    return JobOutcome(
        id=job.id,
        attempt=job.attempt,
        state=JobState.FAILED,
        scored=0,
        failed=job.item_count,
        error=_JSON.encode(problem),
    )


def render_outcome(
    job: ClaimedJob,
    scores: JobScores,
    *,
    tensors: Sequence[EncodedTensor],
) -> JobOutcome:
    """Return the outcome of a job that went through the model; its state follows its items."""
    items, failed = len(scores.label_counts), len(scores.errors)
    receipt = _SORTED_JSON.encode(scores.receipt)
    result = StoredResult(
        labels=scores.labels,
        label_counts=scores.label_counts,
        tokens=scores.tokens,
        warnings=scores.warnings,
        errors=scores.errors,
    )
    state = JobState.PARTIAL if failed else JobState.SUCCEEDED
    if failed and failed == items:
        state = JobState.FAILED
    return JobOutcome(
        id=job.id,
        attempt=job.attempt,
        state=state,
        scored=items - failed,
        failed=failed,
        usage=_JSON.encode(scores.usage),
        result=_JSON.encode(result),
        error=_first_problem(scores) if state is JobState.FAILED else None,
        receipt=(hashlib.sha256(receipt).hexdigest(), receipt),
        tensors=[TensorRef(t.name, t.dtype, list(t.shape), t.begin, t.end) for t in tensors],
    )


def _first_problem(scores: JobScores) -> bytes:
    """No item has a score: the job's error is the first item's."""
    first = scores.errors[0]
    status = _STATUS_OF_CODE.get(first.code, 500)
    return _JSON.encode(Problem(first.code, first.message, status, f"items[{first.index}]"))


def list_readings(ticket: Ticket | None) -> list[Reading | ItemError]:
    """Return the answers to one job's sequences, in order; where one failed, why."""
    answers = ticket.answers if ticket is not None else []
    return [
        ItemError(0, answer.error.code, answer.error.message)
        if isinstance(answer, Failure)
        else answer
        for answer in answers
        if answer is not None
    ]


def has_scores(scores: JobScores) -> bool:
    """Tell whether there is anything to keep in the blob: at least one item has a row."""
    return len(scores.errors) < len(scores.label_counts)
