"""Answers that no other module needs as a type: lists, health, OpenAI's files and batches.

The only place for their fields; the API's description is made of them, and tests decode what the
routes answer with them.
"""

from typing import Any, Generic, Literal, TypeVar

import msgspec

from contract.bulks import Bulk
from contract.models import ModelDescription, ModelState
from contract.scores import ItemError

__all__ = [
    "Batch",
    "BatchErrors",
    "BatchList",
    "BulkEvent",
    "BulkEvents",
    "BulkList",
    "Counts",
    "DeletedFile",
    "EndpointList",
    "FileList",
    "FileObject",
    "Health",
    "HiddenStatesIndex",
    "Model",
    "ModelList",
    "OpenAIError",
    "OpenAIFault",
    "Page",
    "Readiness",
    "Reason",
    "Redelivered",
    "TeiError",
    "WebhookSecrets",
    "Worker",
    "WorkerList",
]

_T = TypeVar("_T")


class Page(msgspec.Struct, Generic[_T], frozen=True, kw_only=True):
    """Some of a list, newest first. ``next_cursor`` is null on the last page."""

    object: Literal["list"]
    data: list[_T]
    has_more: bool
    next_cursor: str | None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model as ``GET /v1/models`` lists it; ``reason`` says why it is not ready."""

    id: str
    object: Literal["model"] = "model"
    owned_by: str = "scorekeep"
    state: ModelState
    reason: str | None = None
    description: ModelDescription | None = None


class ModelList(msgspec.Struct, frozen=True):
    """What is served."""

    object: Literal["list"]
    data: list[Model]


class Health(msgspec.Struct, frozen=True):
    """The process lives."""

    status: Literal["ok"]


class Reason(msgspec.Struct, frozen=True):
    """Why the service is not ready, or a part of it is not."""

    part: str
    code: str
    detail: str


class Readiness(msgspec.Struct, frozen=True):
    """Whether a job would be taken and scored."""

    ready: bool
    reasons: list[Reason]
    models: dict[str, ModelState]


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process; ``alive`` while its heart beats."""

    id: str
    object: Literal["worker"]
    alive: bool
    heartbeat_age_s: float
    host: str
    pid: int
    device: str
    models: dict[str, ModelState]


class WorkerList(msgspec.Struct, frozen=True):
    """Workers, also those that stopped answering within the last hour."""

    object: Literal["list"]
    data: list[Worker]


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file as OpenAI's clients read it."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, frozen=True):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchErrors(msgspec.Struct, frozen=True):
    """Why lines of a batch were refused."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class Counts(msgspec.Struct, frozen=True):
    """Lines of a batch, live."""

    total: int
    completed: int
    failed: int


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A bulk as OpenAI's clients read it. Moments are whole Unix seconds."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str | None
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BulkList(msgspec.Struct, frozen=True):
    """A page of bulks, newest first."""

    object: Literal["list"]
    data: list[Bulk]
    has_more: bool


class BulkEvent(msgspec.Struct, frozen=True):
    """Something that happened to a bulk."""

    sequence: int
    id: str
    type: str
    timestamp: str
    data: dict[str, Any]


class BulkEvents(msgspec.Struct, frozen=True):
    """A bulk's events, in order."""

    object: Literal["list"]
    data: list[BulkEvent]


class HiddenStatesIndex(msgspec.Struct, frozen=True):
    """Which files hold a bulk's hidden states."""

    metadata: dict[str, Any]
    tensor: str
    ids: str
    shards: list[dict[str, Any]]


class WebhookSecrets(msgspec.Struct, frozen=True):
    """What signs webhooks to the URLs of jobs, the newest first."""

    object: Literal["webhook_secret"]
    key: str
    secrets: list[str]


class EndpointList(msgspec.Struct, frozen=True):
    """A tenant's webhook endpoints, oldest first."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: Literal[False]


class Redelivered(msgspec.Struct, frozen=True):
    """How many deliveries are sent again."""

    object: Literal["redelivery"]
    count: int


class OpenAIFault(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What went wrong, in the words of OpenAI, SGLang and vLLM."""

    message: str
    type: str
    code: str
    param: str | None
    request_id: str
    errors: list[ItemError] = []


class OpenAIError(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An error on the routes of that family; ``id`` and ``message`` on Cohere's alone."""

    error: OpenAIFault
    id: str | msgspec.UnsetType = msgspec.UNSET
    message: str | msgspec.UnsetType = msgspec.UNSET


class TeiError(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An error on TEI's routes."""

    error: str
    error_type: str
    code: str
    param: str | None
    request_id: str
    errors: list[ItemError] = []
