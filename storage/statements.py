"""Pieces of SQL that several modules need: rows as parameters, the fence, the clock.

Many rows travel as one JSON parameter, so that a statement's text, and with it its plan, is the
same for one row and for a thousand. ``FENCE`` is the only place for what fences a write.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import TextClause, text
from sqlalchemy.engine import CursorResult

from storage.database import Transaction, database_now

__all__ = [
    "FENCE",
    "Claim",
    "execute",
    "pack",
    "pack_claims",
    "parse_hint",
    "parse_hinted_model",
    "render_hint",
]

#: What every write on behalf of a claim must say. A guard on the state alone lets a stale worker
#: finish another's job; one on the attempt alone overwrites a finished one.
FENCE = "j.attempt = c.attempt AND j.state = 'running'"

_PG_TYPES = {
    "text": "text",
    "integer": "integer",
    "bigint": "bigint",
    "real": "float8",
    "boolean": "boolean",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's hold on a job: valid while the job runs and its attempt is this one."""

    id: str
    attempt: int


def pack(rows: Iterable[Mapping[str, Any]]) -> str:
    """Render ``rows`` as the JSON parameter that ``{rows:…}`` in a statement reads."""
    return msgspec.json.encode(list(rows)).decode()


def pack_claims(claims: Iterable[Claim]) -> str:
    """Render claims as the parameter of a statement with ``{claims}``."""
    return msgspec.json.encode([{"id": c.id, "attempt": c.attempt} for c in claims]).decode()


def render_hint(job_id: str, attempt: int, model: str) -> str:
    """Return what the queue is told about a job that waits; each attempt is another hint."""
    return f"{job_id}:{attempt}:{model}"


def parse_hint(hint: str) -> Claim:
    """Read ``job_…:attempt:model``."""
    job_id, attempt, _ = hint.split(":", 2)
    return Claim(job_id, int(attempt))


def parse_hinted_model(hint: str) -> str:
    """Read the model of ``job_…:attempt:model``; its name may hold colons."""
    return hint.split(":", 2)[2]


async def execute(
    tx: Transaction, template: str, parameters: Mapping[str, Any]
) -> CursorResult[Any]:
    """Run ``template`` with its ``{…}`` filled for the dialect of ``tx``.

    ``{now}`` is the clock; ``{rows(id text, n integer)}`` reads the parameter ``:rows``;
    ``{held(…)}`` selects the fenced and locked ``jobs`` rows as ``held_id`` beside those columns;
    ``{lock j}`` locks, ``{skip j}`` locks and skips what others hold.
    """
    return await tx.execute(_compile(template, tx.dialect.name, FENCE), parameters)


@functools.lru_cache(maxsize=256)
def _compile(template: str, dialect: str, fence: str) -> TextClause:
    parts = template.split("{")
    out = [parts[0]]
    for part in parts[1:]:
        piece, _, rest = part.partition("}")
        out.append((_render(piece, dialect, fence) if piece else "{}") + rest)
    return text("".join(out))


def _render(piece: str, dialect: str, fence: str) -> str:
    if piece == "now":
        return database_now(dialect)
    if piece.startswith(("lock ", "skip ")):
        if dialect == "sqlite":
            return ""  # an immediate transaction holds the whole file
        verb, _, alias = piece.partition(" ")
        return f"FOR UPDATE OF {alias}" + (" SKIP LOCKED" if verb == "skip" else "")
    name, _, columns = piece.partition("(")
    pairs = [tuple(column.split()) for column in columns.rstrip(")").split(",")]
    if name == "rows":
        return _render_rows(pairs, dialect)
    if name == "held":
        # Locked in the order of the ids, so that two writers of several rows cannot deadlock.
        extra = "".join(f", c.{column}" for column, _ in pairs if column not in {"id", "attempt"})
        return (
            f"SELECT j.id AS held_id{extra} FROM jobs j JOIN {_render_rows(pairs, dialect)} c "  # noqa: S608
            f"ON c.id = j.id WHERE {fence} ORDER BY j.id {_render('lock j', dialect, fence)}"
        )
    message = f"unknown piece of SQL: {piece}"
    raise ValueError(message)


def _render_rows(pairs: list[tuple[str, ...]], dialect: str) -> str:
    if dialect == "sqlite":
        columns = ", ".join(f"json_extract(value, '$.{name}') AS {name}" for name, _ in pairs)
        return f"(SELECT {columns} FROM json_each(:rows))"  # noqa: S608
    columns = ", ".join(f"{name} {_PG_TYPES[kind]}" for name, kind in pairs)
    return f"(SELECT * FROM json_to_recordset(CAST(:rows AS json)) AS r({columns}))"  # noqa: S608
