"""Rows of endpoints and deliveries made into what clients see; a secret only where it is given."""

import msgspec

from contract.endpoints import DeliveredAttempt, Delivery, Endpoint
from contract.moments import render_moment
from storage.delivery_log import DeliveryRow
from storage.endpoints import EndpointRow

__all__ = ["render_delivery", "render_endpoint"]


def render_endpoint(row: EndpointRow, *, secret: str | None = None) -> Endpoint:
    """Return the endpoint as its owner sees it, with ``secret`` where it has just been made."""
    return Endpoint(
        id=row.id,
        url=row.url,
        description=row.description,
        events=row.events,
        state="enabled" if row.disabled_at is None else "disabled",
        created_at=render_moment(row.created_at),
        updated_at=render_moment(row.updated_at),
        failing_since=render_moment(row.failing_since_at),
        disabled_at=render_moment(row.disabled_at),
        disabled_reason=row.disabled_reason,
        old_secret_until=render_moment(row.old_secret_until_at),
        secret=msgspec.UNSET if secret is None else secret,
    )


def render_delivery(row: DeliveryRow) -> Delivery:
    """Return the delivery with its attempts, oldest first."""
    return Delivery(
        id=row.id,
        event=row.event_id,
        type=row.event_type,
        job=row.job_id,
        bulk=row.bulk_id,
        endpoint=row.endpoint_id or None,
        url=row.url,
        state=row.state,
        created_at=render_moment(row.created_at),
        next_attempt_at=render_moment(row.due_at) if row.state == "pending" else None,
        finished_at=render_moment(row.finished_at),
        reason=row.reason,
        attempts=[
            DeliveredAttempt(
                attempt=attempt.attempt,
                at=render_moment(attempt.created_at),
                latency_s=attempt.latency_s,
                status=attempt.status,
                error=attempt.error,
                answer=attempt.answer,
            )
            for attempt in row.attempts
        ],
    )
