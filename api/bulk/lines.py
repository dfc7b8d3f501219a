"""From one line of an input to a score request, or to why it is refused. Any thread."""

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from api.bulk.families import Family, has_own_parts
from api.catalog import choose_model
from api.compatible.endpoints import BATCH_ENDPOINTS, parse_line
from api.submission import check_limits
from contract.bulks import LineError
from contract.config import Settings
from contract.errors import InvalidRequestError, ScoreError, TooLargeError
from contract.inputs import hash_input
from contract.models import ModelStatus, check_request
from contract.rows import LONGEST_ID, RowReader, check_custom_id, convert_request, is_plain_id
from contract.scores import ScoreRequest, parse_json

__all__ = ["InputLine", "LineParser"]


class InputLine(msgspec.Struct, frozen=True, gc=False):
    """A line as read: a ``request`` with its model resolved, or the ``text`` of a ``family``.

    One with ``error`` was refused and has neither.
    """

    number: int
    custom_id: str
    request: ScoreRequest | None = None
    fingerprint: str = ""
    error: LineError | None = None
    form: dict[str, Any] = {}
    family: Family | None = None
    text: str = ""

    @classmethod
    def of_family(cls, number: int, custom_id: str, family: Family, text: str) -> Self:
        """Return a line of one text."""
        return cls(number, custom_id, None, family.fingerprint, None, {}, family, text)

    @property
    def item_count(self) -> int:
        """How many items it has; none where it was refused."""
        if self.family is not None:
            return 1
        return 0 if self.request is None else len(self.request.item_list)

    @property
    def wants_hidden(self) -> bool:
        """Whether hidden states are kept of it."""
        request = self.request if self.family is None else self.family.request
        return request is not None and request.return_pooled_hidden_states

    def hash(self) -> str:
        """Return the hash of its input; empty where it was refused."""
        if self.family is not None:
            return self.family.hash(self.text)
        return "" if self.request is None else hash_input(self.request)


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
_row = msgspec.json.Decoder(dict[str, Any])


class _Probe(msgspec.Struct):
    """What tells the two kinds of lines apart, without decoding the rest."""

    custom_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class LineParser:
    """Parses the lines of one bulk. ``endpoint`` is a batch's; a bulk's lines may be rows too.

    A row is a JSON object: with ``columns``, those of item, query and id; else the fields of a
    score request, or ``item``, and ``custom_id`` or ``id``. ``parameters`` fill what it lacks.
    ``limits`` are those of a job.
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
        limits: Settings,
    ) -> None:
        self._statuses = statuses
        self._endpoint = endpoint
        self._model = model
        self._parameters = dict(parameters)
        self._columns = dict(columns)
        self._rows = RowReader(columns=columns, parameters=parameters)
        self._hidden = hidden_states
        self._limits = limits
        plain = endpoint is None and "query" not in columns
        self._family = self._find_family() if plain else None

    def parse(self, number: int, raw: bytes | None, reason: str = "") -> InputLine:
        """Return the line; ``raw`` None means that it could not be read, for ``reason``."""
        if self._family is not None and raw is not None:
            line = self._parse_plain(number, raw, self._family)
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
        """Hold a request against the limits of a job and its model. Raises a ``ScoreError``."""
        changes: dict[str, Any] = {}
        if self._hidden is not None and request.return_pooled_hidden_states != self._hidden:
            changes["return_pooled_hidden_states"] = self._hidden
        status = choose_model(self._statuses, self._model or request.model)
        if request.model != status.name:
            changes["model"] = status.name
        if changes:
            request = msgspec.structs.replace(request, **changes)
        check_limits(request, self._limits)
        fingerprint = ""
        if status.description is not None:
            check_request(request, status.description)
            fingerprint = status.description.fingerprint
        return InputLine(number, custom_id, request, fingerprint, form=form)

    def change(self, request: ScoreRequest) -> ScoreRequest:
        """Return a request with this bulk's parameters in place of its own."""
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        return convert_request(fields | self._parameters)

    def fits(self, family: Family, text: str) -> bool:
        """Whether a line of a family is no longer than a job may be."""
        return family.tokens(text) <= self._limits.max_job_tokens

    def find_family(self, request: ScoreRequest) -> Family | None:
        """Return what lines that differ from ``request`` in their one text have in common.

        None where it would be refused: each of the lines says so for itself; and where a part of
        it is of one item alone.
        """
        try:
            made = self.resolve(0, "family", msgspec.structs.replace(request, items=["x"]), {})
        except ScoreError:
            return None
        if made.request is None or has_own_parts(made.request):
            return None
        return Family(made.request, made.fingerprint)

    def _find_family(self) -> Family | None:
        try:
            return self.find_family(convert_request(self._parameters | {"items": ["x"]}))
        except ScoreError:
            return None

    def _parse_plain(self, number: int, raw: bytes, family: Family) -> InputLine | None:
        """Parse one text and its id in a tenth of the time; None for any other line."""
        try:
            if self._columns:
                custom_id, text = self._pick_plain(number, _row.decode(raw))
            else:
                row = _plain.decode(raw)
                custom_id, text = row.custom_id, row.item
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError):
            return None
        if not isinstance(text, str) or not is_plain_id(custom_id) or not self.fits(family, text):
            return None
        return InputLine.of_family(number, custom_id, family, text)

    def _pick_plain(self, number: int, row: dict[str, Any]) -> tuple[str, Any]:
        column = self._columns.get("id")
        given = None if column is None else row[column]
        custom_id = f"line-{number}" if given is None else str(given)
        return custom_id, row[self._columns["item"]]

    def _read(self, number: int, raw: bytes) -> tuple[str, ScoreRequest, dict[str, Any]]:
        if self._endpoint is not None:
            return self._read_batch_line(raw, self._endpoint)
        if not self._columns:
            probe = parse_json(raw, _Probe)
            if probe.body is not msgspec.UNSET:
                return self._read_batch_line(raw, None)
        custom_id, request = self._rows.read(number, parse_json(raw, dict[str, Any]))
        return custom_id, request, {}

    def _read_batch_line(
        self, raw: bytes, endpoint: str | None
    ) -> tuple[str, ScoreRequest, dict[str, Any]]:
        line = parse_json(raw, _BatchLine)
        check_custom_id(line.custom_id)
        if line.method != "POST":
            message = f"method must be POST, not {line.method[:20]!r}"
            raise InvalidRequestError(message, param="method")
        if (endpoint is not None and line.url != endpoint) or line.url not in BATCH_ENDPOINTS:
            wanted = endpoint or ", ".join(BATCH_ENDPOINTS)
            message = f"url must be {wanted}, not {line.url[:100]!r}"
            raise InvalidRequestError(message, param="url")
        parsed = parse_line(line.url, bytes(line.body))
        return line.custom_id, parsed.request, parsed.form


def _find_id(raw: bytes | None) -> str | None:
    """The id of a line that is refused for something else, where it can be read."""
    try:
        found = msgspec.json.decode(raw or b"{}", type=_Probe).custom_id
        value = None if found is msgspec.UNSET else msgspec.json.decode(found, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if value is None else value[:LONGEST_ID]
