"""Bulks: many lines under one handle, their states, and what clients send and see.

The OpenAI-compatible routes call a bulk a batch, on the wire only.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec

from contract.jobs import Lane
from contract.scores import (
    Activation,
    CacheUse,
    Determinism,
    Instruction,
    ItemError,
    LabelTokenIds,
    Limit,
    Mode,
    Truncation,
    TruncationSide,
)

__all__ = [
    "BATCH_STATUS",
    "ENDED_BULKS",
    "LONGEST_FILE_S",
    "BatchRequest",
    "Bulk",
    "BulkCounts",
    "BulkEventType",
    "BulkRequest",
    "BulkResult",
    "BulkState",
    "CacheUse",
    "ChangedParameters",
    "LineError",
    "RescoreRequest",
    "RescoreSource",
]

#: The longest that a file may be asked to be kept.
LONGEST_FILE_S = 365 * 86400

_Metadata = Annotated[dict[str, str], msgspec.Meta(max_length=16)]
_Retention = Annotated[float, msgspec.Meta(gt=0, le=10 * 365 * 86400)]


class BulkState(StrEnum):
    """Where a bulk stands. The value is what SQL rows and JSON bodies carry."""

    VALIDATING = "validating"  #: every line is read once before anything runs
    RUNNING = "running"  #: lines are stored and scored
    FINALIZING = "finalizing"  #: everything has ended, output files are being written
    COMPLETED = "completed"  #: every line has its scores or its error
    FAILED = "failed"  #: the input was refused; nothing ran
    CANCELLING = "cancelling"  #: asked to stop; what runs is let go
    CANCELLED = "cancelled"  #: stopped; what was scored before is kept
    EXPIRED = "expired"  #: its completion window passed; what was scored is kept


ENDED_BULKS = frozenset(
    {BulkState.COMPLETED, BulkState.FAILED, BulkState.CANCELLED, BulkState.EXPIRED}
)

#: What the OpenAI-compatible routes say for a state.
BATCH_STATUS: dict[BulkState, str] = {
    state: "in_progress" if state is BulkState.RUNNING else state.value for state in BulkState
}


class BulkEventType(StrEnum):
    """What an event of a bulk announces."""

    IN_PROGRESS = "batch.in_progress"  #: validated; lines run
    PROGRESS = "batch.progress"  #: counts have moved
    COMPLETED = "batch.completed"  #: every line has ended
    FAILED = "batch.failed"  #: the input was refused
    CANCELLED = "batch.cancelled"  #: stopped by the client
    EXPIRED = "batch.expired"  #: its completion window passed


class LineError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a line of the input was refused. ``line`` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BulkRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/bulks``.

    ``parameters`` are fields of a score request for every line; a line's own win. ``columns``
    names the input's columns for ``item``, ``query`` and ``id``.
    """

    input_file_id: str | None = None
    input_uri: str | None = None
    model: str | None = None
    parameters: dict[str, Any] = {}
    columns: dict[str, str] = {}
    hidden_states: bool = False
    on_invalid: Literal["fail", "skip"] = "fail"
    cache: CacheUse = CacheUse.READ
    priority: Lane = Lane.BULK
    metadata: _Metadata = {}
    expires_after_s: _Retention | None = None
    webhook: str | None = None
    webhook_events: list[str] | None = None


class RescoreSource(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What was scored before: one of these.

    A ``batch`` is a bulk under OpenAI's name. ``filter`` takes ``model``, ``state`` and
    ``metadata.KEY`` of jobs.
    """

    bulk: str | None = None
    batch: str | None = None
    jobs: Annotated[list[str], msgspec.Meta(max_length=10_000)] | None = None
    filter: dict[str, str] | None = None


class ChangedParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of a score request that are to be others; what is left out stays as it was."""

    instruction: Instruction | msgspec.UnsetType | None = msgspec.UNSET
    label_token_ids: LabelTokenIds | msgspec.UnsetType | None = msgspec.UNSET
    labels: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    apply_softmax: bool | msgspec.UnsetType = msgspec.UNSET
    temperature: Annotated[float, msgspec.Meta(gt=0)] | msgspec.UnsetType = msgspec.UNSET
    item_first: bool | msgspec.UnsetType = msgspec.UNSET
    return_token_logprobs: bool | msgspec.UnsetType = msgspec.UNSET
    return_label_mass: bool | msgspec.UnsetType = msgspec.UNSET
    return_pooled_hidden_states: bool | msgspec.UnsetType = msgspec.UNSET
    activation: Activation | msgspec.UnsetType | None = msgspec.UNSET
    truncation: Truncation | msgspec.UnsetType = msgspec.UNSET
    truncation_side: TruncationSide | msgspec.UnsetType | None = msgspec.UNSET
    max_tokens: Limit | msgspec.UnsetType | None = msgspec.UNSET
    max_item_tokens: Limit | msgspec.UnsetType | None = msgspec.UNSET
    multi_token: bool | msgspec.UnsetType = msgspec.UNSET
    mode: Mode | msgspec.UnsetType = msgspec.UNSET
    determinism: Determinism | msgspec.UnsetType | None = msgspec.UNSET

    @property
    def parameters(self) -> dict[str, Any]:
        """The fields that were given."""
        names = ChangedParameters.__struct_fields__
        given = {name: getattr(self, name) for name in names}
        kept: dict[str, Any] = msgspec.to_builtins(
            {name: value for name, value in given.items() if value is not msgspec.UNSET}
        )
        return kept


class RescoreRequest(ChangedParameters, kw_only=True):
    """The body of ``POST /v1/rescore``: what was scored before, with something changed.

    ``model`` and the score request's parameters say what; all are at the top.
    """

    source: RescoreSource
    model: str | None = None
    cache: CacheUse = CacheUse.READ
    priority: Lane = Lane.BULK
    metadata: _Metadata = {}
    expires_after_s: _Retention | None = None
    webhook: str | None = None
    webhook_events: list[str] | None = None


class BulkCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a bulk so far. ``from_cache`` items are among the scored."""

    lines: int = 0
    lines_completed: int = 0
    lines_failed: int = 0
    lines_cancelled: int = 0
    items: int = 0
    scored: int = 0
    failed: int = 0
    cancelled: int = 0
    from_cache: int = 0
    tokens: int = 0
    estimated_tokens: int = 0


class Bulk(msgspec.Struct, frozen=True, kw_only=True):
    """A bulk as ``GET /v1/bulks/{id}`` shows it. Moments are RFC 3339 in UTC."""

    id: str
    object: str = "bulk"
    state: BulkState
    paused: bool = False
    model: str | None = None
    counts: BulkCounts
    ingested_lines: int = 0
    items_per_s: float | None = None
    eta_s: float | None = None
    created_at: str
    started_at: str | None = None
    finished_at: str | None = None
    metadata: dict[str, str] = {}
    cache: CacheUse = CacheUse.READ
    hidden_states: bool = False
    source: dict[str, Any] = {}
    errors: list[LineError] = []
    links: dict[str, str] = {}


class BulkResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a bulk's results. ``line`` counts from 1; ``scores`` has a row per item."""

    line: int
    custom_id: str
    model: str | None = None
    labels: list[str | int | list[int]] = []
    scores: list[list[float] | None] = []
    errors: list[ItemError] = []


class _OutputExpiry(msgspec.Struct, forbid_unknown_fields=True):
    anchor: str
    seconds: Annotated[int, msgspec.Meta(gt=0, le=LONGEST_FILE_S)]


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``POST /v1/batches``, OpenAI's with ``on_invalid`` of ours."""

    input_file_id: str
    endpoint: Literal["/v1/score", "/v1/rerank", "/v1/classify"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None
    output_expires_after: _OutputExpiry | None = None
    on_invalid: Literal["fail", "skip"] = "fail"
    webhook: str | None = None
    webhook_events: list[str] | None = None
