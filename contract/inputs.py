"""What a request asks, as a hash: the only place that says what of it the score cache looks at."""

import hashlib

import msgspec

from contract.scores import ScoreRequest

__all__ = ["bare_request", "hash_input", "hash_told"]

_HASH_BYTES = 16
_encode = msgspec.json.Encoder().encode


def hash_input(request: ScoreRequest) -> str:
    """Return the hash of what a request asks, whatever model answers and what is kept of it."""
    return hash_told(_encode(bare_request(request)))


def bare_request(request: ScoreRequest) -> ScoreRequest:
    """Return the request without what changes no score; one bare text is a list of one."""
    return msgspec.structs.replace(
        request, items=request.item_list, model=None, return_pooled_hidden_states=False
    )


def hash_told(told: bytes) -> str:
    """Return the hash of a bare request's JSON."""
    return hashlib.blake2b(told, digest_size=_HASH_BYTES).hexdigest()
