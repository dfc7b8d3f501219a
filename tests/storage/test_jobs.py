"""Job rows: adding, reading, listing, counting."""

import pytest

from contract.errors import GoneError, JobNotFoundError
from contract.jobs import TERMINAL, JobState, Lane
from storage.bulks import park_jobs
from storage.database import Database
from storage.forgetting import delete_job
from storage.jobs import (
    add_jobs,
    finished_among,
    get_job,
    list_jobs,
    queue_depth,
    read_request,
    running_jobs,
)
from storage.tables import RARE
from storage.usage import read_waiting
from tests.storage.factories import REQUEST, claim, complete, new_job, run_sql, submit


async def test_a_job_comes_back_as_it_was_submitted(database: Database) -> None:
    """Every field survives, and the row that submitting returns is the row that reading returns."""
    job = new_job(
        lane=Lane.BULK,
        metadata={"kind": 'a "quoted" one', "empty": ""},
        webhook_url="https://example.com/hook",
        webhook_events=["job.failed", "job.partial"],
        queue_deadline_s=60.0,
        run_timeout_s=5.0,
        expires_after_s=100.0,
    )
    (row,) = await submit(database, job)

    async with database.snapshot() as tx:
        assert await get_job(tx, "t", row.id) == row
        assert await read_request(tx, "t", row.id) == REQUEST
    assert row.queue_deadline_at == pytest.approx(row.created_at + 60, abs=0.01)
    assert row.state is JobState.QUEUED
    assert row.lane is Lane.BULK
    assert (row.attempt, row.item_count, row.estimated_tokens) == (0, 2, 10)
    assert row.metadata == job.metadata
    assert row.webhook_events == job.webhook_events
    assert row.run_timeout_s == 5.0
    assert row.hint == f"{row.id}:0:{row.model}"


async def test_many_jobs_keep_their_order(database: Database) -> None:
    """More rows than one statement carries come back in the order given, newest first in lists."""
    rows = await submit(database, *(new_job(item_count=number) for number in range(1500)))

    assert [row.item_count for row in rows] == list(range(1500))
    assert [row.id for row in rows] == sorted(row.id for row in rows)


async def test_no_jobs_are_no_statement(database: Database) -> None:
    """An empty list is answered with one."""
    async with database.transaction() as tx:
        assert await add_jobs(tx, []) == []


async def test_a_large_request_is_compressed_and_comes_back(database: Database) -> None:
    """It is smaller in the row than it was."""
    request = b'{"items":[' + b'"the same again",' * 50_000 + b'""]}'
    (row,) = await submit(database, new_job(request=request))

    stored = await run_sql(database, "SELECT length(request) FROM jobs")
    assert stored[0][0] < len(request) / 10
    async with database.snapshot() as tx:
        assert await read_request(tx, "t", row.id) == request


async def test_another_tenants_job_is_not_found(database: Database) -> None:
    """As is one that never was: nothing tells the two apart."""
    (row,) = await submit(database, new_job())

    async with database.snapshot() as tx:
        for tenant, job_id in (("other", row.id), ("t", "job_none")):
            with pytest.raises(JobNotFoundError):
                await get_job(tx, tenant, job_id)
            with pytest.raises(JobNotFoundError):
                await read_request(tx, tenant, job_id)


async def test_a_deleted_job_is_gone(database: Database) -> None:
    """Reading says 410, listing leaves it out, and no payload is left in its row."""
    await submit(database, new_job(metadata={"secret": "x"}, webhook_url="https://e.com"))
    (job,) = await claim(database)
    await complete(database, [job])
    async with database.transaction() as tx:
        await delete_job(tx, "t", job.id)

    async with database.snapshot() as tx:
        with pytest.raises(GoneError):
            await get_job(tx, "t", job.id)
        with pytest.raises(GoneError):
            await read_request(tx, "t", job.id)
        assert await list_jobs(tx, "t") == []
    columns = "request, result, usage, error, tensors, webhook_url"
    (left,) = await run_sql(database, f"SELECT {columns} FROM jobs")  # noqa: S608
    assert set(left) == {None}


async def test_a_request_that_was_lost_is_gone(database: Database) -> None:
    """A row without its request cannot be read as an empty one."""
    (row,) = await submit(database, new_job())
    await run_sql(database, "UPDATE jobs SET request = NULL")

    async with database.snapshot() as tx:
        with pytest.raises(GoneError):
            await read_request(tx, "t", row.id)


async def test_lists_filter_and_page(database: Database) -> None:
    """Filters combine; ``after`` continues where the last page ended; results are not read."""
    first, second, third = await submit(
        database,
        new_job(metadata={"run.id": "1", "who": "a"}),
        new_job(metadata={"run.id": "1"}, model="n"),
        new_job(metadata={"run.id": "2"}),
    )
    await complete(database, (await claim(database))[:1])

    async with database.snapshot() as tx:
        everything = [row.id for row in await list_jobs(tx, "t")]
        page = await list_jobs(tx, "t", limit=2)
        rest = await list_jobs(tx, "t", after=page[-1].id)
        by_metadata = await list_jobs(tx, "t", metadata={"run.id": "1"})
        by_both = await list_jobs(tx, "t", metadata={"run.id": "1", "who": "a"})
        by_model = await list_jobs(tx, "t", model="n")
        by_state = await list_jobs(tx, "t", state=JobState.SUCCEEDED)
        assert await list_jobs(tx, "other") == []

    assert everything == [third.id, second.id, first.id]
    assert [row.id for row in page + rest] == everything
    assert [row.id for row in by_metadata] == [second.id, first.id]
    assert [row.id for row in by_both] == [first.id]
    assert [row.id for row in by_model] == [second.id]
    assert [(row.id, row.result, row.tensors) for row in by_state] == [(first.id, None, [])]


async def test_the_queues_depth_is_by_model_and_lane(database: Database) -> None:
    """Only what is queued counts."""
    await submit(database, new_job(model="b", lane=Lane.BULK), new_job(model="b", lane=Lane.BULK))
    await submit(database, new_job(lane=Lane.INTERACTIVE))
    await claim(database)

    async with database.snapshot() as tx:
        (depth,) = await queue_depth(tx)

    assert (depth.model, depth.lane, depth.count, depth.tokens) == ("b", Lane.BULK, 2, 20)
    assert 0 <= depth.oldest_age_s < 20


async def test_what_a_paused_bulk_holds_back_does_not_wait(database: Database) -> None:
    """No worker may take it: it is in nobody's way, until the bulk goes on."""
    await submit(database, new_job(lane=Lane.BULK), new_job(lane=Lane.BULK))
    await run_sql(database, "UPDATE jobs SET bulk_id = 'x'")
    async with database.snapshot() as tx:
        before = [(each.count, each.tokens) for each in await queue_depth(tx)]
        counted = [(each.jobs, each.tokens) for each in await read_waiting(tx)]
    async with database.transaction() as tx:
        await park_jobs(tx, "x")

    async with database.snapshot() as tx:
        depths, waiting = await queue_depth(tx), await read_waiting(tx)

    assert before == counted == [(2, 20)]
    assert (depths, waiting) == ([], [])


async def test_those_that_ended_are_told_from_the_waiting(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended, deleted and unknown ones need no further waiting; queued and running ones do."""
    monkeypatch.setattr("storage.jobs._IDS_A_STATEMENT", 2)
    await submit(database, *(new_job() for _ in range(3)))
    ended, deleted, running = await claim(database)
    (queued,) = await submit(database, new_job())
    await complete(database, [ended, deleted])
    async with database.transaction() as tx:
        await delete_job(tx, "t", deleted.id)
        ids = [ended.id, deleted.id, running.id, queued.id, "job_none"]
        found = await finished_among(tx, ids)
        assert await finished_among(tx, []) == set()

    assert found == {ended.id, deleted.id, "job_none"}


async def test_any_metadata_key_can_be_asked_for(database: Database) -> None:
    """Also those that a JSON path cannot name."""
    keys = ['a"b', "a\\b", "x.y", "$", "'", "é", "a b", "[0]"]
    async with database.transaction() as tx:
        rows = await add_jobs(tx, [new_job(metadata={key: "1", "other": "2"}) for key in keys])
        for key, row in zip(keys, rows, strict=True):
            found = await list_jobs(tx, row.tenant, metadata={key: "1"})
            assert [one.id for one in found] == [row.id], key
            assert await list_jobs(tx, row.tenant, metadata={key: "2"}) == []


async def test_what_runs_is_by_worker_model_and_lane(database: Database) -> None:
    """Nothing but the running: neither what waits nor what has ended."""
    await submit(database, new_job(lane=Lane.BULK), new_job(lane=Lane.BULK), new_job())
    ended = await claim(database, max_jobs=1)
    await complete(database, ended)
    await claim(database, worker="w2")
    await submit(database, new_job())

    async with database.snapshot() as tx:
        running = await running_jobs(tx)

    assert [(each.worker, each.model, each.lane, each.count) for each in running] == [
        ("w2", "m", Lane.BULK, 2)
    ]


@pytest.mark.parametrize("state", sorted(TERMINAL - {JobState.SUCCEEDED}))
async def test_rare_states_are_found_by_their_index(database: Database, state: JobState) -> None:
    """Newest first, of this tenant only; no walk over the jobs that succeeded."""
    rows = await submit(database, count=4)
    changed = [rows[0].id, rows[2].id]
    for job_id in changed:
        update = "UPDATE jobs SET state = :state WHERE id = :id"
        await run_sql(database, update, state=state, id=job_id)

    async with database.snapshot() as tx:
        found = [row.id for row in await list_jobs(tx, "t", state=state)]
        assert await list_jobs(tx, "other", state=state) == []
        explain = "EXPLAIN QUERY PLAN" if database.dialect == "sqlite" else "EXPLAIN"
        if database.dialect == "postgresql":
            await tx.exec_driver_sql("SET LOCAL enable_seqscan = off")
            await tx.exec_driver_sql("SET LOCAL enable_bitmapscan = off")
        query = "SELECT id FROM jobs WHERE tenant = 't' AND state = '%s' AND %s"
        order = "ORDER BY id DESC LIMIT 50"
        plan = await tx.exec_driver_sql(f"{explain} {query % (state, RARE)} {order}")
        text = str(plan.all())

    assert found == changed[::-1]
    assert "ix_jobs_ended" in text


async def test_the_jobs_of_a_bulk_are_listed(database: Database) -> None:
    """Only them."""
    rows = await submit(database, count=3)
    await run_sql(database, "UPDATE jobs SET bulk_id = 'b' WHERE id = :id", id=rows[1].id)

    async with database.snapshot() as tx:
        found = await list_jobs(tx, "t", bulk_id="b")

    assert [row.id for row in found] == [rows[1].id]
