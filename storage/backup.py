"""``python -m storage.backup take OUT | restore IN``: rows and bytes of one machine, that agree.

For SQLite and a folder of blobs, beside a running service. Bytes are durable before the row that
names them and outlive it, but a rewritten or deleted blob goes: so the blobs are copied first, then
the rows at one moment, then what those rows name and the first round had not seen. Where that went
in between, the rows are taken once more.
"""

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sqlalchemy.engine import make_url

from contract.config import Settings, load_settings
from contract.errors import ScoreError, SettingsError, StoreUnavailableError
from contract.logs import set_up_logging
from storage.blobs import BlobStore
from storage.database import Database
from storage.doctor import examine
from storage.files import part_keys
from storage.migrating import migrate

__all__ = ["Manifest", "main", "restore_backup", "take_backup"]

_FORMAT = 1
_TRIES = 10
_ROWS, _BLOBS, _CANARIES, _MANIFEST = "scorekeep.db", "blobs", "canaries", "backup.json"
_TEMPORARY = ".tmp-"
_YOUNG_S = 3600.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a backup holds. ``missing`` blobs are named by rows, and the store had them no more."""

    format: int
    made_at: float
    revision: str
    jobs: int
    blobs: int
    size_bytes: int
    missing: int

    def render(self) -> str:
        """Return one line."""
        return f"{self.jobs} jobs, {self.blobs} blobs, {self.size_bytes / 1e6:.1f} MB"


def take_backup(settings: Settings, out: Path) -> Manifest:
    """Write a backup into the new folder ``out``, whole or not at all.

    Raises ``SettingsError`` where it exists, or where rows or bytes lie elsewhere.
    """
    rows, blobs = _find_parts(settings)
    if out.exists():
        message = f"{out} exists already; a backup is a new folder"
        raise SettingsError(message)
    if not rows.exists():
        message = f"there is no database {rows}"
        raise SettingsError(message)
    partial = out.with_name(f"{_TEMPORARY}{out.name}")
    shutil.rmtree(partial, ignore_errors=True)  # of one that was interrupted
    partial.mkdir(parents=True)
    try:
        manifest = _fill(partial, rows, blobs)
        canaries = Path(settings.data_dir) / _CANARIES
        if canaries.is_dir():
            shutil.copytree(canaries, partial / _CANARIES)
        (partial / _MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n")
        os.sync()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def restore_backup(settings: Settings, source: Path) -> Manifest:
    """Make the data of ``settings`` anew from a backup; nothing may run there, or be there.

    What ran when the backup was taken waits again, with nothing held against it. An interrupted
    restore may be repeated. Raises ``SettingsError``.
    """
    rows, blobs = _find_parts(settings)
    manifest = _read_manifest(source)
    for path in (rows, *_journals(rows)):  # SQLite would replay a journal into what is restored
        if path.exists():
            message = f"{path} exists already; restore into a folder without data"
            raise SettingsError(message)
    rows.parent.mkdir(parents=True, exist_ok=True)
    with _alone(Path(settings.data_dir)):
        for path in _list_blobs(source / _BLOBS):
            _copy(path, blobs / path.relative_to(source / _BLOBS))
        if (source / _CANARIES).is_dir():
            target = Path(settings.data_dir) / _CANARIES
            shutil.copytree(source / _CANARIES, target, dirs_exist_ok=True)
        partial = rows.with_name(f"{_TEMPORARY}{rows.name}")
        for path in _journals(partial):  # of a restore that was interrupted
            path.unlink(missing_ok=True)
        shutil.copyfile(source / _ROWS, partial)
        _settle(partial)
        migrate(f"sqlite+aiosqlite:///{partial}")
        _drop_journal(partial)
        os.sync()
        partial.rename(rows)
    return manifest


def _find_parts(settings: Settings) -> tuple[Path, Path]:
    """Return the database's file and the blobs' folder."""
    url = make_url(settings.database)
    if url.get_backend_name() != "sqlite" or not url.database:
        message = (
            "the database is not a SQLite file: use its own tools (pg_dump), as docs/operations.md "
            "says under What to back up"
        )
        raise SettingsError(message)
    parts = urlsplit(settings.blobs)
    if parts.scheme != "file":
        message = (
            "the blobs are not in a folder: copy the bucket with its own tools, as "
            "docs/operations.md says under What to back up"
        )
        raise SettingsError(message)
    return Path(url.database), Path(unquote(parts.path))


def _journals(rows: Path) -> list[Path]:
    """Return where SQLite keeps what is not yet in its file."""
    return [rows.with_name(f"{rows.name}{ending}") for ending in ("-wal", "-shm", "-journal")]


def _fill(partial: Path, rows: Path, blobs: Path) -> Manifest:
    kept = partial / _BLOBS
    kept.mkdir()
    for path in _list_blobs(blobs):
        with contextlib.suppress(FileNotFoundError):  # deleted, or written anew, meanwhile
            _copy(path, kept / path.relative_to(blobs))
    named: set[str] = set()
    missing: set[str] = set()
    for _ in range(_TRIES):
        _copy_rows(rows, partial / _ROWS)
        named = _list_named(partial / _ROWS)
        missing = set()
        for key in named:
            try:
                _copy(blobs / key, kept / key)
            except FileNotFoundError:
                missing.add(key)
        if not missing:
            break
    size_bytes = 0
    for path in _list_blobs(kept):
        if str(path.relative_to(kept)) in named:
            size_bytes += path.stat().st_size
        else:
            path.unlink()  # bytes of what is deleted, or not yet recorded
    revision, jobs = _describe(partial / _ROWS)
    return Manifest(
        format=_FORMAT,
        made_at=time.time(),
        revision=revision,
        jobs=jobs,
        blobs=len(named - missing),
        size_bytes=size_bytes,
        missing=len(missing),
    )


def _list_blobs(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(_TEMPORARY)
    ]


def _copy(source: Path, target: Path) -> None:
    """Copy one blob unless it is there already: blobs never change."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{_TEMPORARY}{target.name}")
    shutil.copyfile(source, partial)
    partial.rename(target)


def _copy_rows(rows: Path, target: Path) -> None:
    """Copy the database as of one moment, through SQLite: no writer waits, none is half there."""
    target.unlink(missing_ok=True)
    with _opened(rows) as source, _opened(target) as copy:
        source.backup(copy)
        (verdict,) = copy.execute("PRAGMA quick_check").fetchone()
    if verdict != "ok":
        message = f"the copy of the database is damaged: {verdict}"
        raise StoreUnavailableError(message)
    _drop_journal(target)


def _list_named(rows: Path) -> set[str]:
    with _opened(rows) as connection:
        named = {key for (key,) in connection.execute(_NAMED)}
        for file_id, size_bytes, part_bytes in connection.execute(_FILES):
            named.update(part_keys(file_id, size_bytes, part_bytes))
    return named


def _describe(rows: Path) -> tuple[str, int]:
    with _opened(rows) as connection:
        (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        (jobs,) = connection.execute(
            "SELECT count(*) FROM jobs WHERE deleted_at IS NULL"
        ).fetchone()
    return revision, jobs


def _settle(rows: Path) -> None:
    """Give back what workers held that no longer are."""
    with _opened(rows) as connection:
        for statement in _SETTLE:
            connection.execute(statement)


def _drop_journal(rows: Path) -> None:
    """Bring everything into the one file."""
    with _opened(rows) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")


@contextlib.contextmanager
def _opened(rows: Path) -> Iterator[sqlite3.Connection]:
    try:
        with contextlib.closing(sqlite3.connect(rows, isolation_level=None)) as connection:
            yield connection
    except sqlite3.Error as error:
        message = f"{rows} cannot be read or written: {error}"
        raise StoreUnavailableError(message) from error


def _read_manifest(source: Path) -> Manifest:
    try:
        manifest = Manifest(**json.loads((source / _MANIFEST).read_text()))
    except (OSError, ValueError, TypeError) as error:
        message = f"{source} is not a backup: {error}"
        raise SettingsError(message) from error
    if manifest.format != _FORMAT:
        message = f"{source} is of format {manifest.format}; this version reads {_FORMAT}"
        raise SettingsError(message)
    return manifest


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep ``scorekeep up`` off the folder meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            message = f"scorekeep up is using {folder}"
            raise SettingsError(message) from error
        yield


_NAMED = """
SELECT DISTINCT blob_key FROM jobs
WHERE blob_key IS NOT NULL AND tensors IS NOT NULL AND deleted_at IS NULL
"""
_FILES = "SELECT id, size_bytes, part_bytes FROM files WHERE state = 'ready' AND deleted_at IS NULL"
_SETTLE = (
    """
UPDATE jobs SET state = 'queued', lease_until_at = NULL, hinted_at = NULL, version = version + 1
WHERE state = 'running'
""",
    "DELETE FROM workers",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Take or restore a backup of what the settings name; 1 if bytes are missing in it."""
    parser = argparse.ArgumentParser(prog="scorekeep backup", description=__doc__)
    parser.add_argument("action", choices=["take", "restore"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        settings = load_settings()
        set_up_logging(level="WARNING", style=settings.log_format)
        if options.action == "take":
            return _report_taken(options.folder, take_backup(settings, options.folder))
        return _report_restored(settings, restore_backup(settings, options.folder))
    except (ScoreError, OSError) as error:
        message = error.message if isinstance(error, ScoreError) else str(error)
        print(f"scorekeep: {message}", file=sys.stderr)  # noqa: T201
        return 2


def _report_taken(out: Path, manifest: Manifest) -> int:
    print(f"backup {out}: {manifest.render()}")  # noqa: T201
    if manifest.missing:
        message = f"{manifest.missing} blobs that rows name are missing: run scorekeep doctor"
        print(message, file=sys.stderr)  # noqa: T201
    return 1 if manifest.missing else 0


def _report_restored(settings: Settings, manifest: Manifest) -> int:
    findings = asyncio.run(_examine(settings))
    print(f"restored {manifest.render()} into {settings.data_dir}")  # noqa: T201
    for name, count in findings.items():
        if count:
            print(f"{name.replace('_', ' ')}: {count}: run scorekeep doctor --repair")  # noqa: T201
    return 1 if any(findings.values()) else 0


async def _examine(settings: Settings) -> dict[str, int]:
    database = Database(settings.database)
    try:
        found = await examine(database, BlobStore.open(settings.blobs), young_s=_YOUNG_S)
    finally:
        await database.close()
    # A deletion that was under way goes on once a worker runs.
    return {name: n for name, n in found.findings.items() if name != "deleted_with_bytes"}


if __name__ == "__main__":
    sys.exit(main())
