"""What each route takes and answers: the only table of it. A test holds it against the routes."""

from dataclasses import dataclass
from typing import Any

from api.bulk.comparing import Comparison
from api.bulk.exports import ARROW, JSONL, PARQUET
from api.negotiation import SAFETENSORS
from api.pages import MAX_PAGE
from contract import compatible, shapes
from contract.bulks import BatchRequest, Bulk, BulkRequest, RescoreRequest
from contract.endpoints import (
    Delivery,
    Disabling,
    Endpoint,
    EndpointRequest,
    EndpointUpdate,
    RedeliveryRequest,
    SentTest,
)
from contract.jobs import JobState
from contract.overview import Overview
from contract.scores import CacheUse, Job, JobRequest, ScoreRequest, ScoreResponse, Scores

__all__ = ["OPERATIONS", "PATH_PATTERNS", "Operation", "Parameter"]

#: Media that are not JSON, by the name an operation uses for them.
EVENTS = "text/event-stream"
BYTES = "application/octet-stream"
TEXT = "text/plain"
HTML = "text/html"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter or a header, with its JSON schema."""

    name: str
    schema: dict[str, Any]
    text: str
    place: str = "query"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    ``body`` and the values of ``answers`` are types, tuples of alternatives, media types of what
    is not JSON, or None for nothing. ``errors`` are statuses beside those that any route may give.
    """

    tag: str
    answers: dict[int, Any]
    body: Any = None
    needs_body: bool = True
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = ()
    text: str = ""


_LIMIT = Parameter(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 50},
    "How many rows a page has.",
)
_CURSOR = Parameter(
    "cursor", {"type": "string", "minLength": 1}, "``next_cursor`` of the page before."
)
_PREFER = Parameter(
    "Prefer",
    {"type": "string"},
    "``respond-async`` or ``wait=SECONDS`` (RFC 7240).",
    "header",
)
_RANGE = Parameter("Range", {"type": "string"}, "One range of bytes.", "header")
_MODEL = Parameter("model", {"type": "string"}, "The model, where the body names none.")
_CACHE = Parameter(
    "cache",
    {"type": "string", "enum": [each.value for each in CacheUse]},
    "What is done with scores that are known: `off` unless said.",
)
_ENCODING = Parameter(
    "encoding_format",
    {"enum": ["float", "base64"]},
    "JSON in place of a safetensors file.",
)
_STATE = Parameter("state", {"enum": [str(each) for each in JobState]}, "Only jobs in that state.")
_DELIVERY_STATE = Parameter(
    "state", {"enum": ["pending", "delivered", "dead"]}, "Only deliveries in that state."
)
_DELIVERIES = Operation(
    "webhooks",
    {200: shapes.Page[Delivery]},
    parameters=(_DELIVERY_STATE, _LIMIT, _CURSOR),
    errors=(404, 410, 422),
)
_NUMBER = {"type": "string", "pattern": "^[0-9]{1,15}$"}


def _after(kind: str) -> Parameter:
    return Parameter("after", {"type": "string", "pattern": _id(kind)}, "The last id seen.")


def _id(kind: str) -> str:
    return f"^{kind}_[0-9a-f]{{32}}$"


def _score(body: Any, answer: Any, text: str) -> Operation:  # noqa: ANN401  # types
    """A scoring route of another service's: it waits, and is a job behind it."""
    return Operation(
        "compatible",
        {200: answer, 202: Job},
        body=body,
        parameters=(_PREFER, _MODEL, _CACHE),
        errors=(404, 409, 410, 413, 415, 422, 500, 504),
        text=text,
    )


_PAIRS = _score(
    (ScoreRequest, compatible.PairRequest),
    (ScoreResponse, compatible.PairsAnswer),
    "Score: SGLang's request (query, items, labels), or vLLM's (queries and documents, queries "
    "and items, text_1 and text_2, data_1 and data_2).",
)
_RERANK = _score(
    (compatible.RerankRequest, compatible.RerankTextsRequest),
    (compatible.RerankAnswer, list[compatible.RankedText]),
    "Rerank: Cohere's, Jina's and vLLM's request (documents), or TEI's (texts).",
)
_CLASSIFY = _score(compatible.ClassifyRequest, compatible.ClassifyAnswer, "Classify, as vLLM does.")
_JOB = (404, 410)
_LAST_EVENT = Parameter(
    "Last-Event-ID",
    {"type": "string", "pattern": "^[0-9]{1,18}$"},
    "Go on after that event.",
    "header",
)
_BULK_ACTION = Operation("bulks", {202: Bulk}, errors=(404, 409, 413, 422))
_BULK_PAUSE = Operation("bulks", {200: Bulk}, errors=(404, 409, 413, 422))
_VECTORS = (404, 409, 416)

#: The form of each path parameter, by the path's beginning; longer ones come first.
PATH_PATTERNS: tuple[tuple[str, dict[str, str]], ...] = (
    ("/v1/jobs/", {"id": _id("job"), "a": _id("job"), "b": _id("job"), "index": "^[0-9]{1,9}$"}),
    ("/v1/bulks/", {"id": _id("blk"), "a": _id("blk"), "b": _id("blk")}),
    ("/v1/batches/", {"id": _id("blk")}),
    ("/v1/files/", {"id": _id("fil")}),
    ("/v1/deliveries/", {"id": _id("dlv")}),
    ("/v1/webhook_endpoints/", {"id": _id("whe")}),
)

#: By method and path.
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/jobs"): Operation(
        "jobs",
        {200: Job, 202: Job},
        body=JobRequest,
        parameters=(_PREFER,),
        errors=(404, 410, 413, 415, 422),
    ),
    ("GET", "/v1/jobs"): Operation(
        "jobs",
        {200: shapes.Page[Job]},
        parameters=(
            _STATE,
            Parameter("model", {"type": "string"}, "Only jobs of that model."),
            Parameter("bulk", {"type": "string", "pattern": _id("blk")}, "Only jobs of that bulk."),
            Parameter(
                "error_code", {"type": "string", "pattern": "^[a-z_]{1,64}$"}, "Only that error's."
            ),
            _LIMIT,
            _CURSOR,
        ),
        errors=(404, 422),
        text="``metadata.KEY=VALUE`` filters by metadata.",
    ),
    ("GET", "/v1/jobs/{id}/request"): Operation("jobs", {200: ScoreRequest}, errors=_JOB),
    ("GET", "/v1/jobs/{id}"): Operation(
        "jobs",
        {200: Job, 304: None},
        parameters=(
            Parameter(
                "wait",
                {"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,9})?$"},
                "Answer at the job's end, or after so many seconds.",
            ),
            Parameter("If-None-Match", {"type": "string"}, "An ``ETag`` seen before.", "header"),
        ),
        errors=(*_JOB, 422),
    ),
    ("POST", "/v1/jobs/{id}/cancel"): Operation(
        "jobs", {200: Job, 202: Job}, errors=(*_JOB, 409, 422)
    ),
    ("POST", "/v1/jobs/{id}/retry"): Operation("jobs", {202: Job}, errors=(*_JOB, 409, 422)),
    ("DELETE", "/v1/jobs/{id}"): Operation("jobs", {204: None}, errors=(*_JOB, 409)),
    ("GET", "/v1/jobs/{id}/scores"): Operation(
        "results", {200: (Scores, SAFETENSORS)}, errors=(*_JOB, 406, 409)
    ),
    ("GET", "/v1/jobs/{id}/hidden_states"): Operation(
        "results",
        {200: (shapes.HiddenStates, SAFETENSORS), 206: SAFETENSORS, 304: None},
        parameters=(_ENCODING, _RANGE),
        errors=(*_JOB, 406, 409, 413, 416, 422),
    ),
    ("GET", "/v1/jobs/{id}/items/{index}/hidden_state"): Operation(
        "results",
        {200: (shapes.HiddenStates, SAFETENSORS), 206: SAFETENSORS, 304: None},
        parameters=(_ENCODING, _RANGE),
        errors=(*_JOB, 406, 409, 413, 416, 422),
    ),
    ("GET", "/v1/jobs/{id}/events"): Operation(
        "jobs",
        {200: EVENTS, 204: None},
        parameters=(_LAST_EVENT,),
        errors=(*_JOB, 422),
    ),
    ("POST", "/score"): _PAIRS,
    ("POST", "/v1/score"): _PAIRS,
    ("POST", "/rerank"): _RERANK,
    ("POST", "/v1/rerank"): _RERANK,
    ("POST", "/v2/rerank"): _RERANK,
    ("POST", "/classify"): _CLASSIFY,
    ("POST", "/v1/classify"): _CLASSIFY,
    ("POST", "/predict"): _score(
        compatible.PredictRequest,
        (list[compatible.Prediction], list[list[compatible.Prediction]]),
        "Classify, as TEI does.",
    ),
    ("GET", "/v1/models"): Operation("service", {200: shapes.ModelList}),
    ("GET", "/v1/models/{id}"): Operation("service", {200: shapes.Model}, errors=(404,)),
    ("GET", "/v1/limits"): Operation("service", {200: dict[str, float]}),
    ("GET", "/healthz"): Operation("service", {200: shapes.Health}),
    ("GET", "/readyz"): Operation("service", {200: shapes.Readiness, 503: shapes.Readiness}),
    ("GET", "/metrics"): Operation("service", {200: TEXT}),
    ("GET", "/"): Operation("service", {200: HTML, 304: None}),
    ("GET", "/dashboard/{version}/{name}"): Operation(
        "service", {200: BYTES, 304: None}, errors=(404,)
    ),
    ("GET", "/v1/overview"): Operation("service", {200: Overview}),
    ("GET", "/v1/overview/events"): Operation("service", {200: EVENTS}),
    ("GET", "/v1/workers"): Operation("service", {200: shapes.WorkerList}),
    ("GET", "/openapi.json"): Operation("service", {200: dict[str, Any]}),
    ("GET", "/docs"): Operation("service", {200: HTML}),
    ("GET", "/docs/{file}"): Operation("service", {200: BYTES}, errors=(404,)),
    ("GET", "/v1/webhooks/default/secret"): Operation("webhooks", {200: shapes.WebhookSecrets}),
    ("POST", "/v1/webhooks/default/rotate"): Operation(
        "webhooks", {200: shapes.WebhookSecrets}, errors=(422,)
    ),
    ("POST", "/v1/webhook_endpoints"): Operation(
        "webhooks", {201: Endpoint}, body=EndpointRequest, errors=(404, 409, 410, 413, 415, 422)
    ),
    ("GET", "/v1/webhook_endpoints"): Operation("webhooks", {200: shapes.EndpointList}),
    ("GET", "/v1/webhook_endpoints/{id}"): Operation("webhooks", {200: Endpoint}, errors=(404,)),
    ("PATCH", "/v1/webhook_endpoints/{id}"): Operation(
        "webhooks", {200: Endpoint}, body=EndpointUpdate, errors=(404, 413, 415, 422)
    ),
    ("DELETE", "/v1/webhook_endpoints/{id}"): Operation("webhooks", {204: None}, errors=(404,)),
    ("POST", "/v1/webhook_endpoints/{id}/rotate"): Operation(
        "webhooks", {200: Endpoint}, errors=(404, 422)
    ),
    ("POST", "/v1/webhook_endpoints/{id}/disable"): Operation(
        "webhooks",
        {200: Endpoint},
        body=Disabling,
        needs_body=False,
        errors=(404, 409, 413, 415, 422),
    ),
    ("POST", "/v1/webhook_endpoints/{id}/enable"): Operation(
        "webhooks", {200: Endpoint}, errors=(404, 409, 422)
    ),
    ("POST", "/v1/webhook_endpoints/{id}/test"): Operation(
        "webhooks", {202: SentTest}, errors=(404, 409, 422)
    ),
    ("GET", "/v1/jobs/{id}/deliveries"): _DELIVERIES,
    ("GET", "/v1/webhook_endpoints/{id}/deliveries"): _DELIVERIES,
    ("GET", "/v1/bulks/{id}/deliveries"): _DELIVERIES,
    ("GET", "/v1/deliveries/{id}"): Operation("webhooks", {200: Delivery}, errors=(404,)),
    ("POST", "/v1/deliveries/redeliver"): Operation(
        "webhooks",
        {202: shapes.Redelivered},
        body=RedeliveryRequest,
        errors=(404, 413, 415, 422),
    ),
    ("POST", "/v1/deliveries/{id}/redeliver"): Operation(
        "webhooks", {202: Delivery}, errors=(404, 409, 410, 422)
    ),
    ("POST", "/v1/files"): Operation(
        "batches", {200: shapes.FileObject}, body="multipart/form-data", errors=(413, 422)
    ),
    ("GET", "/v1/files"): Operation(
        "batches",
        {200: shapes.FileList},
        parameters=(
            _LIMIT,
            _after("fil"),
            Parameter("purpose", {"type": "string"}, "Only files of that purpose."),
        ),
        errors=(404, 422),
    ),
    ("GET", "/v1/files/{id}"): Operation("batches", {200: shapes.FileObject}, errors=(404,)),
    ("GET", "/v1/files/{id}/content"): Operation("batches", {200: BYTES}, errors=(404, 410)),
    ("DELETE", "/v1/files/{id}"): Operation("batches", {200: shapes.DeletedFile}, errors=(404,)),
    ("POST", "/v1/batches"): Operation(
        "batches", {200: shapes.Batch}, body=BatchRequest, errors=(404, 413, 415, 422)
    ),
    ("GET", "/v1/batches"): Operation(
        "batches",
        {200: shapes.BatchList},
        parameters=(_LIMIT, _after("blk")),
        errors=(404, 422),
    ),
    ("GET", "/v1/batches/{id}"): Operation("batches", {200: shapes.Batch}, errors=(404,)),
    ("POST", "/v1/batches/{id}/cancel"): Operation(
        "batches", {200: shapes.Batch}, errors=(404, 409, 413, 422)
    ),
    ("POST", "/v1/bulks"): Operation(
        "bulks", {202: Bulk}, body=BulkRequest, errors=(404, 413, 415, 422)
    ),
    ("GET", "/v1/bulks"): Operation(
        "bulks",
        {200: shapes.BulkList},
        parameters=(
            _LIMIT,
            _after("blk"),
            Parameter("key", {"type": "string"}, "The idempotency key of the one looked for."),
        ),
        errors=(404, 422),
    ),
    ("GET", "/v1/bulks/{id}"): Operation("bulks", {200: Bulk}, errors=(404,)),
    ("GET", "/v1/bulks/{id}/results"): Operation(
        "bulks",
        {200: (JSONL, PARQUET, ARROW)},
        parameters=(Parameter("after", _NUMBER, "The last line seen."),),
        errors=(404, 406, 409, 422),
    ),
    ("GET", "/v1/bulks/{id}/events"): Operation(
        "bulks",
        {200: (shapes.BulkEvents, EVENTS), 204: None},
        parameters=(
            Parameter("after", _NUMBER, "The last sequence number seen."),
            _LAST_EVENT,
        ),
        errors=(404, 406, 422),
    ),
    ("POST", "/v1/bulks/{id}/cancel"): _BULK_ACTION,
    ("POST", "/v1/bulks/{id}/pause"): _BULK_PAUSE,
    ("POST", "/v1/bulks/{id}/resume"): _BULK_PAUSE,
    ("POST", "/v1/bulks/{id}/retry"): _BULK_ACTION,
    ("DELETE", "/v1/bulks/{id}"): Operation("bulks", {204: None}, errors=(404, 409)),
    ("POST", "/v1/rescore"): Operation(
        "bulks", {202: Bulk}, body=RescoreRequest, errors=(404, 409, 410, 413, 415, 422)
    ),
    ("GET", "/v1/jobs/{a}/compare/{b}"): Operation(
        "results", {200: Comparison}, errors=(*_JOB, 409)
    ),
    ("GET", "/v1/bulks/{a}/compare/{b}"): Operation("bulks", {200: Comparison}, errors=(404, 409)),
    ("GET", "/v1/bulks/{id}/hidden_states"): Operation(
        "bulks", {200: shapes.HiddenStatesIndex}, errors=(404, 409)
    ),
    ("GET", "/v1/bulks/{id}/hidden_states/ids.jsonl"): Operation(
        "bulks", {200: JSONL}, errors=(404, 409)
    ),
    ("GET", "/v1/bulks/{id}/hidden_states/{file}"): Operation(
        "bulks",
        {200: SAFETENSORS, 206: SAFETENSORS, 304: None},
        parameters=(_RANGE,),
        errors=(404, 406, 409, 416),
    ),
}
