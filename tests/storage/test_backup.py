"""Backups: taken beside writers they hold rows and bytes that agree, and come back as they were."""

import asyncio
import contextlib
import os
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from contract.config import Settings
from contract.errors import SettingsError, StoreUnavailableError
from contract.jobs import JobState
from storage import backup
from storage.backup import main, restore_backup, take_backup
from storage.blobs import BlobStore
from storage.database import Database
from storage.doctor import examine
from storage.files import finish_file, part_key, start_file
from storage.forgetting import delete_job, drop_orphans, forget
from storage.jobs import get_job
from storage.refs import TensorRef
from tests.storage.factories import claim, complete, count, run_sql, submit


@pytest.fixture
def settings(sqlite_url: str, tmp_path: Path) -> Settings:
    """An embedded machine, migrated and empty."""
    data = tmp_path / "data"
    data.mkdir()
    Path(sqlite_url.removeprefix("sqlite+aiosqlite:///")).rename(data / "scorekeep.db")
    return Settings(data_dir=str(data))


@pytest.fixture
async def opened(settings: Settings) -> AsyncIterator[tuple[Database, BlobStore]]:
    """Its stores."""
    database = Database(settings.database)
    yield database, BlobStore.open(settings.blobs)
    await database.close()


def elsewhere(tmp_path: Path, name: str) -> Settings:
    """Another machine, without data."""
    return Settings(data_dir=str(tmp_path / name))


async def finish(database: Database, store: BlobStore, key: str) -> list[str]:
    """Score two jobs into one blob of random bytes; return their ids."""
    await submit(database, count=2)
    jobs = await claim(database, max_jobs=2)
    info = await store.put(key, secrets.token_bytes(128))
    done: set[str] = set()
    for n, job in enumerate(jobs):
        refs = [TensorRef("scores", "F32", [2, 4], 64 + 32 * n, 96 + 32 * n)]
        done |= await complete(database, [job], info, result=b'{"errors":[]}', tensors=refs)
    return sorted(done)


async def read_all(settings: Settings) -> dict[str, bytes]:
    """Return every finished job's scores; the doctor finds nothing wrong with any."""
    database, store = Database(settings.database), BlobStore.open(settings.blobs)
    try:
        found = await examine(database, store, deep=True, young_s=-1.0)
        found.deleted_with_bytes.clear()  # deletions that were under way
        assert found.is_clean, found
        rows = await run_sql(database, "SELECT id FROM jobs WHERE state = 'succeeded'")
        scores = {}
        for row in rows:
            with contextlib.suppress(Exception):  # a tombstone
                async with database.snapshot() as tx:
                    job = await get_job(tx, "t", row.id)
                assert job.blob_key is not None
                ref = job.tensors[0]
                scores[row.id] = await store.get_range(job.blob_key, ref.begin, ref.end)
    finally:
        await database.close()
    return scores


@pytest.mark.slow
async def test_a_backup_beside_writers_is_whole(
    settings: Settings, opened: tuple[Database, BlobStore], tmp_path: Path
) -> None:
    """Jobs end, are deleted, and their blobs are written anew meanwhile: each backup agrees."""
    database, store = opened
    kept: dict[str, bytes] = {}
    stop = asyncio.Event()

    async def churn() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            doomed, survivor = await finish(database, store, f"batches/{number}")
            async with database.snapshot() as tx:
                row = await get_job(tx, "t", survivor)
            assert row.blob_key is not None
            ref = row.tensors[0]
            kept[survivor] = await store.get_range(row.blob_key, ref.begin, ref.end)
            async with database.transaction() as tx:
                gone = await delete_job(tx, "t", doomed)
            assert gone is not None
            await forget(database, store, gone)
            await drop_orphans(database, store, older_than_s=60)

    churning = asyncio.create_task(churn())
    while len(kept) < 5 and not churning.done():  # noqa: ASYNC110  # it ends by itself
        await asyncio.sleep(0.01)
    backups = []
    for number in range(6):
        before = set(kept)
        manifest = await asyncio.to_thread(take_backup, settings, tmp_path / f"b{number}")
        backups.append((number, before, manifest))
    stop.set()
    await churning

    for number, before, manifest in backups:
        target = elsewhere(tmp_path, f"r{number}")
        await asyncio.to_thread(restore_backup, target, tmp_path / f"b{number}")
        scores = await read_all(target)
        assert manifest.missing == 0
        assert before <= set(scores)
        assert {job_id: scores[job_id] for job_id in before} == {i: kept[i] for i in before}


async def test_what_ran_waits_again(
    settings: Settings, opened: tuple[Database, BlobStore], tmp_path: Path
) -> None:
    """A restore gives back what was claimed, with nothing held against it; files come along."""
    database, store = opened
    await submit(database, count=2)
    held = await claim(database, max_jobs=1)
    async with database.transaction() as tx:
        file_id = await start_file(tx, "t", filename="f", purpose="batch", part_bytes=4)
        await finish_file(tx, file_id, purpose="batch", size_bytes=6, sha256="")
    await store.put(part_key(file_id, 0), b"1234")
    await store.put(part_key(file_id, 1), b"56")
    await store.put("files/unknown/000000", b"an upload under way")
    (Path(settings.data_dir) / "canaries").mkdir()
    (Path(settings.data_dir) / "canaries" / "m.json").write_text("{}")
    target = elsewhere(tmp_path, "restored")

    await asyncio.to_thread(take_backup, settings, tmp_path / "out")
    await asyncio.to_thread(restore_backup, target, tmp_path / "out")

    restored, blobs = Database(target.database), BlobStore.open(target.blobs)
    async with restored.snapshot() as tx:
        row = await get_job(tx, "t", held[0].id)
        workers = await count(tx, "workers")
    again = await claim(restored)
    keys = {entry.key async for entry in blobs.list()}
    await restored.close()
    assert (row.state, row.crash_count, row.attempt) == (JobState.QUEUED, 0, 1)
    assert sorted(job.attempt for job in again) == [1, 2]
    assert workers == 0
    assert keys == {part_key(file_id, 0), part_key(file_id, 1)}
    assert (Path(target.data_dir) / "canaries" / "m.json").exists()


async def test_rows_are_taken_again_where_their_bytes_went(
    settings: Settings,
    opened: tuple[Database, BlobStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A blob is made and moved on while the backup looks elsewhere."""
    database, store = opened
    first = await finish(database, store, "old")
    taken: list[str] = []
    copy_rows: Callable[[Path, Path], None] = backup._copy_rows

    def copy_and_move(rows: Path, target: Path) -> None:
        copy_rows(rows, target)
        taken.append("rows")
        if len(taken) == 1:
            folder = Path(settings.data_dir) / "blobs"
            os.replace(folder / "made", folder / "moved")
            with sqlite3.connect(rows) as connection:
                connection.execute("UPDATE blobs SET key = 'moved' WHERE key = 'made'")
                connection.execute("UPDATE jobs SET blob_key = 'moved' WHERE blob_key = 'made'")
            connection.close()

    list_blobs, second = backup._list_blobs, await finish(database, store, "made")
    hidden = [path for path in list_blobs(Path(settings.data_dir) / "blobs") if path.name != "made"]
    listed = iter([hidden])
    monkeypatch.setattr(backup, "_copy_rows", copy_and_move)
    monkeypatch.setattr(backup, "_list_blobs", lambda folder: next(listed, list_blobs(folder)))

    manifest = await asyncio.to_thread(take_backup, settings, tmp_path / "out")
    monkeypatch.undo()
    target = elsewhere(tmp_path, "restored")
    await asyncio.to_thread(restore_backup, target, tmp_path / "out")

    assert taken == ["rows", "rows"]
    assert (manifest.blobs, manifest.missing, manifest.jobs) == (2, 0, 4)
    assert set(await read_all(target)) == {*first, *second}


async def test_missing_bytes_are_said(
    settings: Settings,
    opened: tuple[Database, BlobStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A damaged store is backed up as it is: code 1, and the restore says what the doctor mends."""
    database, store = opened
    await finish(database, store, "lost")
    await store.delete(["lost"])
    monkeypatch.setenv("SCOREKEEP_DATA_DIR", settings.data_dir)

    taken = await asyncio.to_thread(main, ["take", str(tmp_path / "out")])
    monkeypatch.setenv("SCOREKEEP_DATA_DIR", str(tmp_path / "restored"))
    restored = await asyncio.to_thread(main, ["restore", str(tmp_path / "out")])

    printed = capsys.readouterr()
    assert (taken, restored) == (1, 1)
    assert "1 blobs that rows name are missing: run scorekeep doctor" in printed.err
    assert "rows without bytes: 2: run scorekeep doctor --repair" in printed.out


async def test_refusals_change_nothing(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing target, another store, no backup, a newer format: the error says what to do."""
    out = tmp_path / "out"
    await asyncio.to_thread(take_backup, settings, out)
    foreign = Settings(database_url="postgresql+asyncpg://x@127.0.0.1:1/x")
    bucket = Settings(data_dir=settings.data_dir, blob_url="s3://bucket")
    newer = tmp_path / "newer"
    newer.mkdir()
    manifest = (out / "backup.json").read_text().replace('"format": 1', '"format": 2')
    (newer / "backup.json").write_text(manifest)

    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: take_backup(settings, out), "exists already"),
        (lambda: take_backup(foreign, tmp_path / "x"), "pg_dump"),
        (lambda: take_backup(bucket, tmp_path / "x"), "bucket"),
        (lambda: take_backup(elsewhere(tmp_path, "none"), tmp_path / "x"), "there is no database"),
        (lambda: restore_backup(settings, out), "exists already"),
        (lambda: restore_backup(elsewhere(tmp_path, "y"), tmp_path), "is not a backup"),
        (lambda: restore_backup(elsewhere(tmp_path, "y"), newer), "format 2"),
    ]
    for call, words in calls:
        with pytest.raises(SettingsError, match=words):
            call()
    assert not (tmp_path / "x").exists()
    with backup._alone(tmp_path / "y"), pytest.raises(SettingsError, match="scorekeep up is using"):
        restore_backup(elsewhere(tmp_path, "y"), out)
    monkeypatch.setenv("SCOREKEEP_DATA_DIR", settings.data_dir)
    assert main(["take", str(out)]) == 2


@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal"])
def test_a_journal_left_behind_is_refused(settings: Settings, tmp_path: Path, ending: str) -> None:
    """SQLite would replay the journal of a database that was removed into the restored one."""
    take_backup(settings, tmp_path / "out")
    target = elsewhere(tmp_path, "target")
    left = tmp_path / "target" / f"scorekeep.db{ending}"
    left.parent.mkdir()
    left.write_bytes(b"left behind")

    with pytest.raises(SettingsError, match=f"scorekeep.db{ending} exists already"):
        restore_backup(target, tmp_path / "out")

    assert list(left.parent.iterdir()) == [left]
    assert left.read_bytes() == b"left behind"


def test_an_interrupted_restore_leaves_nothing_to_replay(
    settings: Settings, tmp_path: Path
) -> None:
    """What a restore that was killed had in its journal is not in the one that repeats it."""
    take_backup(settings, tmp_path / "out")
    target = elsewhere(tmp_path, "target")
    rows = Path(settings.data_dir) / "scorekeep.db"
    half = tmp_path / "target" / ".tmp-scorekeep.db"
    half.parent.mkdir()
    with contextlib.closing(sqlite3.connect(rows, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("INSERT INTO counters (name, value) VALUES ('after', 1)")
        half.with_name(f"{half.name}-wal").write_bytes(
            rows.with_name(f"{rows.name}-wal").read_bytes()
        )

    restore_backup(target, tmp_path / "out")

    with contextlib.closing(sqlite3.connect(half.with_name("scorekeep.db"))) as connection:
        found = connection.execute("SELECT name FROM counters WHERE name = 'after'").fetchall()
        verdict = connection.execute("PRAGMA integrity_check").fetchall()
    assert (found, verdict) == ([], [("ok",)])


def test_a_backup_that_fails_leaves_nothing(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a backup is removed, and the next one goes on from the beginning."""

    def fail(_rows: Path, _target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backup, "_copy_rows", fail)
    with pytest.raises(OSError, match="No space"):
        take_backup(settings, tmp_path / "out")

    assert list(tmp_path.glob("*out*")) == []
    monkeypatch.undo()
    assert take_backup(settings, tmp_path / "out").jobs == 0


def test_a_damaged_database_is_an_error(settings: Settings, tmp_path: Path) -> None:
    """What is no database is said, and nothing is left behind."""
    (Path(settings.data_dir) / "scorekeep.db").write_bytes(b"no database" * 100)

    with pytest.raises(StoreUnavailableError, match="cannot be read"):
        take_backup(settings, tmp_path / "out")

    assert list(tmp_path.glob("*out*")) == []
