"""Checks what a request names to be called back: the only place that joins URL and events."""

from collections.abc import Sequence

from api.bodies import check_plain_text
from contract.addresses import check_url
from contract.config import Settings
from contract.errors import InvalidRequestError
from contract.webhooks import EventType, check_events

__all__ = ["check_target", "check_webhook"]


def check_webhook(
    url: str | None,
    events: Sequence[str] | None,
    settings: Settings,
    *,
    among: Sequence[EventType],
) -> None:
    """Raise the error that names the field of a job's or a bulk's webhook that cannot be taken.

    ``among`` are the types that it may ask for.
    """
    if url is not None:
        check_target(url, settings, param="webhook")
    elif events is not None:
        message = "webhook_events without a webhook have no effect; name the webhook's URL"
        raise InvalidRequestError(message, param="webhook_events")
    if events is not None:
        check_events(events, param="webhook_events", among=among)


def check_target(url: str, settings: Settings, *, param: str) -> None:
    """Raise ``AddressRefusedError`` or ``InvalidRequestError`` unless the URL may be called."""
    check_url(
        url,
        allow_http=settings.webhook_allow_http,
        allowed_networks=settings.allowed_networks,
        param=param,
    )
    check_plain_text(url, param)
