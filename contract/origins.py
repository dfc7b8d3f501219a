"""Where a job comes from: kept with it, so that its logs and its trace go on in other processes."""

import msgspec

__all__ = ["Origin", "parse_origin", "render_origin"]


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The request that submitted a job. ``traceparent`` is W3C's, empty where nothing traces."""

    request_id: str = ""
    traceparent: str = ""


def render_origin(origin: Origin) -> str:
    """Return the JSON that is stored with the job."""
    return msgspec.json.encode(origin).decode()


def parse_origin(stored: str | None) -> Origin:
    """Read it; a job that was stored without one comes from nowhere."""
    return Origin() if stored is None else msgspec.json.decode(stored, type=Origin)
