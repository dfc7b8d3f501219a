"""JSON into types: the errors that a wrong body gives, and large bodies without a long halt.

One call into msgspec holds the interpreter: other threads, the event loop's among them, stand
still until it returns. ``parse_in_slices`` makes it many short calls.
"""

import functools
import re
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec

from contract.errors import InvalidRequestError, MalformedRequestError

__all__ = ["MAX_TOKEN_ID", "TokenId", "parse_in_slices", "parse_json"]

_T = TypeVar("_T")
MAX_TOKEN_ID = 2**31 - 1
#: A token id in some vocabulary; msgspec checks it while it decodes.
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]

_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_ID_FIELD = re.compile(r"(items|query|label_token_ids)\b")
_SENTENCES = {
    "Expected `int` >= 0": "the token id is negative",
    f"Expected `int` <= {MAX_TOKEN_ID}": "the token id is outside of every vocabulary",
}
_SLICE_BYTES = 256 * 1024


def parse_json(raw: bytes | str, kind: type[_T]) -> _T:
    """Decode ``raw`` as ``kind``.

    Raises ``MalformedRequestError`` where it is not JSON, and ``InvalidRequestError`` with the
    field's path in ``param`` where it is not of that type.
    """
    return _decode(raw, kind, "")


def parse_in_slices(raw: bytes, kind: type[_T]) -> _T:
    """Do what ``parse_json`` does for a struct, in many calls: arrays entry by entry."""
    parts: dict[str, bytes] = {}
    outline = _decode(raw, _outline_of(kind), "")  # type: ignore[arg-type]  # types are hashable
    for name in kind.__struct_fields__:  # type: ignore[attr-defined]  # kind is a Struct
        if part := bytes(getattr(outline, name)):
            parts[name] = part
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}  # type: ignore[arg-type]
    sliced = {
        name: _parse_array(part, _entry_of(types[name]), name)
        for name, part in parts.items()
        if len(part) > _SLICE_BYTES and part[:1] == b"[" and _entry_of(types[name]) is not None
    }
    short = {name: msgspec.Raw(b"[]" if name in sliced else part) for name, part in parts.items()}
    value = _decode(msgspec.json.encode(short), kind, "")
    for name, entries in sliced.items():
        setattr(value, name, entries)
    return value


def _parse_array(raw: bytes, entry: Any, path: str) -> list[Any]:  # noqa: ANN401  # a type
    if raw.count(b"[") == 1 and b'"' not in raw and b"{" not in raw:
        return _parse_flat(raw, entry, path)
    entries: list[Any] = []
    nested = _entry_of(entry)
    for index, part in enumerate(_decode(raw, list[msgspec.Raw], path)):
        text, place = bytes(part), f"{path}[{index}]"
        if len(text) > _SLICE_BYTES and text[:1] == b"[" and nested is not None:
            entries.append(_parse_array(text, nested, place))
        else:
            entries.append(_decode(text, entry, place))
    return entries


def _parse_flat(raw: bytes, entry: Any, path: str) -> list[Any]:  # noqa: ANN401  # a type
    """Parse an array of numbers: every comma is between two of them."""
    entries: list[Any] = []
    begin, end = 1, len(raw) - 1
    try:
        while begin < end:
            comma = raw.find(b",", min(begin + _SLICE_BYTES, end), end)
            stop = end if comma < 0 else comma
            entries += msgspec.json.decode(b"[" + raw[begin:stop] + b"]", type=list[entry])
            begin = stop + 1
    except msgspec.DecodeError:
        return _decode(raw, list[entry], path)  # raises, with the index in the whole
    return entries


@functools.cache
def _outline_of(kind: type[Any]) -> type[Any]:
    """Return a struct with the names of ``kind``, whose values stay as they were sent."""
    unset = msgspec.field(default=msgspec.Raw())
    fields = [(name, msgspec.Raw, unset) for name in kind.__struct_fields__]
    return msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=True, kw_only=True)


def _entry_of(kind: Any) -> Any:  # noqa: ANN401  # a type
    """Return the type of the entries where ``kind`` is an array or a union with one, or None."""
    options = [kind] if get_origin(kind) is list else get_args(kind)
    return next((get_args(option)[0] for option in options if get_origin(option) is list), None)


def _decode(raw: bytes | str, kind: type[_T], place: str) -> _T:
    """Decode the value that lies at ``place`` in the whole body."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        param = (place + path.rstrip("`").removeprefix("$")).removeprefix(".") or None
        if param is None and (unknown := _UNKNOWN_FIELD.search(message)):
            param = unknown.group(1)
        if param is not None and _ID_FIELD.match(param):
            message = _SENTENCES.get(message, message)
        raise InvalidRequestError(message, param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the body is not valid JSON: {error}"
        raise MalformedRequestError(message) from error
