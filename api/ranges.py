"""``Range``, ``If-Range`` and entity tags (RFC 9110): the only place that reads them."""

import re
from dataclasses import dataclass

from contract.errors import RangeNotSatisfiableError

__all__ = ["ByteRange", "is_match", "parse_range", "select_range"]

_RANGE = re.compile(r"(?i:bytes)\s*=\s*([0-9]{0,18})\s*-\s*([0-9]{0,18})\s*")
_TAG = re.compile(r'(W/)?"([^"]*)"')


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes ``begin`` to ``end`` (exclusive) of a file of ``size_bytes``."""

    begin: int
    end: int
    size_bytes: int

    def render(self) -> str:
        """Return the ``Content-Range`` header."""
        return f"bytes {self.begin}-{self.end - 1}/{self.size_bytes}"


def parse_range(header: str, size_bytes: int) -> ByteRange | None:
    """Return the range that ``header`` asks of a file of ``size_bytes``.

    None where the header is to be ignored: another unit, malformed, or several ranges.
    Raises ``RangeNotSatisfiableError`` where no byte of the file is in it.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        length = min(int(last), size_bytes)
        begin, end = size_bytes - length, size_bytes
    else:
        begin = int(first)
        end = min(int(last) + 1, size_bytes) if last else size_bytes
        if last and int(last) < begin:
            return None
    if begin >= size_bytes:
        message = f"the range holds no byte of the file of {size_bytes} bytes"
        raise RangeNotSatisfiableError(message, size_bytes=size_bytes)
    return ByteRange(begin, end, size_bytes)


def select_range(
    range_header: str | None, if_range: str | None, *, etag: str, size_bytes: int
) -> ByteRange | None:
    """Return the part to answer with, or None for the whole file.

    ``If-Range`` with anything but exactly our strong ``etag`` asks for the whole file: we send no
    ``Last-Modified``, so that a date there can never match.
    """
    if range_header is None or (if_range is not None and if_range.strip() != etag):
        return None
    return parse_range(range_header, size_bytes)


def is_match(header: str | None, etag: str) -> bool:
    """Answer whether an ``If-None-Match`` header names ``etag``, compared weakly."""
    if header is None:
        return False
    if header.strip() == "*":
        return True
    wanted = etag.removeprefix("W/").strip('"')
    return any(tag == wanted for _, tag in _TAG.findall(header))
