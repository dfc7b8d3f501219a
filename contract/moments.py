"""Moments: epoch seconds inside, RFC 3339 in UTC at the edge. The only place for that form."""

from datetime import UTC, datetime
from typing import overload

__all__ = ["parse_moment", "render_moment"]


@overload
def render_moment(seconds: float) -> str: ...
@overload
def render_moment(seconds: None) -> None: ...
def render_moment(seconds: float | None) -> str | None:
    """Return ``2026-11-30T09:15:00.123Z`` for epoch ``seconds``, and none for none."""
    if seconds is None:
        return None
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_moment(text: str) -> float:
    """Return the epoch seconds of an RFC 3339 moment with its zone. Raises ``ValueError``."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        message = "a moment needs its zone: end it with Z"
        raise ValueError(message)
    return moment.timestamp()
