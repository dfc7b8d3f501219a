"""The ``Idempotency-Key`` request header: its forms, and what counts as the same body."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from contract.errors import MalformedRequestError
from storage import idempotency
from storage.database import Database

__all__ = ["IdempotencyKey", "hash_body", "is_known", "parse_key"]

_MAX_CHARACTERS = 255
#: A structured-field string (RFC 8941) with parameters, which carry nothing for us.
_QUOTED = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"\s*(?:;.*)?')
_BARE = re.compile(r"[\x21\x23-\x7e][\x20-\x21\x23-\x7e]*")


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A client's key for one request: ``route`` and ``body_hash`` say for which."""

    route: str
    key: str
    body_hash: str


def parse_key(headers: Sequence[str]) -> str | None:
    """Return the key, or None without a header.

    Raises ``MalformedRequestError`` where there are several, or none of the two forms fits.
    """
    if not headers:
        return None
    if len(headers) > 1:
        _refuse("there are several Idempotency-Key headers; send one")
    text = headers[0].strip()
    if quoted := _QUOTED.fullmatch(text):
        key = re.sub(r"\\(.)", r"\1", quoted.group(1))
    elif _BARE.fullmatch(text):
        key = text
    else:
        _refuse("Idempotency-Key must be a quoted string of printable ASCII characters")
    if not 1 <= len(key) <= _MAX_CHARACTERS:
        _refuse(f"Idempotency-Key must have 1 to {_MAX_CHARACTERS} characters")
    return key


def hash_body(body: bytes) -> str:
    """Return what tells two bodies apart: the SHA-256 of their bytes."""
    return hashlib.sha256(body).hexdigest()


async def is_known(database: Database, tenant: str, key: IdempotencyKey) -> bool:
    """Tell whether the key was used before: its answer is given whatever the limits say."""
    async with database.snapshot() as tx:
        return await idempotency.is_bound(tx, tenant, key.route, key.key)


def _refuse(message: str) -> NoReturn:
    raise MalformedRequestError(message, param="Idempotency-Key")
