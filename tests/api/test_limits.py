"""Quotas and admission: who is refused, what the refusal says, and when it ends."""

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from api.limits import GATE, Gate
from contract.config import Settings
from contract.errors import NoCapacityError, OverloadedError, RateLimitedError
from contract.jobs import Lane
from contract.limits import TenantLimits
from contract.scores import Problem
from storage.bulks import park_jobs
from storage.counters import add_counts
from storage.database import Database
from storage.limits import put_limits
from storage.sweeps import expire_jobs
from storage.usage import read_stored_bytes
from tests.api.service import Answer, Service
from tests.api.tenants import Tenant, make_tenant
from tests.storage.factories import claim, new_job, run_sql, submit

JOB = {"model": "tiny", "items": ["a", "b"]}


@pytest.fixture
async def tenant(guarded: Service) -> Tenant:
    """A tenant that may have three waiting jobs, and little of everything else."""
    limits = TenantLimits(
        queued_jobs=3,
        stored_bytes=5000,
        body_bytes=3000,
        items=4,
        open_bulks=1,
        webhook_endpoints=1,
    )
    async with guarded.database.transaction() as tx:
        await put_limits(tx, "small", limits)
    return await make_tenant(guarded, "small")


async def _fill(tenant: Tenant) -> list[str]:
    return [await tenant.submit() for _ in range(3)]


async def _until_taken(tenant: Tenant) -> Answer:
    """Submit until it is taken: room is seen within a moment."""
    async with asyncio.timeout(10):
        while True:
            answer = await tenant.post("/v1/jobs", JOB)
            if answer.status != 429:
                return answer
            await asyncio.sleep(0.05)


async def test_a_tenant_with_enough_in_the_queue_is_refused(tenant: Tenant) -> None:
    """429 with when to come again and the limit; others are not held up."""
    await _fill(tenant)
    other = await make_tenant(tenant.service, "other")

    answer = await tenant.post("/v1/jobs", JOB)
    foreign = await tenant.post("/v1/score", JOB)

    assert (answer.status, answer.json["code"]) == (429, "overloaded")
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.headers["RateLimit-Policy"] == '"queued-jobs";q=3'
    assert answer.headers["RateLimit"].startswith('"queued-jobs";r=0;t=')
    assert (foreign.status, foreign.json["error"]["type"]) == (429, "rate_limit_error")
    assert (await other.post("/v1/jobs", JOB)).status == 202


async def _finish(tenant: Tenant, _ids: list[str]) -> None:
    await tenant.service.finish(await tenant.service.claim(limit=1))


async def _cancel(tenant: Tenant, ids: list[str]) -> None:
    assert (await tenant.post(f"/v1/jobs/{ids[0]}/cancel", {})).status == 200


async def _expire(tenant: Tenant, _ids: list[str]) -> None:
    await run_sql(tenant.service.database, "UPDATE jobs SET queue_deadline_at = 1")
    async with tenant.service.database.transaction() as tx:
        assert len(await expire_jobs(tx, limit=1)) == 1


async def _delete(tenant: Tenant, ids: list[str]) -> None:
    await _cancel(tenant, ids)
    assert (await tenant.request("DELETE", f"/v1/jobs/{ids[0]}")).status == 204


@pytest.mark.parametrize("end", [_finish, _cancel, _expire, _delete])
async def test_any_end_of_a_job_makes_room(tenant: Tenant, end: Callable[..., Any]) -> None:
    """Claimed, cancelled, expired or deleted: it does not count any more."""
    ids = await _fill(tenant)
    assert (await tenant.post("/v1/jobs", JOB)).status == 429

    await end(tenant, ids)

    assert (await _until_taken(tenant)).status == 202


async def test_a_key_used_before_is_answered_whatever_the_limits_say(tenant: Tenant) -> None:
    """The job is there: a client that lost the answer must not be told to wait."""
    first = await tenant.post("/v1/jobs", JOB, Idempotency_Key="k")
    await tenant.submit()
    await tenant.submit()

    again = await tenant.post("/v1/jobs", JOB, Idempotency_Key="k")
    new = await tenant.post("/v1/jobs", JOB, Idempotency_Key="other")

    assert (again.status, again.json["id"]) == (202, first.json["id"])
    assert again.headers["Idempotent-Replayed"] == "true"
    assert new.status == 429


async def test_a_retry_is_let_in_as_a_new_job_is(tenant: Tenant) -> None:
    """With enough in the queue a job is not queued again, but where its key was used before."""
    service, problem = tenant.service, Problem(code="internal", message="m")
    first, second = await tenant.submit(), await tenant.submit()
    for job in await service.claim():
        await service.fail(job, problem)
    await service.app[GATE]._read_now()
    taken = await tenant.post(f"/v1/jobs/{first}/retry", {}, Idempotency_Key="k")
    for job in await service.claim():
        await service.fail(job, problem)
    await service.app[GATE]._read_now()
    await _fill(tenant)

    again = await tenant.post(f"/v1/jobs/{first}/retry", {}, Idempotency_Key="k")
    refused = [
        await tenant.post(f"/v1/jobs/{second}/retry", {}, **headers)
        for headers in ({}, {"Idempotency_Key": "new"})
    ]

    assert (taken.status, again.status) == (202, 202)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert [answer.status for answer in refused] == [429] * 2
    assert refused[0].headers["RateLimit-Policy"] == '"queued-jobs";q=3'
    assert (await tenant.get(f"/v1/jobs/{second}")).json["state"] == "failed"


async def test_a_retried_job_counts(tenant: Tenant) -> None:
    """What was queued again takes a place, at once."""
    job_id = await tenant.submit()
    await tenant.service.fail((await tenant.service.claim())[0], Problem(code="x", message="m"))
    await tenant.submit()
    await tenant.submit()
    await tenant.service.app[GATE]._read_now()

    retried = await tenant.post(f"/v1/jobs/{job_id}/retry", {})
    refused = await tenant.post("/v1/jobs", JOB)

    assert (retried.status, refused.status) == (202, 429)


async def test_bodies_and_items_may_be_fewer_for_a_tenant(tenant: Tenant) -> None:
    """The limit that holds is its own, and it is what ``/v1/limits`` names."""
    packed = zlib.compress(b'{"items":["' + b"x" * 3000 + b'"]}')
    headers = {"Content-Encoding": "deflate", "Content-Type": "application/json"}

    large = await tenant.post("/v1/jobs", {"items": ["x" * 3000]})
    unpacked = await tenant.request("POST", "/v1/jobs", data=packed, headers=headers)
    many = await tenant.post("/v1/jobs", {"items": ["x"] * 5})
    limits = (await tenant.get("/v1/limits")).json

    assert [answer.status for answer in (large, unpacked, many)] == [413] * 3
    assert "3000" in large.json["detail"]
    assert "max_items of 4" in many.json["detail"]
    assert (limits["tenant_body_bytes"], limits["tenant_items"]) == (3000, 4)
    assert limits["tenant_queued_tokens"] == 1_000_000_000


async def test_lines_of_a_bulk_have_no_more_items_than_a_job(tenant: Tenant) -> None:
    """The tenant's own limit, as it was when the bulk was made, holds for each of its lines."""
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", b'{"items": ["a", "b", "c", "d", "e"]}\n', filename="lines.jsonl")
    file = (await tenant.request("POST", "/v1/files", data=form)).json["id"]

    started = await tenant.post("/v1/bulks", {"input_file_id": file, "model": "tiny"})
    bulk = started.json
    async with asyncio.timeout(10):
        while bulk["state"] == "validating":
            bulk = (await tenant.get(f"/v1/bulks/{bulk['id']}")).json

    assert (started.status, bulk["state"]) == (202, "failed")
    assert (bulk["errors"][0]["code"], bulk["errors"][0]["line"]) == ("too_large", 1)
    assert "max_items of 4" in bulk["errors"][0]["message"]


async def test_stored_bytes_are_files_requests_and_results(tenant: Tenant) -> None:
    """At the limit nothing more comes in; deleting makes room; what was refused left nothing."""
    job_id = await tenant.submit(return_pooled_hidden_states=True)
    before = await _stored(tenant)
    await tenant.service.finish(await tenant.service.claim())
    after = await _stored(tenant)
    file = await _upload(tenant, 4000)
    refused = await _upload(tenant, 4000)
    tenant.service.app[GATE].forget_bytes("small")
    full = await _upload(tenant, 800)

    assert before > 0
    assert after == before + 2 * 4 * 2 + 2 * 2 * 4 + 2 * 4  # hidden states, scores, mass
    assert (refused.status, refused.json["error"]["code"]) == (429, "quota_exceeded")
    assert refused.headers["x-should-retry"] == "false"
    assert refused.headers["RateLimit-Policy"].startswith('"stored-bytes";q=')
    assert full.status == 200
    assert await _stored(tenant) == after + 4800
    assert len(await run_sql(tenant.service.database, "SELECT id FROM files")) == 2
    await tenant.request("DELETE", f"/v1/files/{file.json['id']}")
    await tenant.request("DELETE", f"/v1/jobs/{job_id}")
    assert await _stored(tenant) == 800


async def test_a_full_store_takes_no_job(tenant: Tenant) -> None:
    """Whoever has stored all that it may submits nothing, until it deletes."""
    file = await _upload(tenant, 4999)
    await tenant.submit()
    tenant.service.app[GATE].forget_bytes("small")

    answer = await tenant.post("/v1/jobs", JOB)

    assert (answer.status, answer.json["code"]) == (429, "quota_exceeded")
    await tenant.request("DELETE", f"/v1/files/{file.json['id']}")
    assert (await tenant.post("/v1/jobs", JOB)).status == 202


async def test_bulks_and_endpoints_are_counted(tenant: Tenant) -> None:
    """One open bulk, and one endpoint; tests/bulk/test_replays.py has the bulks that run again."""
    file = (await _upload(tenant, 20)).json["id"]
    body = {"input_file_id": file, "model": "tiny", "on_invalid": "skip"}
    await run_sql(tenant.service.database, _OPEN_BULK)
    url = {"url": "https://receiver.example/hook"}
    await tenant.post("/v1/webhook_endpoints", url)

    bulk = await tenant.post("/v1/bulks", body)
    batch = {"input_file_id": file, "endpoint": "/v1/score", "completion_window": "24h"}
    second = await tenant.post("/v1/batches", batch)
    endpoint = await tenant.post("/v1/webhook_endpoints", url)

    assert (bulk.status, bulk.json["code"]) == (429, "overloaded")
    assert (second.status, second.json["error"]["code"]) == (429, "overloaded")
    assert (endpoint.status, endpoint.json["code"]) == (429, "quota_exceeded")
    assert endpoint.headers["RateLimit-Policy"] == '"webhook-endpoints";q=1'


async def test_requests_have_a_rate(guarded: Service) -> None:
    """A burst, then 429 until the next one; every answer says how many are left."""
    async with guarded.database.transaction() as tx:
        await put_limits(tx, "fast", TenantLimits(requests_per_s=0.3))
    tenant = await make_tenant(guarded, "fast")

    answers = [await tenant.get("/v1/jobs") for _ in range(4)]

    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    assert answers[0].headers["RateLimit"].startswith('"requests";r=2;')
    assert answers[3].headers["RateLimit-Policy"] == '"requests";q=3;w=10'
    assert answers[3].json["code"] == "rate_limited"
    assert 1 <= int(answers[3].headers["Retry-After"]) <= 4


async def test_open_paths_are_not_counted(guarded: Service) -> None:
    """Liveness asks nobody, whoever asks it and however often."""
    async with guarded.database.transaction() as tx:
        await put_limits(tx, "slow", TenantLimits(requests_per_s=0.01))
    tenant = await make_tenant(guarded, "slow")

    answers = [await tenant.get("/healthz") for _ in range(3)]

    assert [answer.status for answer in answers] == [200] * 3
    assert all("RateLimit" not in answer.headers for answer in answers)
    assert guarded.app[GATE]._reading.read_at < 0


async def test_the_first_reading_is_waited_for(database: Database) -> None:
    """Whoever asks while it runs is told the tenant's own limits, not the settings'."""
    gate = Gate(database, Settings())
    async with database.transaction() as tx:
        await put_limits(tx, "small", TenantLimits(items=2))

    limits = await asyncio.gather(*(gate.limits_of("small") for _ in range(4)))

    assert [each.items for each in limits] == [2] * 4


async def test_a_burst_refills(sqlite_database: Database) -> None:
    """Tokens of the bucket come back with time, and with a higher rate at once."""
    settings = Settings(tenant_requests_per_s=0.1)
    gate = Gate(sqlite_database, settings)

    await gate.count_request("t")
    with pytest.raises(RateLimitedError):
        await gate.count_request("t")
    gate._buckets["t"].filled_at -= 11

    assert [policy.name for policy in await gate.count_request("t")] == ["requests"]


async def test_the_queue_is_full_for_those_behind_what_waits(database: Database) -> None:
    """Bulk waits behind all, interactive behind none; bulks count, whoever's they are."""
    gate = Gate(database, Settings(queue_tokens=1000, tenant_queued_jobs=0))
    await submit(database, new_job(lane=Lane.BULK, estimated_tokens=600))
    await submit(database, new_job(lane=Lane.NORMAL, estimated_tokens=350))
    await run_sql(database, "UPDATE jobs SET bulk_id = 'x' WHERE lane = 2")

    with pytest.raises(NoCapacityError) as refused:
        async with gate.admitting("t", Lane.BULK, 100):
            pass
    async with gate.admitting("t", Lane.NORMAL, 100) as count:
        count()
    async with gate.admitting("t", Lane.INTERACTIVE, 900) as count:
        pass

    assert refused.value.policy is not None
    assert (refused.value.policy.quota, refused.value.policy.remaining) == (1000, 50)


async def test_a_paused_bulk_keeps_nobody_out(database: Database) -> None:
    """Its jobs are not taken before it goes on: the queue is as long as it is without them."""
    settings = Settings(queue_tokens=1000)
    await submit(database, new_job(lane=Lane.INTERACTIVE, estimated_tokens=900))
    await run_sql(database, "UPDATE jobs SET bulk_id = 'x'")
    with pytest.raises(NoCapacityError):
        await Gate(database, settings).check_capacity(Lane.INTERACTIVE, 500)

    async with database.transaction() as tx:
        await park_jobs(tx, "x")

    await Gate(database, settings).check_capacity(Lane.INTERACTIVE, 500)


async def test_the_wait_is_what_waits_by_what_was_done(database: Database) -> None:
    """Tokens beyond nine tenths, at the speed of the last minute: no made-up number."""
    gate = Gate(database, Settings(queue_tokens=1000))
    await submit(database, new_job(estimated_tokens=1000))
    with pytest.raises(NoCapacityError) as unmeasured:
        await gate.check_capacity(Lane.NORMAL, 100)
    first_at, _ = gate._samples[0]
    gate._samples[0] = (first_at - 10, 0.0)
    async with database.transaction() as tx:
        await add_counts(tx, {"tokens_claimed": 500.0})
    gate._reading.read_at -= 10
    gate._reading.cost_s = 0

    with pytest.raises(NoCapacityError) as measured:
        await gate.check_capacity(Lane.NORMAL, 100)

    assert unmeasured.value.retry_after_s == 30
    assert measured.value.retry_after_s == pytest.approx(200 / 50, rel=0.1)


async def test_what_is_on_its_way_counts(database: Database) -> None:
    """Two at once cannot both take the last place; one that failed gives it back."""
    gate = Gate(database, Settings(tenant_queued_jobs=1))

    async with gate.admitting("t", Lane.NORMAL, 1):
        with pytest.raises(OverloadedError):
            async with gate.admitting("t", Lane.NORMAL, 1):
                pass

    async with gate.admitting("t", Lane.NORMAL, 1) as count:
        count()


async def test_a_store_that_is_away_is_no_reason_to_refuse(database: Database) -> None:
    """The last reading stands, with what was let in since; a submission fails by itself."""
    gate = Gate(database, Settings(tenant_queued_jobs=5))
    await gate.limits_of("t")
    async with gate.admitting("t", Lane.NORMAL, 7) as count:
        count()
    gate._database = Database("postgresql+asyncpg://nobody@127.0.0.1:1/nothing")

    await gate._read_now()

    assert gate._since.of_tenants == {"t": [1, 7]}
    assert gate._since.until(Lane.NORMAL) == 7
    async with gate.admitting("t", Lane.NORMAL, 1):
        pass


async def test_the_gate_reads_by_itself_while_it_is_asked(database: Database) -> None:
    """A service of the process: requests find a reading that is not old."""
    gate = Gate(database, Settings(tenant_queued_jobs=1))
    running = asyncio.create_task(gate.run())
    await gate.limits_of("t")
    await submit(database, new_job())

    async with asyncio.timeout(10):
        while not gate._reading.waiting.of_tenants:
            await gate.limits_of("t")
            await asyncio.sleep(0.01)

    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await claim(database)
    assert gate._reading.waiting.of_tenants == {"t": [1, 10]}


async def _stored(tenant: Tenant) -> int:
    async with tenant.service.database.snapshot() as tx:
        return await read_stored_bytes(tx, tenant.row.tenant)


async def _upload(tenant: Tenant, size_bytes: int) -> Answer:
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", b"x" * size_bytes, filename="x.jsonl")
    return await tenant.request("POST", "/v1/files", data=form)


_OPEN_BULK = """
INSERT INTO bulks (id, tenant, kind, state, endpoint, source, options, metadata, total_lines,
    refused_lines, ingested_lines, ingested_items, indexed_lines, attempt, created_at,
    lease_until_at)
VALUES ('blk_x', 'small', 'bulk', 'validating', '', '{}', '{}', '{}', 0, 0, 0, 0, 0, 0, 0, 1e15)
"""
