"""What a bulk was asked to be: the JSON in its row's ``options`` and ``source``."""

from typing import Any, Literal

import msgspec

from contract.bulks import CacheUse
from contract.jobs import Lane
from storage.bulks import BulkRow

__all__ = ["BulkOptions", "BulkSource", "parse_options", "parse_source"]


class BulkOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a bulk's lines are read and run."""

    model: str | None = None
    parameters: dict[str, Any] = {}
    columns: dict[str, str] = {}
    hidden_states: bool | None = None
    max_items: int | None = None  # the tenant's own, as it was when the bulk was made
    on_invalid: Literal["fail", "skip"] = "fail"
    cache: CacheUse = CacheUse.READ
    lane: Lane = Lane.BULK
    expires_after_s: float | None = None
    output_expires_after_s: float | None = None
    completion_window: str = "24h"


class BulkSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a bulk's lines come from: one of these."""

    file: str | None = None
    uri: str | None = None
    bulk: str | None = None
    jobs: list[str] | None = None


def parse_options(bulk: BulkRow) -> BulkOptions:
    """Read the row's options."""
    return msgspec.json.decode(bulk.options, type=BulkOptions)


def parse_source(bulk: BulkRow) -> BulkSource:
    """Read the row's source."""
    return msgspec.json.decode(bulk.source, type=BulkSource)
