"""The ``RateLimit`` headers: the only place for their form.

It is that of draft-ietf-httpapi-ratelimit-headers-10.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RatePolicy", "render_policies"]


@dataclass(frozen=True, slots=True)
class RatePolicy:
    """A limit, and how near somebody is to it. ``window_s`` None: it is no rate, but an amount."""

    name: str
    quota: int
    remaining: int
    reset_s: float
    window_s: int | None = None


def render_policies(policies: Sequence[RatePolicy]) -> dict[str, str]:
    """Return the two headers, or none where there is no policy."""
    if not policies:
        return {}
    windows = ["" if each.window_s is None else f";w={each.window_s}" for each in policies]
    return {
        "RateLimit-Policy": ", ".join(
            f'"{each.name}";q={each.quota}{window}'
            for each, window in zip(policies, windows, strict=True)
        ),
        "RateLimit": ", ".join(
            f'"{each.name}";r={max(0, each.remaining)};t={max(0, math.ceil(each.reset_s))}'
            for each in policies
        ),
    }
