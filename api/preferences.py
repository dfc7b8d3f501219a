"""The ``Prefer`` request header (RFC 7240): the only place that reads it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Preferences", "parse_preferences"]

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SECONDS = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Preferences:
    """What the client prefers. ``wait_s`` is None where it named no time."""

    respond_async: bool = False
    wait_s: int | None = None

    def render_applied(self, *, waited: bool, max_wait_s: float) -> str | None:
        """Return ``Preference-Applied`` for an answer that waited, up to the limit, or did not."""
        if waited:
            return None if self.wait_s is None else f"wait={min(self.wait_s, int(max_wait_s))}"
        return "respond-async" if self.respond_async else None


def parse_preferences(headers: Iterable[str]) -> Preferences:
    """Read all ``Prefer`` headers. As the RFC asks, what is unknown or malformed is ignored.

    The first mention of a preference counts. ``respond-async`` beats ``wait``.
    """
    found: dict[str, str] = {}
    for header in headers:
        for part in _split(header, ","):
            name, _, value = _split(part, ";")[0].partition("=")
            name = name.strip().lower()
            if _TOKEN.fullmatch(name):
                found.setdefault(name, _unquote(value.strip()))
    wait = found.get("wait", "")
    return Preferences(
        respond_async=found.get("respond-async") == "",
        wait_s=int(wait) if _SECONDS.fullmatch(wait) else None,
    )


def _split(text: str, separator: str) -> list[str]:
    """Split outside of quoted strings."""
    parts, start, quoted, escaped = [], 0, False, False
    for position, character in enumerate(text):
        if escaped:
            escaped = False
        elif quoted and character == "\\":
            escaped = True
        elif character == '"':
            quoted = not quoted
        elif character == separator and not quoted:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def _unquote(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] == '"':
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value
