"""``python -m storage.doctor [--repair] [--deep]``: do rows, bytes and counts agree?

Safe beside a running service: what is young is left alone, and whatever seems missing is looked at
twice. Needed after a restore, where rows and bytes are of different moments.
"""

import argparse
import asyncio
import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from contract.config import load_settings
from contract.errors import NotFoundError, ScoreError
from contract.jobs import TERMINAL
from contract.logs import set_up_logging
from storage.blobs import BlobStore
from storage.bulk_counts import uncount
from storage.database import Database
from storage.events import ENDED, add_events
from storage.files import part_keys
from storage.forgetting import forget
from storage.statements import execute, pack
from storage.sweeps import unforgotten_refs

__all__ = ["Diagnosis", "examine", "main"]

_PAGE = 500
_YOUNG_S = 3600.0
_COMMAND_TIMEOUT_S = 600.0
_ENDED_STATES = ", ".join(f"'{state}'" for state in sorted(TERMINAL))


@dataclass(slots=True)
class Diagnosis:
    """What disagrees, by kind: ids or keys of blobs. ``repaired`` if it was mended."""

    rows_without_bytes: list[str] = field(default_factory=list)
    bytes_without_rows: list[str] = field(default_factory=list)
    blobs_without_jobs: list[str] = field(default_factory=list)
    blobs_not_recorded: list[str] = field(default_factory=list)
    files_without_bytes: list[str] = field(default_factory=list)
    counts_that_disagree: list[str] = field(default_factory=list)
    chunks_that_disagree: list[str] = field(default_factory=list)
    ends_without_event: list[str] = field(default_factory=list)
    deleted_with_bytes: list[str] = field(default_factory=list)
    keys_without_job: list[str] = field(default_factory=list)
    temporary_files: int = 0
    repaired: bool = False

    @property
    def findings(self) -> dict[str, int]:
        """How many of each kind."""
        return {
            name: found if isinstance(found, int) else len(found)
            for name in self.__dataclass_fields__
            if name != "repaired"
            for found in [getattr(self, name)]
        }

    @property
    def is_clean(self) -> bool:
        """Whether everything agrees."""
        return not any(self.findings.values())


async def examine(
    database: Database,
    store: BlobStore,
    *,
    repair: bool = False,
    deep: bool = False,
    young_s: float = _YOUNG_S,
) -> Diagnosis:
    """Compare everything with everything; with ``repair`` mend what was found.

    A job whose bytes are lost is queued again: its request is still there. ``deep`` reads every
    blob and compares its hash. Bytes younger than ``young_s`` may await their row.
    """
    found = Diagnosis(repaired=repair)
    await _compare_blobs(database, store, found, deep=deep, young_s=young_s)
    await _compare_rows(database, found)
    found.temporary_files = await store.count_temporary(older_than_s=young_s)
    if repair:
        await _repair(database, store, found, young_s)
    return found


async def _compare_blobs(
    database: Database, store: BlobStore, found: Diagnosis, *, deep: bool, young_s: float
) -> None:
    # Rows first: a blob is durable before its row, so each of these had its bytes.
    async with database.snapshot() as tx:
        recorded = {row.key: row for row in await execute(tx, _BLOBS, {})}
        named = set((await execute(tx, _NAMED, {})).scalars())
        young = set((await execute(tx, _YOUNG_BLOBS, {"young_s": young_s})).scalars())
        uploaded = (await execute(tx, _FILES, {})).all()
    stored: dict[str, int] = {}
    async for entry in store.list():
        stored[entry.key] = entry.size_bytes
        if entry.key not in recorded and entry.key not in named and entry.age_s >= young_s:
            found.bytes_without_rows.append(entry.key)
    found.bytes_without_rows = await _still_unknown(database, found.bytes_without_rows)
    found.blobs_without_jobs = sorted(set(recorded) - named - young)
    found.blobs_not_recorded = sorted((named & set(stored)) - set(recorded))
    suspects = [
        key
        for key in sorted(named)
        if key not in stored
        or (key in recorded and recorded[key].size_bytes != stored[key])
        or deep
    ]
    lost = [
        key
        for key in suspects
        if await _is_lost(store, key, recorded[key].sha256 if key in recorded else None, deep=deep)
        or (key in recorded and key in stored and recorded[key].size_bytes != stored[key])
    ]
    empty = [
        row.id
        for row in uploaded
        if not set(part_keys(row.id, row.size_bytes, row.part_bytes)) <= set(stored)
    ]
    async with database.snapshot() as tx:
        rows = await execute(tx, _JOBS_OF, {"rows": _pack(lost)})
        found.rows_without_bytes = list(rows.scalars())
        rows = await execute(tx, _STILL_FILES, {"rows": _pack(empty)})
        found.files_without_bytes = list(rows.scalars())


async def _is_lost(store: BlobStore, key: str, sha256: str | None, *, deep: bool) -> bool:
    try:
        if not deep:
            await store.get_range(key, 0, 1)
            return False
        data = await store.get(key)
    except NotFoundError:
        return True
    digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
    return sha256 is not None and digest != sha256


async def _still_unknown(database: Database, keys: Sequence[str]) -> list[str]:
    unknown: list[str] = []
    for start in range(0, len(keys), _PAGE):
        async with database.snapshot() as tx:
            rows = await execute(tx, _UNKNOWN, {"rows": _pack(keys[start : start + _PAGE])})
            unknown += rows.scalars()
    return unknown


async def _compare_rows(database: Database, found: Diagnosis) -> None:
    async with database.snapshot() as tx:
        found.counts_that_disagree = list(
            (await execute(tx, _COUNTS[tx.dialect.name], {})).scalars()
        )
        found.chunks_that_disagree = list((await execute(tx, _CHUNKS, {})).scalars())
        found.ends_without_event = list((await execute(tx, _NO_EVENT, {})).scalars())
        found.keys_without_job = list((await execute(tx, _NO_JOB, {})).scalars())
        refs = await unforgotten_refs(tx, limit=100 * _PAGE)
    found.deleted_with_bytes = [ref.job_id for ref in refs]


async def _repair(database: Database, store: BlobStore, found: Diagnosis, young_s: float) -> None:
    await store.delete(found.bytes_without_rows)
    await store.delete(found.blobs_without_jobs)
    await store.drop_temporary(older_than_s=young_s)
    for key in found.blobs_not_recorded:
        data = await store.get(key)
        digest = hashlib.sha256(data).hexdigest()
        async with database.transaction() as tx:
            values = {"key": key, "size_bytes": len(data), "sha256": digest}
            await execute(tx, _ADD_BLOB, values)
    async with database.transaction() as tx:
        await uncount(
            tx, (await execute(tx, _COUNTED, {"rows": _pack(found.rows_without_bytes)})).all()
        )
        await execute(tx, _AGAIN, {"rows": _pack(found.rows_without_bytes)})
        await execute(tx, _DELETE_FILES, {"rows": _pack(found.files_without_bytes)})
        await execute(tx, _DROP_BLOBS, {"rows": _pack(found.blobs_without_jobs)})
        await execute(tx, _RECOUNT[tx.dialect.name], {"rows": _pack(found.counts_that_disagree)})
        await execute(tx, _RECOUNT_CHUNKS, {"rows": _pack(found.chunks_that_disagree)})
        await execute(tx, _DROP_KEYS, {"rows": _pack(found.keys_without_job)})
        ended = await execute(tx, _ENDED_ROWS, {"rows": _pack(found.ends_without_event)})
        await add_events(tx, ended.all())
        refs = await unforgotten_refs(tx, limit=100 * _PAGE)
    for ref in refs:
        await forget(database, store, ref)


def _pack(ids: Iterable[str]) -> str:
    return pack({"id": each} for each in ids)


_BLOBS = "SELECT key, size_bytes, sha256 FROM blobs"
_NAMED = "SELECT DISTINCT blob_key FROM jobs WHERE blob_key IS NOT NULL"
_YOUNG_BLOBS = "SELECT key FROM blobs WHERE created_at > {now} - :young_s"
_JOBS_OF = """
SELECT j.id FROM jobs j JOIN {rows(id text)} r ON j.blob_key = r.id
WHERE j.deleted_at IS NULL AND j.tensors IS NOT NULL ORDER BY j.id
"""
_UNKNOWN = """
SELECT r.id FROM {rows(id text)} r WHERE r.id NOT IN (SELECT key FROM blobs b WHERE b.key = r.id)
  AND NOT EXISTS (SELECT 1 FROM files f WHERE r.id LIKE 'files/%' AND f.id = substr(r.id, 7, 36))
"""
_WRONG = """
state IN ('succeeded', 'partial') AND deleted_at IS NULL AND result IS NOT NULL
  AND (scored_count + failed_count != item_count OR failed_count != {errors}
       OR (state = 'succeeded' AND failed_count > 0))
"""
_ERRORS = {
    "sqlite": "json_array_length(coalesce(json_extract(result, '$.errors'), '[]'))",
    "postgresql": "json_array_length(coalesce(CAST(result AS json)->'errors', '[]'))",
}
_COUNTS = {
    name: f"SELECT id FROM jobs WHERE {_WRONG.format(errors=errors)} ORDER BY id"  # noqa: S608
    for name, errors in _ERRORS.items()
}
_RECOUNT = {
    name: f"""
UPDATE jobs SET failed_count = {errors}, scored_count = item_count - {errors},
    state = CASE WHEN {errors} > 0 THEN 'partial' ELSE 'succeeded' END, version = version + 1
WHERE id IN (SELECT r.id FROM {{rows(id text)}} r)
"""  # noqa: S608  # constants of ours
    for name, errors in _ERRORS.items()
}
_OPEN_JOBS = """
SELECT bulk_id, bulk_chunk, count(*) AS open FROM jobs
WHERE bulk_id IS NOT NULL AND state IN ('queued', 'running') GROUP BY bulk_id, bulk_chunk
"""
_CHUNKS = f"""
SELECT c.bulk_id || '/' || c.first_line FROM bulk_chunks c LEFT JOIN ({_OPEN_JOBS}) o
ON o.bulk_id = c.bulk_id AND o.bulk_chunk = c.first_line
WHERE c.open_jobs != coalesce(o.open, 0) ORDER BY c.bulk_id, c.first_line
"""  # noqa: S608  # constants of ours
_RECOUNT_CHUNKS = """
UPDATE bulk_chunks SET open_jobs = (
    SELECT count(*) FROM jobs j WHERE j.bulk_id = bulk_chunks.bulk_id
    AND j.bulk_chunk = bulk_chunks.first_line AND j.state IN ('queued', 'running'))
WHERE bulk_id || '/' || first_line IN (SELECT r.id FROM {rows(id text)} r)
"""
_FILES = """
SELECT id, size_bytes, part_bytes FROM files WHERE state = 'ready' AND deleted_at IS NULL
"""
_STILL_FILES = """
SELECT f.id FROM files f JOIN {rows(id text)} r ON f.id = r.id
WHERE f.state = 'ready' AND f.deleted_at IS NULL ORDER BY f.id
"""
_DELETE_FILES = """
UPDATE files SET deleted_at = {now} WHERE id IN (SELECT r.id FROM {rows(id text)} r)
"""
_COUNTED = f"""
SELECT {ENDED} FROM jobs WHERE id IN (SELECT r.id FROM {{rows(id text)}} r)
  AND bulk_id IS NOT NULL AND state IN ('succeeded', 'partial') AND request IS NOT NULL
"""  # noqa: S608  # constants of ours
_NO_EVENT = f"""
SELECT j.id FROM jobs j WHERE j.state IN ({_ENDED_STATES}) AND j.deleted_at IS NULL
  AND NOT EXISTS (SELECT 1 FROM events e WHERE e.job_id = j.id AND e.generation = j.generation)
ORDER BY j.id
"""  # noqa: S608  # constants of ours
_ENDED_ROWS = f"""
SELECT {ENDED} FROM jobs j WHERE id IN (SELECT r.id FROM {{rows(id text)}} r)
  AND NOT EXISTS (SELECT 1 FROM events e WHERE e.job_id = j.id AND e.generation = j.generation)
"""  # noqa: S608  # constants of ours
_NO_JOB = """
SELECT k.job_id FROM idempotency_keys k
WHERE substr(k.job_id, 1, 4) = 'job_' AND NOT EXISTS (SELECT 1 FROM jobs j WHERE j.id = k.job_id)
"""
_ADD_BLOB = """
INSERT INTO blobs (key, size_bytes, sha256, created_at)
VALUES (:key, :size_bytes, :sha256, {now}) ON CONFLICT DO NOTHING
"""
_AGAIN = """
UPDATE jobs SET
    state = 'queued', generation = generation + 1, version = version + 1, available_at = {now},
    crash_count = 0, error_count = 0, hinted_at = NULL, finished_at = NULL, expires_at = NULL,
    scored_count = 0, failed_count = 0, result = NULL, usage = NULL, error = NULL,
    tensors = NULL, blob_key = NULL, cancel_requested_at = NULL
WHERE id IN (SELECT r.id FROM {rows(id text)} r) AND state IN ('succeeded', 'partial')
  AND request IS NOT NULL
"""
_DROP_BLOBS = "DELETE FROM blobs WHERE key IN (SELECT r.id FROM {rows(id text)} r)"
_DROP_KEYS = "DELETE FROM idempotency_keys WHERE job_id IN (SELECT r.id FROM {rows(id text)} r)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine what the settings name, print a line per kind; 1 if something is left to mend."""
    parser = argparse.ArgumentParser(prog="scorekeep doctor", description=__doc__)
    parser.add_argument("--repair", action="store_true", help="mend what is found")
    parser.add_argument("--deep", action="store_true", help="read every blob, compare its hash")
    parser.add_argument(
        "--young", type=float, default=_YOUNG_S, metavar="S", help="leave younger bytes alone"
    )
    options = parser.parse_args(arguments)
    try:
        found = asyncio.run(_examine_settings(options))
    except ScoreError as error:
        print(f"scorekeep doctor: {error.message}", file=sys.stderr)  # noqa: T201
        return 2
    for name, count in found.findings.items():
        mended = " (repaired)" if count and options.repair else ""
        print(f"{name.replace('_', ' ')}: {count}{mended}")  # noqa: T201
    return 0 if found.is_clean or options.repair else 1


async def _examine_settings(options: argparse.Namespace) -> Diagnosis:
    settings = load_settings()
    set_up_logging(level=settings.log_level, style=settings.log_format)
    database = Database(settings.database, command_timeout_s=_COMMAND_TIMEOUT_S)
    try:
        store = BlobStore.open(settings.blobs)
        return await examine(
            database, store, repair=options.repair, deep=options.deep, young_s=options.young
        )
    finally:
        await database.close()


if __name__ == "__main__":
    sys.exit(main())
