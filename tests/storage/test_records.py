"""Idempotency keys, tenants, workers, identifiers: the small tables."""

import asyncio

import pytest

from contract.errors import IdempotencyConflictError
from contract.models import ModelDescription, ModelState, ModelStatus, ScoringPath
from storage.database import Database
from storage.idempotency import bind, drop_expired_keys, find_or_claim
from storage.ids import create_id
from storage.jobs import add_jobs
from storage.tenants import webhook_secrets
from storage.workers import (
    Memory,
    WorkerRow,
    drop_dead_workers,
    drop_worker,
    heartbeat,
    list_workers,
    models,
    put_worker,
)
from tests.storage.factories import count, new_job, run_sql

KEY = ("t", "/v1/jobs", "key")


async def _submit_once(database: Database) -> str:
    async with database.transaction() as tx:
        found = await find_or_claim(tx, *KEY, "hash")
        if found is not None:
            return found
        (row,) = await add_jobs(tx, [new_job()])
        await bind(tx, *KEY, row.id)
        return row.id


async def test_fifty_submissions_with_one_key_are_one_job(database: Database) -> None:
    """All at once; each is answered with the same job."""
    ids = await asyncio.gather(*(_submit_once(database) for _ in range(50)))

    async with database.snapshot() as tx:
        assert await count(tx, "jobs") == 1
    assert len(set(ids)) == 1


async def test_a_key_with_another_body_is_refused(database: Database) -> None:
    """The same key of another tenant or route is another key."""
    await _submit_once(database)
    async with database.transaction() as tx:
        with pytest.raises(IdempotencyConflictError):
            await find_or_claim(tx, *KEY, "other")
        assert await find_or_claim(tx, "u", *KEY[1:], "other") is None
        assert await find_or_claim(tx, "t", "/v1/score", "key", "other") is None


async def test_a_key_is_forgotten_after_a_day(database: Database) -> None:
    """Then it may be used anew, or is swept."""
    first = await _submit_once(database)
    await run_sql(database, "UPDATE idempotency_keys SET created_at = created_at - 90000")
    second = await _submit_once(database)
    async with database.transaction() as tx:
        assert await drop_expired_keys(tx, limit=10) == 0
    await run_sql(database, "UPDATE idempotency_keys SET created_at = created_at - 90000")
    async with database.transaction() as tx:
        assert await drop_expired_keys(tx, limit=10) == 1

    assert first != second


async def test_a_submission_that_fails_leaves_no_key(database: Database) -> None:
    """The key is claimed in the transaction of the job, and goes with it."""
    message = "the job is refused"
    with pytest.raises(RuntimeError):  # noqa: PT012
        async with database.transaction() as tx:
            await find_or_claim(tx, *KEY, "hash")
            raise RuntimeError(message)

    async with database.transaction() as tx:
        assert await find_or_claim(tx, *KEY, "hash") is None


async def test_a_tenant_has_one_secret(database: Database) -> None:
    """Ten first uses at once agree, and it stays; another tenant's differs."""

    async def read(tenant: str) -> list[str]:
        async with database.transaction() as tx:
            return await webhook_secrets(tx, tenant)

    found = await asyncio.gather(*(read("t") for _ in range(10)))

    assert all(secrets == found[0] for secrets in found)
    assert found[0][0].startswith("whsec_")
    assert await read("t") == found[0]
    assert await read("u") != found[0]


def _worker(worker_id: str, *statuses: ModelStatus) -> WorkerRow:
    return WorkerRow(id=worker_id, host="h", pid=7, device="cpu", models=list(statuses))


def _status(name: str, state: ModelState, *, described: bool = False) -> ModelStatus:
    description = ModelDescription(
        name=name,
        path=ScoringPath.CAUSAL,
        architecture="a",
        hidden_size=1,
        max_tokens=1,
        dtype="float32",
        device="cpu",
    )
    return ModelStatus(name=name, state=state, description=description if described else None)


async def test_a_worker_registers_beats_and_leaves(database: Database) -> None:
    """A heartbeat of one that is not registered says so; the dead are told from the living."""
    worker = _worker("wrk_1", _status("m", ModelState.LOADING))
    async with database.transaction() as tx:
        assert not await heartbeat(tx, "wrk_1")
        await put_worker(tx, worker)
        await put_worker(tx, worker)
        assert await heartbeat(tx, "wrk_1")
        assert await heartbeat(tx, "wrk_1", [_status("m", ModelState.READY)])
        (found,) = await list_workers(tx, alive_within_s=5)
        assert (found.host, found.pid, found.device) == ("h", 7, "cpu")
        assert [status.state for status in found.models] == [ModelState.READY]
        assert 0 <= found.age_s < 5
        await put_worker(tx, _worker("wrk_2"))
        await drop_worker(tx, "wrk_2")
    await run_sql(database, "UPDATE workers SET heartbeat_at = heartbeat_at - 100")
    async with database.transaction() as tx:
        assert await list_workers(tx, alive_within_s=50) == []
        assert len(await list_workers(tx)) == 1
        assert await drop_dead_workers(tx, older_than_s=200) == 0
        assert await drop_dead_workers(tx, older_than_s=50) == 1


async def test_models_are_as_good_as_their_best_worker(database: Database) -> None:
    """Ready beats loading beats failed; what only the dead knew is loading, with what they knew."""
    async with database.transaction() as tx:
        gone = [_status(name, ModelState.READY, described=True) for name in ("gone", "m")]
        gone.append(_status("broken", ModelState.FAILED))
        await put_worker(tx, _worker("wrk_0", *gone))
    await run_sql(database, "UPDATE workers SET heartbeat_at = heartbeat_at - 100")
    async with database.transaction() as tx:
        one = (_status("m", ModelState.FAILED), _status("n", ModelState.READY))
        await put_worker(tx, _worker("wrk_1", *one))
        two = (_status("m", ModelState.LOADING), _status("n", ModelState.FAILED))
        await put_worker(tx, _worker("wrk_2", *two))
        found = {status.name: status for status in await models(tx, alive_within_s=50)}

    assert {name: status.state.value for name, status in found.items()} == {
        "gone": "loading",
        "m": "loading",
        "n": "ready",
    }
    assert found["m"].description is not None
    assert found["gone"].description is not None


def test_identifiers_sort_by_creation() -> None:
    """And say what they name."""
    ids = [create_id("job") for _ in range(1000)]

    assert ids == sorted(set(ids))
    assert ids[0].startswith("job_")


async def test_memory_is_what_the_last_heartbeat_said(database: Database) -> None:
    """A heartbeat that knows less keeps what an earlier one said; before the first: unknown."""
    whole = Memory(memory_bytes=1, device_memory_bytes=2, device_memory_total_bytes=3_000_000_000)
    async with database.transaction() as tx:
        await put_worker(tx, _worker("wrk_1"))
        (unknown,) = await list_workers(tx)
        await heartbeat(tx, "wrk_1", memory=whole)
        await heartbeat(tx, "wrk_1", memory=Memory(memory_bytes=9))
        (known,) = await list_workers(tx)

    assert unknown.memory == Memory()
    assert known.memory == Memory(
        memory_bytes=9, device_memory_bytes=2, device_memory_total_bytes=3_000_000_000
    )
    assert known.started_at > 0
