"""What a bulk says of its speed: of the rows that ran, and of how long the rest may take."""

import time
from typing import Any

import pytest

from api.bulk.access import _speed
from contract.bulks import BulkCounts, BulkState
from storage.bulks import BulkRow


def make(**changed: Any) -> BulkRow:
    """Return a bulk that started ten seconds ago."""
    fields: dict[str, Any] = dict.fromkeys(BulkRow.__dataclass_fields__)
    started = {"state": BulkState.RUNNING, "started_at": time.time() - 10}
    return BulkRow(**(fields | started | changed))


def test_cached_lines_shorten_what_is_left() -> None:
    """900 of 1000 lines ended in ten seconds, all but 50 from the cache: a second is left."""
    counts = BulkCounts(lines=1000, lines_completed=900, scored=900, from_cache=850)

    rate, eta_s = _speed(make(), counts)

    assert rate == pytest.approx(5, rel=0.1)
    assert eta_s == pytest.approx(1.1, rel=0.1)


def test_what_is_not_known_is_not_said() -> None:
    """Before the start there is no rate; before the first line's end, and paused, no time left."""
    counts = BulkCounts(lines=1000, lines_completed=10, scored=10)

    assert _speed(make(started_at=None), counts) == (None, None)
    assert _speed(make(), BulkCounts(lines=1000)) == (0.0, None)
    assert _speed(make(paused_at=1.0), counts)[1] is None
    assert _speed(make(finished_at=time.time()), counts)[1] == 0.0
