"""Webhook events: their types, their body, and Standard Webhooks 1.0 signatures.

The only place for signing and verifying. Specification: https://www.standardwebhooks.com.
"""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from contract.errors import InvalidRequestError, SignatureError
from contract.jobs import JobState

__all__ = [
    "BULK_EVENTS",
    "EVENT_OF_STATE",
    "JOB_EVENTS",
    "SUBSCRIBABLE",
    "Event",
    "EventType",
    "check_events",
    "create_secret",
    "sign",
    "verify",
]

_PREFIX = "whsec_"


class EventType(StrEnum):
    """What an event announces."""

    JOB_SUCCEEDED = "job.succeeded"  #: every item has its score
    JOB_PARTIAL = "job.partial"  #: some items failed
    JOB_FAILED = "job.failed"  #: no item has a score
    JOB_CANCELLED = "job.cancelled"  #: stopped by the client
    JOB_EXPIRED = "job.expired"  #: its deadline in the queue passed
    BATCH_PROGRESS = "batch.progress"  #: another twentieth of a bulk's lines has ended
    BATCH_COMPLETED = "batch.completed"  #: every line of a bulk has ended
    BATCH_FAILED = "batch.failed"  #: a bulk's input was refused
    BATCH_CANCELLED = "batch.cancelled"  #: a bulk was stopped by the client
    BATCH_EXPIRED = "batch.expired"  #: a bulk's completion window passed
    WEBHOOK_TEST = "webhook.test"  #: somebody asked for it, to see whether an endpoint works


EVENT_OF_STATE: dict[JobState, EventType] = {
    JobState.SUCCEEDED: EventType.JOB_SUCCEEDED,
    JobState.PARTIAL: EventType.JOB_PARTIAL,
    JobState.FAILED: EventType.JOB_FAILED,
    JobState.CANCELLED: EventType.JOB_CANCELLED,
    JobState.EXPIRED: EventType.JOB_EXPIRED,
}
#: What the webhook of a job may ask for.
JOB_EVENTS: tuple[EventType, ...] = tuple(EVENT_OF_STATE.values())
#: What the webhook of a bulk may ask for.
BULK_EVENTS: tuple[EventType, ...] = tuple(
    kind for kind in EventType if kind.value.startswith("batch.")
)
#: What an endpoint may ask for; the test event comes to whom it is sent, asked for or not.
SUBSCRIBABLE: tuple[EventType, ...] = (*JOB_EVENTS, *BULK_EVENTS)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook body. ``timestamp`` (RFC 3339) is when it happened; ``sequence`` orders them."""

    type: EventType
    timestamp: str
    sequence: int
    data: dict[str, Any]


def check_events(
    names: Sequence[str], *, param: str, among: Sequence[EventType] = SUBSCRIBABLE
) -> None:
    """Raise ``InvalidRequestError`` unless ``names`` are some of ``among``, each once."""
    if not names:
        message = f"{param} is empty; leave it out to get every event"
        raise InvalidRequestError(message, param=param)
    known = sorted(kind.value for kind in among)
    for index, name in enumerate(names):
        if name not in known:
            message = f"there is no event {name[:100]!r} here; there are: {', '.join(known)}"
            raise InvalidRequestError(message, param=f"{param}[{index}]")
        if name in names[:index]:
            message = f"{name} is named twice"
            raise InvalidRequestError(message, param=f"{param}[{index}]")


def create_secret() -> str:
    """Return a new secret: ``whsec_`` and base64 of 32 random bytes."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def sign(secret_list: Sequence[str], *, event_id: str, timestamp: int, body: bytes) -> str:
    """Return the ``webhook-signature`` header: one ``v1,`` signature per valid secret.

    Each is base64 of HMAC-SHA256 over ``id.timestamp.body``; ``timestamp`` is in Unix seconds.
    """
    return " ".join(_signature(secret, event_id, timestamp, body) for secret in secret_list)


def verify(
    body: bytes,
    headers: Mapping[str, str],
    secret: str,
    *,
    tolerance_s: float = 300,
    now: float | None = None,
) -> Event:
    """Return the event in ``body`` if a signature in ``headers`` is ours and fresh.

    ``body`` are the bytes as received, before any parsing. Raises ``SignatureError``.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    try:
        event_id = lower["webhook-id"]
        timestamp = int(lower["webhook-timestamp"])
        given = lower["webhook-signature"].split()
    except (KeyError, ValueError) as error:
        message = (
            "a webhook-id, webhook-timestamp or webhook-signature header is missing or malformed"
        )
        raise SignatureError(message) from error
    if abs((time.time() if now is None else now) - timestamp) > tolerance_s:
        message = f"the timestamp is more than {tolerance_s:g} s from now"
        raise SignatureError(message)
    expected = _signature(secret, event_id, timestamp, body).encode()
    if not any(hmac.compare_digest(expected, candidate.encode()) for candidate in given):
        message = "no signature matches this secret and body"
        raise SignatureError(message)
    try:
        return msgspec.json.decode(body, type=Event)
    except msgspec.DecodeError as error:
        message = f"the body is signed and is not an event: {error}"
        raise SignatureError(message) from error


def _signature(secret: str, event_id: str, timestamp: int, body: bytes) -> str:
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except ValueError as error:
        message = "the secret is not whsec_ and base64"
        raise SignatureError(message) from error
    content = f"{event_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()
