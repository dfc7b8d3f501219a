"""Requests of lines, taken apart and put together: what neighbours have in common, and what not.

Of lines that differ in nothing but their one text, what they share is worked out once: a million
rows of one kind would otherwise build, check and encode a million requests of seventeen fields.
"""

import zlib
from collections.abc import Mapping, Sequence

import msgspec

from api.submission import CHARACTERS_PER_TOKEN, estimate_tokens
from contract.inputs import bare_request, hash_told
from contract.scores import ScoreRequest
from storage.bulk_chunks import Place

__all__ = ["Family", "decode_request", "gather_items", "has_own_parts"]

_PLACE = b"@"
_encode = msgspec.json.Encoder().encode


def decode_request(compressed: bytes) -> ScoreRequest:
    """Read a request as its job's row holds it."""
    return msgspec.json.decode(zlib.decompress(compressed), type=ScoreRequest)


def gather_items(places: Sequence[Place], requests: Mapping[str, ScoreRequest]) -> ScoreRequest:
    """Return one request of items of several, which have the rest in common."""
    base = requests[places[0][0]]
    items = [requests[job_id].item_list[index] for job_id, index in places]
    labels = base.label_token_ids
    if labels and isinstance(labels[0], list):
        labels = [(requests[job_id].label_token_ids or labels)[index] for job_id, index in places]
    queries = base.queries
    if queries is not None:
        queries = [(requests[job_id].queries or queries)[index] for job_id, index in places]
    return msgspec.structs.replace(base, items=items, label_token_ids=labels, queries=queries)


def has_own_parts(request: ScoreRequest) -> bool:
    """Whether a query or labels are those of one item: its line shares them with no other."""
    own_labels = any(isinstance(entry, list) for entry in request.label_token_ids or ())
    return own_labels or request.queries is not None


class Family:
    """All of a checked request but its one text. ``request`` has no items."""

    __slots__ = ("_around_tokens", "_head", "_tail", "fingerprint", "request")

    def __init__(self, request: ScoreRequest, fingerprint: str) -> None:
        self.request = msgspec.structs.replace(request, items=[])
        self.fingerprint = fingerprint
        hole = msgspec.structs.replace(bare_request(request), items=msgspec.Raw(_PLACE))
        head, _, self._tail = _encode(hole).partition(_PLACE)
        self._head = head + b"["
        self._tail = b"]" + self._tail
        self._around_tokens = estimate_tokens(msgspec.structs.replace(request, items=[""]))

    def hash(self, text: str) -> str:
        """Return what ``hash_input`` says of the request with this text."""
        return hash_told(self._head + _encode(text) + self._tail)

    def tokens(self, text: str) -> int:
        """Return what ``estimate_tokens`` says of the request with this text."""
        return self._around_tokens - (-len(text) // CHARACTERS_PER_TOKEN)
