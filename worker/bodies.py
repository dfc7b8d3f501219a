"""What a webhook says: the event's body, under 20 kB whatever the job."""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from contract.bulks import BulkState
from contract.config import Settings
from contract.errors import NotFoundError, StoreUnavailableError
from contract.jobs import JobState
from contract.moments import render_moment
from contract.results import StoredResult
from contract.scores import JobCounts
from contract.webhooks import Event, EventType
from storage.blobs import BlobStore
from storage.deliveries import BulkNews, DueDelivery
from storage.jobs import JobRow
from storage.refs import TensorRef

__all__ = ["render_body"]

_MAX_BYTES = 20_000
_MAX_SCORES_BYTES = 8_000
#: About how many characters a float takes in JSON.
_SCORE_CHARACTERS = 13
#: Left out in this order where a body would be too large; all of it is behind the links.
_OPTIONAL = ("scores", "errors", "labels", "metadata", "error")
_STATE_OF_EVENT = {
    EventType.BATCH_PROGRESS: BulkState.RUNNING,
    EventType.BATCH_COMPLETED: BulkState.COMPLETED,
    EventType.BATCH_FAILED: BulkState.FAILED,
    EventType.BATCH_CANCELLED: BulkState.CANCELLED,
    EventType.BATCH_EXPIRED: BulkState.EXPIRED,
}


async def render_body(settings: Settings, blobs: BlobStore, delivery: DueDelivery) -> bytes:
    """Return the event as JSON. The same delivery gives the same bytes at every attempt.

    Scores are in it when they are small; hidden states are always behind a link.
    """
    if delivery.job is not None:
        data = await _describe_job(settings, blobs, delivery.job)
    elif delivery.bulk is not None:
        data = _describe_bulk(settings, delivery.bulk, delivery.event_type)
    else:
        data = {"object": "test", "endpoint": delivery.endpoint_id}
    body = _encode(delivery, data)
    for name in _OPTIONAL:
        if len(body) <= _MAX_BYTES:
            break
        data.pop(name, None)
        body = _encode(delivery, data)
    return body


def _encode(delivery: DueDelivery, data: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(
        Event(
            type=EventType(delivery.event_type),
            timestamp=render_moment(delivery.event_at),
            sequence=delivery.sequence,
            data=dict(data),
        )
    )


async def _describe_job(settings: Settings, blobs: BlobStore, job: JobRow) -> dict[str, Any]:
    url = f"{_base_url(settings)}/v1/jobs/{job.id}"
    links = {"self": url}
    if job.state in {JobState.SUCCEEDED, JobState.PARTIAL}:
        links["scores"] = f"{url}/scores"
    if _find_tensor(job, "hidden_states") is not None:
        links["hidden_states"] = f"{url}/hidden_states"
    data = {
        "id": job.id,
        "object": "job",
        "state": job.state,
        "model": job.model,
        "attempt": job.attempt,
        "counts": JobCounts(job.item_count, job.scored_count, job.failed_count),
        "metadata": job.metadata,
        "usage": _raw(job.usage),
        "error": _raw(job.error),
        "links": links,
    }
    if job.state in {JobState.SUCCEEDED, JobState.PARTIAL}:
        result = _parse_result(job)
        scores = await _read_scores(blobs, job, result)
        optional = {"labels": result.labels, "scores": scores, "errors": result.errors}
        data.update({name: value for name, value in optional.items() if value is not None})
    return data


def _describe_bulk(settings: Settings, bulk: BulkNews, kind: EventType) -> dict[str, Any]:
    """Counts are of the moment of the event; a state is said by its type alone."""
    base = _base_url(settings)
    url = f"{base}/v1/bulks/{bulk.id}"
    links = {"self": url, "results": f"{url}/results"}
    data: dict[str, Any] = {
        "id": bulk.id,
        "object": bulk.kind,
        "state": _STATE_OF_EVENT[kind],
        "counts": msgspec.Raw(bulk.counts.encode()),
        "metadata": bulk.metadata,
        "links": links,
    }
    if bulk.kind == "batch":
        links["batch"] = f"{base}/v1/batches/{bulk.id}"
        if kind is not EventType.BATCH_PROGRESS:
            data["output_file_id"] = bulk.output_file_id
            data["error_file_id"] = bulk.error_file_id
    if bulk.errors is not None and kind is not EventType.BATCH_PROGRESS:
        data["errors"] = msgspec.Raw(bulk.errors.encode())
    return data


def _base_url(settings: Settings) -> str:
    return settings.public_url.rstrip("/") or f"http://{settings.host}:{settings.port}"


def _raw(document: bytes | None) -> msgspec.Raw | None:
    return None if document is None else msgspec.Raw(document)


def _parse_result(job: JobRow) -> StoredResult:
    if job.result is None:
        return StoredResult()
    return msgspec.json.decode(job.result, type=StoredResult)


def _find_tensor(job: JobRow, name: str) -> TensorRef | None:
    return next((tensor for tensor in job.tensors if tensor.name == name), None)


async def _read_scores(
    blobs: BlobStore, job: JobRow, result: StoredResult
) -> list[list[float] | None] | None:
    """Return the rows where they are small, None where they are not or cannot be read now."""
    tensor = _find_tensor(job, "scores")
    if tensor is None or job.blob_key is None or tensor.dtype != "F32":
        return None
    if sum(result.label_counts) * _SCORE_CHARACTERS > _MAX_SCORES_BYTES:
        return None
    try:
        raw = await blobs.get_range(job.blob_key, tensor.begin, tensor.end)
    except (NotFoundError, StoreUnavailableError):  # the link is there
        return None
    values = array("f", bytes(raw))
    width = tensor.shape[1]
    failed = {error.index for error in result.errors}
    return [
        None
        if row in failed
        else [float(f"{value:.9g}") for value in values[row * width : row * width + count]]
        for row, count in enumerate(result.label_counts)
    ]
