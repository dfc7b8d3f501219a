"""From a request body to a submission: limits, model, webhook, priority, what the job will cost."""

from collections.abc import Mapping

import msgspec
from aiohttp import web

from api.bodies import check_plain_text, is_large, run_for
from api.idempotency import IdempotencyKey, hash_body, parse_key
from api.limits import OWN_LIMITS
from api.middleware import REQUEST_ID
from api.observing import TRACEPARENT
from api.state import CATALOG, SETTINGS, tenant_of
from api.submitter import Submission
from api.webhook_targets import check_webhook
from contract.config import Settings
from contract.errors import InvalidRequestError, TooLargeError
from contract.jobs import Lane
from contract.models import check_request
from contract.origins import Origin, render_origin
from contract.scores import CacheUse, JobRequest, ScoreRequest
from contract.webhooks import JOB_EVENTS
from storage.jobs import NewJob

__all__ = [
    "CHARACTERS_PER_TOKEN",
    "LIMITS",
    "check_limits",
    "estimate_tokens",
    "make_submission",
    "request_key",
]

CHARACTERS_PER_TOKEN = 4
_SPECIAL_TOKENS = 2
_MAX_ESTIMATE = 2**31 - 1
#: Limits of a job's own fields, beside those in the settings.
LIMITS: Mapping[str, int] = {
    "metadata_entries": 16,
    "metadata_key_characters": 64,
    "metadata_value_characters": 512,
    "idempotency_key_characters": 255,
}


async def make_submission(
    request: web.Request,
    body: bytes,
    wanted: ScoreRequest,
    *,
    lane: Lane,
    metadata: Mapping[str, str] | None = None,
    cache: CacheUse = CacheUse.OFF,
) -> Submission:
    """Return what is to be added for ``wanted``, the parsed ``body``.

    ``lane`` is where it waits unless the request names a priority, ``metadata`` what is kept of a
    request that has none of its own, ``cache`` likewise. Raises a ``RequestError`` or
    ``AddressRefusedError`` that names the field.
    """
    settings = request.app[SETTINGS]
    most = min(settings.max_items, request[OWN_LIMITS].items or settings.max_items)
    settings = msgspec.structs.replace(settings, max_items=most)
    tokens = await run_for(body, lambda: check_limits(wanted, settings))
    status = await request.app[CATALOG].resolve(wanted.model)
    extras = JobRequest(items=[], metadata=dict(metadata or {}), cache=cache)
    if isinstance(wanted, JobRequest):
        extras = wanted

    def finish() -> tuple[bytes, IdempotencyKey | None]:
        if status.description is not None:
            check_request(wanted, status.description)
        check_webhook(extras.webhook, extras.webhook_events, settings, among=JOB_EVENTS)
        _check_metadata(extras)
        encode = _encode_in_slices if is_large(body) else _encode_request
        return encode(wanted, status.name), request_key(request, body)

    encoded, key = await run_for(body, finish)
    job = NewJob(
        tenant=tenant_of(request),
        model=status.name,
        lane=extras.priority or lane,
        request=encoded,
        item_count=len(wanted.item_list),
        estimated_tokens=tokens,
        metadata=extras.metadata or {},
        webhook_url=extras.webhook,
        webhook_events=extras.webhook_events,
        queue_deadline_s=extras.queue_deadline_s,
        run_timeout_s=extras.run_timeout_s,
        expires_after_s=extras.expires_after_s or settings.result_ttl_s or None,
        cache=None if extras.cache is CacheUse.OFF else extras.cache.value,
        origin=render_origin(
            Origin(request_id=request[REQUEST_ID], traceparent=request[TRACEPARENT])
        ),
    )
    return Submission(job, key)


def request_key(request: web.Request, body: bytes) -> IdempotencyKey | None:
    """Return the request's idempotency key with what it is the key of, or None."""
    key = parse_key(request.headers.getall("Idempotency-Key", []))
    if key is None:
        return None
    # what the query string says is part of what is asked, as ``?model=`` on compatible routes
    told = body + request.query_string.encode() if request.query_string else body
    return IdempotencyKey(f"{request.method} {request.path}", key, hash_body(told))


def estimate_tokens(request: ScoreRequest) -> int:
    """Return about how many tokens the job costs; exact for token ids, else from characters.

    Query, instruction and every label count once per item: that is how often they are looked at.
    """
    around = _tokens_of(request.query or "") + _pieces_of(request.instruction or "")
    around += sum(_pieces_of(label) for label in request.labels or [])
    total = sum(around + _tokens_of(item) for item in request.item_list)
    total += sum(_pieces_of(query) for query in request.queries or [])
    return min(total, _MAX_ESTIMATE)  # what the store's column holds


def _tokens_of(part: str | list[int]) -> int:
    if isinstance(part, str):
        return _pieces_of(part) + _SPECIAL_TOKENS
    return len(part)


def _pieces_of(text: str) -> int:
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def _count_scores(request: ScoreRequest) -> int:
    """Return how many scores the request asks for by name: items times labels."""
    ids = request.label_token_ids or []
    if any(isinstance(entry, list) for entry in ids):
        return sum(len(entry) for entry in ids if isinstance(entry, list))
    return len(request.item_list) * len(request.labels or ids)


def _encode_request(wanted: ScoreRequest, model: str, *, items: msgspec.Raw | None = None) -> bytes:
    """Encode the scoring part alone, under the model's resolved name."""
    fields = {name: getattr(wanted, name) for name in ScoreRequest.__struct_fields__}
    fields["model"] = model
    if items is not None:
        fields["items"] = items
    return msgspec.json.encode(ScoreRequest(**fields))


def _encode_in_slices(wanted: ScoreRequest, model: str) -> bytes:
    """Do what ``_encode_request`` does, item by item: other threads run between them."""
    items = b",".join([msgspec.json.encode(item) for item in wanted.item_list])
    return _encode_request(wanted, model, items=msgspec.Raw(b"[" + items + b"]"))


def check_limits(wanted: ScoreRequest, settings: Settings) -> int:
    """Check everything that no model is needed for; return about how many tokens there are."""
    _check_items_limit(wanted, settings)
    wanted.check(max_items=settings.max_items)
    scores = _count_scores(wanted)
    if scores > settings.max_scores:
        message = (
            f"items times labels are {scores} scores, which exceed the limit max_scores of "
            f"{settings.max_scores}; split the items over several jobs"
        )
        raise TooLargeError(message, param="items")
    tokens = estimate_tokens(wanted)
    if tokens > settings.max_job_tokens:
        message = (
            f"about {tokens} tokens, query and labels counted once per item, exceed the limit "
            f"max_job_tokens of {settings.max_job_tokens}; split them over several jobs"
        )
        raise TooLargeError(message, param="items")
    return tokens


def _check_items_limit(wanted: ScoreRequest, settings: Settings) -> None:
    count = len(wanted.item_list)
    if count > settings.max_items:
        message = (
            f"{count} items exceed the limit max_items of {settings.max_items}; "
            "split them over several jobs"
        )
        raise TooLargeError(message, param="items")


def _check_metadata(extras: JobRequest) -> None:
    for key, value in (extras.metadata or {}).items():
        path = f"metadata.{check_plain_text(key, 'metadata')[:64]}"
        check_plain_text(value, path)
        if not 1 <= len(key) <= LIMITS["metadata_key_characters"]:
            message = f"a metadata key has 1 to {LIMITS['metadata_key_characters']} characters"
            raise InvalidRequestError(message, param=path)
        if len(value) > LIMITS["metadata_value_characters"]:
            message = f"a metadata value has up to {LIMITS['metadata_value_characters']} characters"
            raise InvalidRequestError(message, param=path)
