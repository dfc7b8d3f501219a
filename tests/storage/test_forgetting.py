"""Deleting for good: the row is a tombstone, the bytes are gone, the neighbours keep theirs."""

import asyncio

import pytest

from contract.errors import GoneError, IllegalTransitionError, JobNotFoundError
from storage.blobs import BlobStore
from storage.claims import ClaimedJob
from storage.database import Database
from storage.forgetting import delete_job, drop_orphans, forget
from storage.jobs import get_job
from storage.outcomes import complete_jobs
from storage.refs import BlobRef, TensorRef
from storage.sweeps import unforgotten_refs
from storage.tensors import Tensor, parse_header, render_safetensors
from tests.storage.factories import claim, count, new_job, outcome, run_sql, submit


async def _store_batch(database: Database, store: BlobStore, number: int) -> list[ClaimedJob]:
    """Complete ``number`` jobs whose tensors share one blob; job n's bytes are all n + 1."""
    await submit(database, *(new_job(webhook_url="https://e.com") for _ in range(number)))
    jobs = await claim(database)
    tensors = [
        Tensor(f"{job.id}/scores", "F32", [2], bytes([index + 1]) * 8)
        for index, job in enumerate(jobs)
    ]
    data = render_safetensors(tensors)
    refs: dict[str, list[TensorRef]] = {}
    for entry in parse_header(data):
        job_id, _, name = entry.name.partition("/")
        refs[job_id] = [TensorRef(name, entry.dtype, entry.shape, entry.begin, entry.end)]
    blob = await store.put("btc_1.safetensors", data)
    async with database.transaction() as tx:
        await complete_jobs(tx, [outcome(job, tensors=refs[job.id]) for job in jobs], blob)
    return jobs


async def _delete(database: Database, job: ClaimedJob) -> BlobRef:
    async with database.transaction() as tx:
        ref = await delete_job(tx, "t", job.id)
    assert ref is not None
    return ref


async def _read(database: Database, store: BlobStore, job: ClaimedJob) -> bytes:
    async with database.snapshot() as tx:
        row = await get_job(tx, "t", job.id)
    assert row.blob_key is not None
    (ref,) = row.tensors
    return await store.get_range(row.blob_key, ref.begin, ref.end)


async def _all_bytes(store: BlobStore) -> bytes:
    return b"".join([await store.get(entry.key) async for entry in store.list()])


async def test_deleting_one_of_a_batch_rewrites_its_blob(
    database: Database, blob_store: BlobStore
) -> None:
    """Its bytes are nowhere, the others are where their rows say; its deliveries are dropped."""
    first, second, third = await _store_batch(database, blob_store, 3)
    ref = await _delete(database, second)

    await forget(database, blob_store, ref)
    await forget(database, blob_store, ref)

    assert await _read(database, blob_store, first) == b"\x01" * 8
    assert await _read(database, blob_store, third) == b"\x03" * 8
    assert b"\x02" * 8 not in await _all_bytes(blob_store)
    async with database.snapshot() as tx:
        with pytest.raises(GoneError):
            await get_job(tx, "t", second.id)
        assert await count(tx, "deliveries") == 2
        assert await count(tx, "blobs") == 1
        assert await unforgotten_refs(tx, limit=10) == []


async def test_deleting_the_last_drops_the_blob(database: Database, blob_store: BlobStore) -> None:
    """No file and no row of it is left."""
    for job in await _store_batch(database, blob_store, 2):
        await forget(database, blob_store, await _delete(database, job))

    assert await _all_bytes(blob_store) == b""
    async with database.snapshot() as tx:
        assert await count(tx, "blobs") == 0


async def test_deletions_at_once_leave_only_the_living(
    database: Database, blob_store: BlobStore
) -> None:
    """Several rewriters of one blob end with one blob, without any of the dead."""
    jobs = await _store_batch(database, blob_store, 6)
    refs = [await _delete(database, job) for job in jobs[:4]]

    await asyncio.gather(*(forget(database, blob_store, ref) for ref in refs))

    left = await _all_bytes(blob_store)
    assert [await _read(database, blob_store, job) for job in jobs[4:]] == [
        b"\x05" * 8,
        b"\x06" * 8,
    ]
    assert not any(bytes([number]) * 8 in left for number in (1, 2, 3, 4))
    assert len([entry async for entry in blob_store.list()]) == 1


async def test_lost_bytes_do_not_stop_a_deletion(database: Database, blob_store: BlobStore) -> None:
    """What is not there need not be removed."""
    first, _ = await _store_batch(database, blob_store, 2)
    await blob_store.delete(["btc_1.safetensors"])

    await forget(database, blob_store, await _delete(database, first))

    async with database.snapshot() as tx:
        assert await unforgotten_refs(tx, limit=10) == []


async def test_only_ended_jobs_can_be_deleted(database: Database) -> None:
    """A queued one is refused, another tenant's is not found; without bytes nothing is to do."""
    (row,) = await submit(database, new_job())
    async with database.transaction() as tx:
        with pytest.raises(IllegalTransitionError):
            await delete_job(tx, "t", row.id)
        with pytest.raises(JobNotFoundError):
            await delete_job(tx, "other", row.id)
    (job,) = await claim(database)
    async with database.transaction() as tx:
        await complete_jobs(tx, [outcome(job)])
        assert await delete_job(tx, "t", row.id) is None
        with pytest.raises(GoneError):
            await delete_job(tx, "t", row.id)


async def test_orphans_are_dropped_and_the_rest_stays(
    database: Database, blob_store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes without a row, and rows without a job; young ones may still get theirs."""
    monkeypatch.setattr("storage.forgetting._PAGE", 2)
    (job,) = await _store_batch(database, blob_store, 1)
    for name in ("lost_1", "lost_2", "lost_3", "unused"):
        await blob_store.put(name, b"x")
    await run_sql(database, "INSERT INTO blobs VALUES ('unused', 1, '', 0)")

    assert await drop_orphans(database, blob_store, older_than_s=600) == 1
    assert await drop_orphans(database, blob_store, older_than_s=-600) == 3

    assert [entry.key async for entry in blob_store.list()] == ["btc_1.safetensors"]
    assert await _read(database, blob_store, job) == b"\x01" * 8


async def test_an_interrupted_deletion_is_found_again(
    database: Database, blob_store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after the rows moved and before the bytes went: the tombstone still says where."""
    first, second = await _store_batch(database, blob_store, 2)
    ref = await _delete(database, first)

    async def stop(keys: list[str]) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(blob_store, "delete", stop)
        with pytest.raises(asyncio.CancelledError):
            await forget(database, blob_store, ref)
    assert b"\x01" * 8 in await _all_bytes(blob_store)
    async with database.snapshot() as tx:
        left = await unforgotten_refs(tx, limit=10)
    for found in left:
        await forget(database, blob_store, found)

    assert left == [ref]
    assert b"\x01" * 8 not in await _all_bytes(blob_store)
    assert await _read(database, blob_store, second) == b"\x02" * 8
