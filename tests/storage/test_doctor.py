"""The doctor: what disagrees is found, nothing else is, and repairs are repairs."""

from pathlib import Path

import pytest

from contract.jobs import JobState
from storage.blobs import BlobStore
from storage.database import Database
from storage.doctor import Diagnosis, examine, main
from storage.events import list_events
from storage.files import finish_file, list_files, part_key, start_file
from storage.forgetting import delete_job
from storage.jobs import get_job
from tests.storage.factories import claim, complete, run_sql, submit


async def _finish(database: Database, store: BlobStore, key: str, jobs: int = 2) -> list[str]:
    """Score ``jobs`` jobs into one blob; return their ids."""
    await submit(database, count=jobs)
    info = await store.put(key, b"x" * 100)
    return sorted(await complete(database, await claim(database), info, result=b'{"errors":[]}'))


async def _examine(database: Database, store: BlobStore, **options: bool) -> Diagnosis:
    return await examine(database, store, young_s=-1.0, **options)


async def test_what_agrees_is_left_alone(database: Database, blob_store: BlobStore) -> None:
    """Queued, running and finished jobs beside each other: nothing is found."""
    await _finish(database, blob_store, "a")
    await submit(database, count=3)
    await claim(database, max_jobs=1)

    found = await _examine(database, blob_store, deep=True)

    assert found.is_clean, found


async def test_lost_bytes_are_scored_again(database: Database, blob_store: BlobStore) -> None:
    """A blob that is gone, cut or changed: its jobs are queued again, the others stay."""
    gone = await _finish(database, blob_store, "gone")
    cut = await _finish(database, blob_store, "cut")
    changed = await _finish(database, blob_store, "changed")
    kept = await _finish(database, blob_store, "kept")
    await blob_store.delete(["gone"])
    await blob_store.put("cut", b"x")
    await blob_store.put("changed", b"y" * 100)

    shallow = await _examine(database, blob_store)
    found = await _examine(database, blob_store, deep=True, repair=True)

    assert shallow.rows_without_bytes == sorted(gone + cut)
    assert found.rows_without_bytes == sorted(gone + cut + changed)
    async with database.snapshot() as tx:
        states = [(await get_job(tx, "t", job_id)).state for job_id in gone + cut + changed]
        assert set(states) == {JobState.QUEUED}
        assert (await get_job(tx, "t", kept[0])).state is JobState.SUCCEEDED
    await complete(database, await claim(database), await blob_store.put("new", b"z"), result=b"{}")
    assert (await _examine(database, blob_store, repair=True)).blobs_without_jobs
    assert (await _examine(database, blob_store, deep=True)).is_clean


async def test_bytes_without_rows_go(
    database: Database, blob_store: BlobStore, tmp_path: Path
) -> None:
    """Orphans, unused rows and temporary files are removed; young ones are not even named."""
    await blob_store.put("orphan", b"x")
    (tmp_path / "blobs" / ".tmp-dead-writer").write_bytes(b"half")
    await run_sql(database, "INSERT INTO blobs VALUES ('unused', 1, '', 1)")

    assert (await examine(database, blob_store)).findings["bytes_without_rows"] == 0
    found = await _examine(database, blob_store, repair=True)

    assert found.bytes_without_rows == ["orphan"]
    assert (found.blobs_without_jobs, found.temporary_files) == (["unused"], 1)
    assert list((tmp_path / "blobs").iterdir()) == []
    assert (await _examine(database, blob_store)).is_clean


async def test_rows_are_made_to_agree(database: Database, blob_store: BlobStore) -> None:
    """Counts, a missing event, a blob that is not recorded, a key of no job, a half deletion."""
    first, second = await _finish(database, blob_store, "a")
    third, fourth = await _finish(database, blob_store, "b")
    await run_sql(database, "UPDATE jobs SET scored_count = 7 WHERE id = :id", id=first)
    await run_sql(database, "DELETE FROM events WHERE job_id = :id", id=second)
    await run_sql(database, "DELETE FROM blobs WHERE key = 'a'")
    await run_sql(
        database, "INSERT INTO idempotency_keys VALUES ('t', 'r', 'k', 'h', 'job_gone', 1)"
    )
    async with database.transaction() as tx:
        await delete_job(tx, "t", third)
        await delete_job(tx, "t", fourth)

    found = await _examine(database, blob_store, repair=True)

    assert found.counts_that_disagree == [first]
    assert found.ends_without_event == [second]
    assert found.blobs_not_recorded == ["a"]
    assert found.keys_without_job == ["job_gone"]
    assert found.deleted_with_bytes == [third, fourth]
    assert (await _examine(database, blob_store, deep=True)).is_clean
    async with database.snapshot() as tx:
        assert (await get_job(tx, "t", first)).scored_count == 2
        assert len(await list_events(tx, second)) == 1


def test_the_command_prints_what_it_finds(
    sqlite_url: str,
    blob_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A line per kind; 1 while something is left, 0 after the repair, 2 where nothing answers."""
    monkeypatch.setenv("SCOREKEEP_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("SCOREKEEP_BLOB_URL", blob_url)
    BlobStore.open(blob_url)
    (Path(blob_url.removeprefix("file://")) / "orphan").write_bytes(b"x")

    codes = [main(["--young=-1"]), main(["--young=-1", "--repair"]), main(["--young=-1"])]
    printed = capsys.readouterr().out
    monkeypatch.setenv("SCOREKEEP_DATABASE_URL", "postgresql+asyncpg://nobody@127.0.0.1:1/none")

    assert codes == [1, 0, 0]
    assert "bytes without rows: 1 (repaired)" in printed
    assert main([]) == 2


async def _add_bulk(database: Database, *, open_jobs: int) -> None:
    """A bulk ``b`` with one chunk at line 0."""
    columns = "tenant, kind, state, endpoint, source, options, metadata"
    zeroes = "total_lines, refused_lines, ingested_lines, ingested_items, indexed_lines, attempt"
    await run_sql(
        database,
        f"INSERT INTO bulks (id, created_at, {columns}, {zeroes})"  # noqa: S608
        " VALUES ('b', 0, 't', 'bulk', 'running', '', '', '', '{}', 1, 0, 1, 2, 0, 1)",
    )
    tally = "lines_completed, lines_failed, lines_cancelled, scored, failed, cancelled"
    tally += ", from_cache, tokens, estimated_tokens"
    await run_sql(
        database,
        "INSERT INTO bulk_chunks (bulk_id, first_line, line_count, first_item, item_count, lines,"  # noqa: S608
        f" sources, open_jobs, {tally})"
        f" VALUES ('b', 0, 1, 0, 2, :raw, :raw, {open_jobs}, 0, 0, 0, 0, 0, 0, 0, 0, 0)",
        raw=b"",
    )


async def test_a_bulk_counts_a_job_once_that_is_scored_again(
    database: Database, blob_store: BlobStore
) -> None:
    """The repair takes back what was counted; after the second end all is as after the first."""
    await _add_bulk(database, open_jobs=1)
    (row,) = await submit(database, count=1)
    await run_sql(database, "UPDATE jobs SET bulk_id = 'b', bulk_chunk = 0, bulk_lines = 1")
    await complete(
        database,
        await claim(database),
        await blob_store.put("a", b"x" * 100),
        result=b'{"errors":[]}',
    )
    counts = "SELECT open_jobs, lines_completed, scored, tokens FROM bulk_chunks"
    (first,) = await run_sql(database, counts)
    await blob_store.delete(["a"])

    found = await _examine(database, blob_store, repair=True)
    (again,) = await run_sql(database, counts)
    await complete(
        database,
        await claim(database),
        await blob_store.put("b", b"x" * 100),
        result=b'{"errors":[]}',
    )
    (second,) = await run_sql(database, counts)

    assert found.rows_without_bytes == [row.id]
    assert tuple(first) == (0, 1, 2, 7)
    assert tuple(again) == (1, 0, 0, 0)
    assert tuple(second) == tuple(first)
    assert (await _examine(database, blob_store, repair=True)).chunks_that_disagree == []


async def test_files_and_chunks_are_made_to_agree(
    database: Database, blob_store: BlobStore
) -> None:
    """A file with a part missing is no file; a chunk that waits for jobs that are not, does not."""
    await _add_bulk(database, open_jobs=3)
    async with database.transaction() as tx:
        whole = await start_file(tx, "t", filename="f", purpose="batch", part_bytes=4)
        torn = await start_file(tx, "t", filename="f", purpose="batch", part_bytes=4)
        for file_id in (whole, torn):
            await finish_file(tx, file_id, purpose="batch", size_bytes=6, sha256="")
    for key in (part_key(whole, 0), part_key(whole, 1), part_key(torn, 0)):
        await blob_store.put(key, b"1234")

    found = await _examine(database, blob_store, repair=True)

    assert found.files_without_bytes == [torn]
    assert found.chunks_that_disagree == ["b/0"]
    assert (await _examine(database, blob_store)).is_clean
    assert (await run_sql(database, "SELECT open_jobs FROM bulk_chunks"))[0].open_jobs == 0
    async with database.snapshot() as tx:
        assert [
            file.id for file in await list_files(tx, "t", purpose=None, after=None, limit=9)
        ] == [whole]
