"""API keys: what one looks like, what it may do, and how two are compared.

A key is ``sk_``, a prefix that is no secret and finds its row, and 32 random bytes. Only the
SHA-256 of the whole is stored; the bytes are random, so that a slow hash would add nothing.
"""

import hashlib
import hmac
import re
import secrets
from enum import StrEnum

from contract.errors import InvalidRequestError

__all__ = ["Scope", "create_key", "hash_key", "is_same_hash", "parse_prefix", "parse_scopes"]

_SECRET_BYTES = 32
_PREFIX_BYTES = 8
_KEY = re.compile(r"(sk_[0-9a-f]{16})_[A-Za-z0-9_-]{43}")


class Scope(StrEnum):
    """What a key may do. None implies another."""

    SUBMIT = "submit"  #: whatever changes something of the tenant's, and the secrets it signs with
    READ = "read"  #: look at what is the tenant's
    ADMIN = "admin"  #: look at the installation: metrics and workers


def create_key() -> tuple[str, str]:
    """Return a new key and its prefix, which may be shown and stored."""
    prefix = f"sk_{secrets.token_hex(_PREFIX_BYTES)}"
    return f"{prefix}_{secrets.token_urlsafe(_SECRET_BYTES)}", prefix


def parse_prefix(key: str) -> str | None:
    """Return the prefix of what has the form of a key, or None."""
    match = _KEY.fullmatch(key)
    return None if match is None else match.group(1)


def hash_key(key: str) -> str:
    """Return what is stored in a key's place."""
    return hashlib.sha256(key.encode()).hexdigest()


def is_same_hash(one: str, other: str) -> bool:
    """Compare in a time that does not tell where the two differ."""
    return hmac.compare_digest(one.encode(), other.encode())


def parse_scopes(text: str) -> list[Scope]:
    """Read ``submit,read``. Raises ``InvalidRequestError`` for an unknown word, or none at all."""
    words = {word.strip() for word in text.split(",") if word.strip()}
    unknown = sorted(words - set(Scope))
    if unknown or not words:
        message = f"scopes are {', '.join(Scope)}, not {', '.join(unknown) or 'nothing'}"
        raise InvalidRequestError(message, param="scope")
    return [scope for scope in Scope if scope in words]
