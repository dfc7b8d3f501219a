"""A retried job's earlier scores: read from its blob, and what of the job is left to score."""

import asyncio

import msgspec

from contract.errors import NotFoundError, StoreUnavailableError
from contract.results import StoredResult
from contract.scores import ItemError, Usage
from storage.blobs import BlobStore
from storage.claims import ClaimedJob
from worker.engine.merging import EarlierScores, EarlierTensor, fits
from worker.engine.seam import PreparedJob, Reading, Scorer

__all__ = ["list_open", "place_readings", "read_earlier"]

_KEPT = ItemError(0, "kept", "scored by an earlier attempt")


async def read_earlier(blobs: BlobStore, job: ClaimedJob) -> EarlierScores | None:
    """Return what an earlier generation of ``job`` scored; None where there is nothing.

    Raises ``StoreUnavailableError``, also where the blob was just written anew under another name:
    the next claim has it.
    """
    if job.kept is None:
        return None
    key, refs = job.kept.blob_key, job.kept.tensors
    try:
        read = await asyncio.gather(*(blobs.get_range(key, ref.begin, ref.end) for ref in refs))
    except NotFoundError as error:
        message = "the earlier scores have just moved"
        raise StoreUnavailableError(message) from error
    usage = job.kept.usage
    return EarlierScores(
        result=msgspec.json.decode(job.kept.result, type=StoredResult),
        usage=Usage() if usage is None else msgspec.json.decode(usage, type=Usage),
        tensors={
            ref.name: EarlierTensor(ref.dtype, tuple(ref.shape), data)
            for ref, data in zip(refs, read, strict=True)
        },
    )


def list_open(scorer: Scorer, prepared: PreparedJob, earlier: EarlierScores) -> list[int] | None:
    """Return which of ``prepared.sequences`` have no score yet; None where all must be scored.

    All must where the model yields rows of another form than it did.
    """
    if not fits(scorer.finish(prepared, [_KEPT] * len(prepared.sequences)), earlier):
        return None
    kept = set(earlier.kept)
    indexes = [item.index for item in prepared.items if item.sequence is not None]
    return [place for place, index in enumerate(indexes) if index not in kept]


def place_readings(
    prepared: PreparedJob, places: list[int], readings: list[Reading | ItemError]
) -> list[Reading | ItemError]:
    """Return one answer per sequence: a reading at each of ``places``, elsewhere none."""
    answers: list[Reading | ItemError] = [_KEPT] * len(prepared.sequences)
    for place, reading in zip(places, readings, strict=True):
        answers[place] = reading
    return answers
