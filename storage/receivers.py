"""Receivers, a tenant's side of one origin each: which of them fail, and until when they rest.

Only those that fail have a row. Several endpoints and jobs' URLs at one origin share it, because
what makes one slow makes all of them slow; tenants do not, so that none can pause another's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from storage.database import Transaction
from storage.statements import execute, pack

__all__ = ["Failure", "clear_failures", "end_hopeless", "name_receiver", "record_failures"]

#: A receiver that nobody tried for so long is no longer known as failing.
_FORGOTTEN_S = 10 * 86400.0


@dataclass(frozen=True, slots=True)
class Failure:
    """That a receiver failed ``failures`` times in a row, and for how long to leave it alone."""

    name: str
    failures: int
    pause_s: float


def name_receiver(tenant: str, url: str) -> str:
    """Return the name under which ``url`` shares places and pauses: tenant and origin."""
    parts = urlsplit(url)
    return f"{tenant} {parts.scheme}://{parts.netloc.lower()}"


async def clear_failures(tx: Transaction, names: Iterable[str]) -> None:
    """Note that these took an event, or are to be tried at once: they have all their places."""
    if rows := [{"name": name} for name in sorted(names)]:
        await execute(tx, _CLEAR, {"rows": pack(rows)})


async def record_failures(
    tx: Transaction, failures: Sequence[Failure], *, hopeless_s: float
) -> list[str]:
    """Pause receivers; return those that have done nothing but fail for ``hopeless_s``."""
    worst: dict[str, Failure] = {}
    for failure in sorted(failures, key=lambda each: each.pause_s):
        worst[failure.name] = failure
    if not worst:
        return []
    rows = pack(asdict(worst[name]) for name in sorted(worst))
    found = await execute(tx, _SUFFER, {"rows": rows, "hopeless_s": hopeless_s})
    hopeless = [row.name for row in found if row.is_hopeless]
    await execute(tx, _FORGET, {"forgotten_s": _FORGOTTEN_S})
    return hopeless


async def end_hopeless(tx: Transaction, names: Iterable[str]) -> None:
    """End what is pending for these and comes from jobs' own URLs; endpoints end their own."""
    if rows := [{"name": name} for name in names]:
        await execute(tx, _END, {"rows": pack(rows)})


_CLEAR = "DELETE FROM receivers WHERE name IN (SELECT name FROM {rows(name text)} c)"

_SUFFER = """
INSERT INTO receivers (name, failures, failing_since_at, paused_until_at)
SELECT c.name, c.failures, {now}, {now} + c.pause_s
FROM {rows(name text, failures integer, pause_s real)} c WHERE true ORDER BY c.name
ON CONFLICT (name) DO UPDATE SET
    failures = CASE WHEN excluded.failures > receivers.failures
        THEN excluded.failures ELSE receivers.failures END,
    paused_until_at = CASE WHEN excluded.paused_until_at > receivers.paused_until_at
        THEN excluded.paused_until_at ELSE receivers.paused_until_at END
RETURNING name, failing_since_at <= {now} - :hopeless_s AS is_hopeless
"""

_FORGET = "DELETE FROM receivers WHERE paused_until_at < {now} - :forgotten_s"

_END = """
UPDATE deliveries SET state = 'dead', finished_at = {now},
    reason = 'the receiver has only failed for days'
WHERE state = 'pending' AND endpoint_id = '' AND (worker IS NULL OR due_at <= {now})
  AND receiver IN (SELECT name FROM {rows(name text)} c)
"""
