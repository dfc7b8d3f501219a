"""Which representation a client accepts, and which it sent: the only reader of media types."""

import re
from collections.abc import Sequence

from contract.errors import NotAcceptableError, UnsupportedMediaTypeError

__all__ = ["JSON", "PROBLEM", "SAFETENSORS", "check_json_body", "choose_type"]

JSON = "application/json"
PROBLEM = "application/problem+json"
SAFETENSORS = "application/vnd.safetensors"

_QUALITY = re.compile(r"\s*q\s*=\s*(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)\s*", re.IGNORECASE)
_JSON_BODY = re.compile(r"application/(?:[A-Za-z0-9.!#$&^_-]+\+)?json", re.IGNORECASE)


def choose_type(accept: str | None, offered: Sequence[str]) -> str:
    """Return the best of ``offered`` (ours in order of preference) for an ``Accept`` header.

    Without a header the first. Raises ``NotAcceptableError`` that names what there is.
    """
    if accept is None or not accept.strip():
        return offered[0]
    wanted = [_parse_part(part) for part in accept.split(",")]
    best, best_quality = "", 0.0
    for kind in offered:
        quality = _quality_of(kind, wanted)
        if quality > best_quality:
            best, best_quality = kind, quality
    if not best:
        message = f"Accept names nothing that there is; there is {' and '.join(offered)}"
        raise NotAcceptableError(message, param="Accept")
    return best


def check_json_body(content_type: str | None, charset: str | None) -> None:
    """Raise ``UnsupportedMediaTypeError`` unless the body is declared as JSON in UTF-8."""
    kind = (content_type or "").partition(";")[0].strip()
    if not _JSON_BODY.fullmatch(kind):
        message = f"the body must be application/json, not {kind or 'undeclared'}"
        raise UnsupportedMediaTypeError(message, param="Content-Type")
    if charset is not None and charset.lower() not in {"utf-8", "utf8", "us-ascii"}:
        message = f"the body must be in UTF-8, not {charset}"
        raise UnsupportedMediaTypeError(message, param="Content-Type")


def _parse_part(part: str) -> tuple[str, float]:
    kind, *parameters = part.split(";")
    for parameter in parameters:
        if match := _QUALITY.fullmatch(parameter):
            return kind.strip().lower(), float(match.group(1))
    return kind.strip().lower(), 1.0


def _quality_of(kind: str, wanted: Sequence[tuple[str, float]]) -> float:
    """The most specific mention counts: the type, then ``application/*``, then ``*/*``."""
    family = kind.partition("/")[0] + "/*"
    for mention in (kind, family, "*/*"):
        qualities = [quality for name, quality in wanted if name == mention]
        if qualities:
            return max(qualities)
    return 0.0
