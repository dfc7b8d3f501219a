"""Webhook endpoints and deliveries as they travel: what clients send, and what they get."""

from typing import Annotated, Literal

import msgspec

__all__ = [
    "DeliveredAttempt",
    "Delivery",
    "Disabling",
    "Endpoint",
    "EndpointRequest",
    "EndpointUpdate",
    "RedeliveryRequest",
    "SentTest",
]

_Text = Annotated[str, msgspec.Meta(max_length=512)]


class EndpointRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new endpoint. ``events`` None means all of them, also those that come with later versions.

    ``webhook.test`` comes when it is asked for, whatever ``events`` says.
    """

    url: str
    events: list[str] | None = None
    description: _Text = ""


class EndpointUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to change; what is left out stays."""

    url: str | msgspec.UnsetType = msgspec.UNSET
    events: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    description: _Text | msgspec.UnsetType = msgspec.UNSET


class Disabling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why an endpoint is disabled; kept with it."""

    reason: _Text = "disabled by its owner"


class RedeliveryRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which deliveries to send again: of events since a moment, and before ``until``."""

    since: str
    until: str | None = None
    endpoint: str | None = None
    state: Literal["dead", "delivered", "any"] = "dead"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint. ``secret`` is there once: in the answer that made it.

    ``failing_since`` is the first failed attempt since the last that was taken.
    """

    id: str
    object: str = "webhook_endpoint"
    url: str
    description: str
    events: list[str] | None
    state: Literal["enabled", "disabled"]
    created_at: str
    updated_at: str
    failing_since: str | None = None
    disabled_at: str | None = None
    disabled_reason: str | None = None
    old_secret_until: str | None = None
    secret: str | msgspec.UnsetType = msgspec.UNSET


class DeliveredAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt: an HTTP ``status`` and the first 2 kB of the answer, or the ``error``."""

    attempt: int
    at: str
    latency_s: float
    status: int | None = None
    error: str | None = None
    answer: str | None = None


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """An event on its way to one receiver, about a job, a bulk, or neither: a test.

    ``endpoint`` is null for the URL of a job or a bulk.

    ``next_attempt_at`` is there while it is pending, ``reason`` when it is dead.
    """

    id: str
    object: str = "webhook_delivery"
    event: str
    type: str
    job: str | None
    bulk: str | None = None
    endpoint: str | None
    url: str
    state: Literal["pending", "delivered", "dead"]
    created_at: str
    next_attempt_at: str | None = None
    finished_at: str | None = None
    reason: str | None = None
    attempts: list[DeliveredAttempt]


class SentTest(msgspec.Struct, frozen=True, kw_only=True):
    """A test event that was written: the ids under which it will be found."""

    event: str
    delivery: str
