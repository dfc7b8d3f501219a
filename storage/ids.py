"""Identifiers: a kind and a UUIDv7, so that they sort by creation and say what they name."""

from typing import Literal

import uuid_utils

__all__ = ["Kind", "create_id"]

Kind = Literal["job", "evt", "dlv", "wrk", "btc", "whe", "blk", "fil", "key"]


def create_id(kind: Kind) -> str:
    """Return a new identifier such as ``job_0199…``; those of one process ascend."""
    return f"{kind}_{uuid_utils.uuid7().hex}"
