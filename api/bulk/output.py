"""The output and error files of a batch, as OpenAI's clients read them. Streamed, both at once."""

import time
from collections.abc import Sequence

import msgspec

from api.bulk.file_store import FileWriter
from api.bulk.inputs import BulkInput
from api.bulk.results import LineResult, read_results
from api.bulk.settings import parse_options
from api.compatible.endpoints import render_line
from api.compatible.forms import Answered
from contract.bulks import LineError
from storage.bulks import BulkRow

__all__ = ["write_outputs", "write_refusals"]

_encode = msgspec.json.Encoder().encode
_DEFAULT_STATUS = 500
_STATUSES = {"input_too_long": 422, "invalid_request": 422, "cancelled": 409, "expired": 504}


class _Pair:
    """The two writers; each file exists only if a line goes into it."""

    def __init__(self, given: BulkInput, bulk: BulkRow) -> None:
        self._given = given
        self._bulk = bulk
        self._writers: dict[str, FileWriter] = {}

    async def write(self, kind: str, lines: Sequence[bytes]) -> None:
        """Add lines to the ``output`` or the ``error`` file."""
        if not lines:
            return
        if kind not in self._writers:
            self._writers[kind] = await FileWriter.start(
                self._given.database,
                self._given.blobs,
                self._bulk.tenant,
                filename=f"{self._bulk.id}_{kind}.jsonl",
                purpose="batch_output",
            )
        await self._writers[kind].write(b"".join(line + b"\n" for line in lines))

    async def finish(self) -> dict[str, str | None]:
        """Make the files visible; return the columns of the bulk's row that name them."""
        expires_after_s = parse_options(self._bulk).output_expires_after_s
        ids: dict[str, str | None] = {"output_file_id": None, "error_file_id": None}
        for kind, writer in self._writers.items():
            row = await writer.finish(purpose="batch_output", expires_after_s=expires_after_s)
            ids[f"{kind}_file_id"] = row.id
        return ids


async def write_outputs(given: BulkInput, bulk: BulkRow) -> dict[str, str | None]:
    """Write what every line of an ended batch became; return the columns with the files' ids."""
    files = _Pair(given, bulk)
    async for lines in read_results(given.database, given.blobs, bulk.id):
        good = [_render_answer(bulk, line) for line in lines if not line.failed]
        bad = [_render_failure(bulk, line) for line in lines if line.failed]
        await files.write("output", good)
        await files.write("error", bad)
    return await files.finish()


async def write_refusals(
    given: BulkInput, bulk: BulkRow, errors: Sequence[LineError]
) -> dict[str, str | None]:
    """Write the error file of a batch whose input was refused."""
    files = _Pair(given, bulk)
    lines = [
        _encode(
            {
                "id": f"{bulk.id}_{error.line or 0}",
                "custom_id": None,
                "response": None,
                "error": {"code": error.code, "message": error.message, "line": error.line},
            }
        )
        for error in errors
    ]
    await files.write("error", lines)
    return await files.finish()


def _render_answer(bulk: BulkRow, line: LineResult) -> bytes:
    request_id = f"{bulk.id}_{line.number}"
    answered = Answered(
        request_id,
        line.model,
        line.labels,
        line.scores,
        line.errors,
        int(bulk.created_at or time.time()),
        line.form,
    )
    body = render_line(bulk.endpoint, answered)
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return _encode(
        {"id": request_id, "custom_id": line.custom_id, "response": response, "error": None}
    )


def _render_failure(bulk: BulkRow, line: LineResult) -> bytes:
    code, message = line.refused or (line.errors[0].code, line.errors[0].message)
    request_id = f"{bulk.id}_{line.number}"
    status = _STATUSES.get(code, _DEFAULT_STATUS)
    body = {"error": {"message": message, "type": code, "param": None, "code": code}}
    return _encode(
        {
            "id": request_id,
            "custom_id": line.custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": {"code": code, "message": message},
        }
    )
