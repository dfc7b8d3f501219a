"""From one line of an input to a score request, or to why it is refused. Any thread."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from api.catalog import choose_model
from api.compatible.endpoints import BATCH_ENDPOINTS, parse_line
from contract.bulks import LineError
from contract.errors import InvalidRequestError, ScoreError, TooLargeError
from contract.models import ModelStatus, check_request
from contract.scores import ScoreRequest, parse_json

__all__ = ["LONGEST_ID", "InputLine", "LineParser", "check_columns"]

#: The most characters of a line's ``custom_id``.
LONGEST_ID = 512
_COLUMNS = frozenset({"item", "query", "id"})


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line as read. Either ``request`` (its model resolved) or ``error`` is there."""

    number: int
    custom_id: str
    request: ScoreRequest | None = None
    fingerprint: str = ""
    error: LineError | None = None
    form: dict[str, Any] = field(default_factory=dict)
    #: equal on lines that differ in nothing but their one item; empty where that is not known
    family: bytes = b""


class _BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    """The row that bulks are made of: one text and an id, nothing else."""

    item: str
    custom_id: str


_plain = msgspec.json.Decoder(_Plain)


class _Probe(msgspec.Struct):
    """What tells the two kinds of lines apart, without decoding the rest."""

    custom_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class LineParser:
    """Parses the lines of one bulk. ``endpoint`` is a batch's; a bulk's lines may be rows too.

    A row is a JSON object: with ``columns``, those of item, query and id; else the fields of a
    score request, or ``item``, and ``custom_id`` or ``id``. ``parameters`` fill what it lacks.
    """

    def __init__(  # what is the same for all lines
        self,
        statuses: Mapping[str, ModelStatus],
        *,
        endpoint: str | None,
        model: str | None,
        parameters: Mapping[str, Any],
        columns: Mapping[str, str],
        hidden_states: bool | None,
        max_items: int,
    ) -> None:
        self._statuses = statuses
        self._endpoint = endpoint
        self._model = model
        self._parameters = dict(parameters)
        self._columns = dict(columns)
        self._hidden = hidden_states
        self._max_items = max_items
        plain = endpoint is None and not columns
        self._template = self._make_template() if plain else None

    def parse(self, number: int, raw: bytes | None, reason: str = "") -> InputLine:
        """Return the line; ``raw`` None means that it could not be read, for ``reason``."""
        if self._template is not None and raw is not None:
            line = self._parse_plain(number, raw, self._template)
            if line is not None:
                return line
        custom_id = f"line-{number}"
        try:
            if raw is None:
                raise TooLargeError(reason)
            custom_id, request, form = self._read(number, raw)
            return self.resolve(number, custom_id, request, form)
        except ScoreError as error:
            found = _find_id(raw) or custom_id
            refusal = LineError(
                code=error.code, message=error.message, line=number, param=error.param
            )
            return InputLine(number, found, error=refusal)

    def resolve(
        self, number: int, custom_id: str, request: ScoreRequest, form: dict[str, Any]
    ) -> InputLine:
        """Hold a request against its model. Raises a ``ScoreError``."""
        changes: dict[str, Any] = {}
        if self._hidden is not None and request.return_pooled_hidden_states != self._hidden:
            changes["return_pooled_hidden_states"] = self._hidden
        status = choose_model(self._statuses, self._model or request.model)
        if request.model != status.name:
            changes["model"] = status.name
        if changes:
            request = msgspec.structs.replace(request, **changes)
        request.check(max_items=self._max_items)
        fingerprint = ""
        if status.description is not None:
            check_request(request, status.description)
            fingerprint = status.description.fingerprint
        return InputLine(number, custom_id, request, fingerprint, form=form)

    def change(self, request: ScoreRequest) -> ScoreRequest:
        """Return a request with this bulk's parameters in place of its own."""
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        return self._convert(fields | self._parameters)

    def _make_template(self) -> InputLine | None:
        """What plain rows have in common, checked once; none where they would be refused."""
        try:
            request = self._convert(self._parameters | {"items": ["x"]})
            made = self.resolve(0, "template", request, {})
        except ScoreError:  # each line says it for itself
            return None
        if made.request is None or isinstance(made.request.query, list):
            return None
        return made

    def _parse_plain(self, number: int, raw: bytes, template: InputLine) -> InputLine | None:
        """Parse a plain row in a tenth of the time; None for any other line."""
        try:
            row = _plain.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if template.request is None or not _is_id(row.custom_id):
            return None
        request = msgspec.structs.replace(template.request, items=[row.item])
        return InputLine(number, row.custom_id, request, template.fingerprint, family=b"plain")

    def _read(self, number: int, raw: bytes) -> tuple[str, ScoreRequest, dict[str, Any]]:
        if self._endpoint is not None:
            return self._read_batch_line(raw, self._endpoint)
        if not self._columns:
            probe = parse_json(raw, _Probe)
            if probe.body is not msgspec.UNSET:
                return self._read_batch_line(raw, None)
        return self._read_row(number, parse_json(raw, dict[str, Any]))

    def _read_batch_line(
        self, raw: bytes, endpoint: str | None
    ) -> tuple[str, ScoreRequest, dict[str, Any]]:
        line = parse_json(raw, _BatchLine)
        _check_id(line.custom_id)
        if line.method != "POST":
            message = f"method must be POST, not {line.method[:20]!r}"
            raise InvalidRequestError(message, param="method")
        if (endpoint is not None and line.url != endpoint) or line.url not in BATCH_ENDPOINTS:
            wanted = endpoint or ", ".join(BATCH_ENDPOINTS)
            message = f"url must be {wanted}, not {line.url[:100]!r}"
            raise InvalidRequestError(message, param="url")
        parsed = parse_line(line.url, bytes(line.body))
        return line.custom_id, parsed.request, parsed.form

    def _read_row(
        self, number: int, row: dict[str, Any]
    ) -> tuple[str, ScoreRequest, dict[str, Any]]:
        if self._columns:
            fields, given = self._pick(row)
        else:
            fields = row
            given = fields.pop("custom_id", None)
            if given is None:
                given = fields.pop("id", None)
            if "item" in fields:
                fields["items"] = [fields.pop("item")]
        custom_id = f"line-{number}" if given is None else str(given)
        _check_id(custom_id)
        return custom_id, self._convert(self._parameters | fields), {}

    def _pick(self, row: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Take the named columns. Raises where the row lacks one."""
        taken: dict[str, Any] = {}
        for name, column in self._columns.items():
            if column not in row:
                message = f"there is no column {column[:100]!r}; there are: {', '.join(row)[:500]}"
                raise InvalidRequestError(message, param=f"columns.{name}"[:100])
            taken[name] = row[column]
        given = taken.pop("id", None)
        item = taken.pop("item", None)
        fields = taken | {"items": item if isinstance(item, list) else [item]}
        return fields, given

    def _convert(self, fields: dict[str, Any]) -> ScoreRequest:
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


def _is_id(custom_id: str) -> bool:
    if custom_id.isascii():
        return 1 <= len(custom_id) <= LONGEST_ID and "\x00" not in custom_id
    return False  # the long way looks for surrogates


def _check_id(custom_id: str) -> None:
    if not 1 <= len(custom_id) <= LONGEST_ID:
        message = f"custom_id has 1 to {LONGEST_ID} characters"
        raise InvalidRequestError(message, param="custom_id")
    if "\x00" in custom_id or any("\ud800" <= each <= "\udfff" for each in custom_id):
        message = "custom_id holds a NUL or an unpaired surrogate"
        raise InvalidRequestError(message, param="custom_id")


def _find_id(raw: bytes | None) -> str | None:
    """The id of a line that is refused for something else, where it can be read."""
    try:
        found = msgspec.json.decode(raw or b"{}", type=_Probe).custom_id
        value = None if found is msgspec.UNSET else msgspec.json.decode(found, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if value is None else value[:LONGEST_ID]
