"""Rows of a table or of JSONL made into score requests: what bulks and Ray's batches read alike."""

from collections.abc import Mapping
from typing import Any

import msgspec

from contract.errors import InvalidRequestError
from contract.scores import ScoreRequest

__all__ = [
    "LONGEST_ID",
    "RowReader",
    "check_columns",
    "check_custom_id",
    "convert_request",
    "is_plain_id",
    "result_schema",
]

LONGEST_ID = 512
_COLUMNS = frozenset({"item", "query", "id"})


class RowReader:
    """Reads rows. With ``columns`` a row has those of item, query and id, and others are ignored.

    Else it has the fields of a score request, or ``item``, and ``custom_id`` or ``id``.
    ``parameters`` fill what it lacks.
    """

    def __init__(self, *, columns: Mapping[str, str], parameters: Mapping[str, Any]) -> None:
        self._columns = dict(columns)
        self._parameters = dict(parameters)

    def read(self, number: int, row: Mapping[str, Any]) -> tuple[str, ScoreRequest]:
        """Return a row's id and request. Raises ``InvalidRequestError``."""
        if self._columns:
            fields, given = self._pick(row)
        else:
            fields = dict(row)
            given = fields.pop("custom_id", None)
            if given is None:
                given = fields.pop("id", None)
            if "item" in fields:
                fields["items"] = [fields.pop("item")]
        custom_id = f"line-{number}" if given is None else str(given)
        check_custom_id(custom_id)
        return custom_id, convert_request(self._parameters | fields)

    def _pick(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Take the named columns. Raises where the row lacks one."""
        taken: dict[str, Any] = {}
        for name, column in self._columns.items():
            if column not in row:
                message = f"there is no column {column[:100]!r}; there are: {', '.join(row)[:500]}"
                raise InvalidRequestError(message, param=f"columns.{name}"[:100])
            taken[name] = row[column]
        given = taken.pop("id", None)
        item = taken.pop("item", None)
        return taken | {"items": item if isinstance(item, list) else [item]}, given


def convert_request(fields: Mapping[str, Any]) -> ScoreRequest:
    """Return the request with these fields. Raises ``InvalidRequestError`` that names one."""
    try:
        return msgspec.convert(fields, ScoreRequest)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        param = path.rstrip("`").removeprefix("$").removeprefix(".") or None
        raise InvalidRequestError(message, param=param) from error


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise ``InvalidRequestError`` for a mapping that names no item, or what cannot be mapped."""
    unknown = sorted(set(columns) - _COLUMNS)
    if unknown:
        message = f"columns maps item, query and id, not {unknown[0][:100]!r}"
        raise InvalidRequestError(message, param="columns")
    if columns and "item" not in columns:
        message = "columns must name the column of the item"
        raise InvalidRequestError(message, param="columns.item")


def is_plain_id(custom_id: str) -> bool:
    """Whether an id is one without a closer look; ``check_custom_id`` may still let it pass."""
    if custom_id.isascii():
        return 1 <= len(custom_id) <= LONGEST_ID and "\x00" not in custom_id
    return False  # the long way looks for surrogates


def check_custom_id(custom_id: str) -> None:
    """Raise ``InvalidRequestError`` for an id that cannot be kept."""
    if not 1 <= len(custom_id) <= LONGEST_ID:
        message = f"custom_id has 1 to {LONGEST_ID} characters"
        raise InvalidRequestError(message, param="custom_id")
    if "\x00" in custom_id or any("\ud800" <= each <= "\udfff" for each in custom_id):
        message = "custom_id holds a NUL or an unpaired surrogate"
        raise InvalidRequestError(message, param="custom_id")


def result_schema(arrow: Any) -> Any:  # noqa: ANN401  # pyarrow, which the contract does not need
    """Return the columns of results as a table, one row per item, as a ``pyarrow.Schema``."""
    return arrow.schema(
        [
            ("line", arrow.int64()),
            ("custom_id", arrow.string()),
            ("item", arrow.int32()),
            ("model", arrow.string()),
            ("scores", arrow.list_(arrow.float32())),
            ("error_code", arrow.string()),
            ("error_message", arrow.string()),
        ]
    )
