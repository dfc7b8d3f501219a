"""What is done to bulks is done once per key; open bulks are counted where they open."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text

from storage.database import Database
from tests.api.service import Answer
from tests.bulk.bench import Bulks, rows
from tests.bulk.conftest import run
from tests.worker.harness import create_settings

_LONG = {"items": ["far too long to fit"]}
_REPLAYED = "Idempotent-Replayed"


@pytest.fixture
async def one_at_a_time(
    database_url: str, database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Bulks]:
    """The application on each database in turn; a tenant may have one open bulk."""
    settings = create_settings(database_url, blob_url, redis_url, tenant_open_bulks=1)
    async with run(settings, database) as made:
        yield made


async def act(bulks: Bulks, bulk_id: str, action: str, key: str, **body: str) -> Answer:
    """Do something to a bulk, under a key."""
    return await bulks.service.post(f"/v1/bulks/{bulk_id}/{action}", body, Idempotency_Key=key)


async def fail_one(bulks: Bulks) -> str:
    """Run a bulk to its end whose one line has no score; return its id."""
    bulk = await bulks.run([_LONG], model="short")
    assert bulk["counts"]["failed"] == 1
    return str(bulk["id"])


async def test_a_repeated_action_is_not_done_again(bulks: Bulks) -> None:
    """A pause that comes late once more, after a resume, pauses nothing."""
    bulk_id = await bulks.start(rows(3), model="short")

    first = await act(bulks, bulk_id, "pause", "p")
    resumed = await act(bulks, bulk_id, "resume", "r")
    late = await act(bulks, bulk_id, "pause", "p")
    other = await act(bulks, bulk_id, "pause", "p", more="x")

    assert [first.json["paused"], resumed.json["paused"], late.json["paused"]] == [
        True,
        False,
        False,
    ]
    assert [_REPLAYED in each.headers for each in (first, resumed, late)] == [False, False, True]
    assert (other.status, other.json["code"]) == (422, "idempotency_key_reused")


async def test_a_repeated_cancel_is_answered(bulks: Bulks) -> None:
    """Without its key the second one is a conflict once the bulk has ended; with it, it is not."""
    bulk_id = await bulks.start(rows(3), model="short")
    path = f"/v1/batches/{bulk_id}/cancel"
    first = await bulks.service.post(path, {}, Idempotency_Key="c")
    await bulks.wait(bulk_id)

    again = await bulks.service.post(path, {}, Idempotency_Key="c")
    other = await bulks.service.post(path, {})

    assert (first.status, again.status, other.status) == (200, 200, 409)
    assert again.headers[_REPLAYED] == "true"
    assert again.json["status"] == "cancelled"


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_cancel_that_meets_another_change_is_not_lost(bulks: Bulks) -> None:
    """The reader moves the bulk on between the look at its state and the change of it."""
    bulk_id = await bulks.start(rows(3), model="short")
    state = ""
    while state != "running":
        state = (await bulks.service.get(f"/v1/bulks/{bulk_id}")).json["state"]
    async with bulks.service.database.transaction() as tx:
        moved = text("UPDATE bulks SET state = 'validating' WHERE id = :id")
        await tx.execute(moved, {"id": bulk_id})
        cancelling = asyncio.create_task(act(bulks, bulk_id, "cancel", "k"))
        waits = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        async with asyncio.timeout(10):
            while (await tx.execute(waits)).scalar_one() == 0:
                await tx.execute(text("SELECT pg_stat_clear_snapshot()"))
                await asyncio.sleep(0.01)
    answer = await cancelling
    bulk = await bulks.wait(bulk_id)

    assert answer.status == 202
    assert bulk["state"] == "cancelled"


async def test_a_failed_action_leaves_its_key_free(bulks: Bulks) -> None:
    """What was refused was not done: the same key does it once it can be done."""
    await bulks.start_worker()
    bulk_id = await bulks.start([_LONG], model="short")
    await bulks.wait(bulk_id)
    refused = await act(bulks, bulk_id, "pause", "k")
    unknown = await act(bulks, f"blk_{'0' * 32}", "cancel", "k")
    retried = await act(bulks, bulk_id, "retry", "k")

    assert (refused.status, unknown.status, retried.status) == (409, 404, 202)
    assert _REPLAYED not in retried.headers


@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at once"])
async def test_a_repeated_retry_is_one_run(bulks: Bulks, *, at_once: bool) -> None:
    """One more run, however often it is asked for under a key, also after that run has ended."""
    await bulks.start_worker()
    bulk_id = await fail_one(bulks)
    if at_once:
        answers = await asyncio.gather(*(act(bulks, bulk_id, "retry", "k") for _ in range(5)))
        await bulks.wait(bulk_id)
    else:
        answers = [await act(bulks, bulk_id, "retry", "k")]
        await bulks.wait(bulk_id)
        answers += [await act(bulks, bulk_id, "retry", "k") for _ in range(2)]

    listed = await bulks.service.get(f"/v1/bulks/{bulk_id}/events")
    ends = [each for each in listed.json["data"] if each["type"].endswith("completed")]
    assert {each.status for each in answers} == {202}
    assert sum(_REPLAYED not in each.headers for each in answers) == 1
    assert len(ends) == 2


async def test_a_replay_outlives_its_input(bulks: Bulks) -> None:
    """The file was deleted since: the key still names the bulk; without it there is no file."""
    await bulks.start_worker()
    file_id = await bulks.upload(b'{"item": "a"}\n')
    post = bulks.service.post
    bulk = {"input_file_id": file_id, "model": "short"}
    batch = {"input_file_id": file_id, "endpoint": "/v1/score", "completion_window": "24h"}
    first = [
        await post("/v1/bulks", bulk, Idempotency_Key="k"),
        await post("/v1/batches", batch, Idempotency_Key="k"),
    ]
    for each in first:
        await bulks.wait(each.json["id"], "completed", "failed")
    source = {"source": {"bulk": first[0].json["id"]}, "model": "short", "cache": "off"}
    first.append(await post("/v1/rescore", source, Idempotency_Key="r"))
    await bulks.wait(first[2].json["id"])
    await bulks.service.request("DELETE", f"/v1/files/{file_id}")
    await bulks.service.request("DELETE", f"/v1/bulks/{first[0].json['id']}")

    again = [
        await post("/v1/batches", batch, Idempotency_Key="k"),
        await post("/v1/rescore", source, Idempotency_Key="r"),
    ]
    gone = await post("/v1/bulks", bulk)
    other = await post("/v1/batches", {**batch, "metadata": {"a": "b"}}, Idempotency_Key="k")

    assert [each.json["id"] for each in again] == [each.json["id"] for each in first[1:]]
    assert all(each.headers[_REPLAYED] == "true" for each in again)
    assert (gone.status, other.status) == (404, 422)


async def test_a_replayed_bulk_outlives_its_file(bulks: Bulks) -> None:
    """The same of ``/v1/bulks``: 202 and the bulk, not 404."""
    await bulks.start_worker()
    file_id = await bulks.upload(b'{"item": "a"}\n')
    body = {"input_file_id": file_id, "model": "short"}
    first = await bulks.service.post("/v1/bulks", body, Idempotency_Key="k")
    await bulks.wait(first.json["id"])
    await bulks.service.request("DELETE", f"/v1/files/{file_id}")

    again = await bulks.service.post("/v1/bulks", body, Idempotency_Key="k")
    changed = await bulks.service.post("/v1/bulks", body | {"cache": "off"}, Idempotency_Key="k")

    assert (again.status, again.json["id"]) == (202, first.json["id"])
    assert again.headers[_REPLAYED] == "true"
    assert again.headers["Location"] == f"/v1/bulks/{first.json['id']}"
    assert changed.status == 422


async def test_retries_at_once_are_counted(one_at_a_time: Bulks) -> None:
    """Of two ended bulks only one may run again; the refused one is as it was."""
    bulks = one_at_a_time
    await bulks.start_worker()
    ids = [await fail_one(bulks) for _ in range(4)]
    await bulks.stop_workers()

    answers = await asyncio.gather(*(act(bulks, each, "retry", "k") for each in ids))

    states = Counter([(await bulks.get(each))["state"] for each in ids])
    assert Counter(each.status for each in answers) == {202: 1, 429: 3}
    assert states == {"running": 1, "completed": 3}
    for each, answer in zip(ids, answers, strict=True):
        assert (await bulks.get(each))["counts"]["failed"] == int(answer.status == 429)


async def test_bulks_submitted_at_once_are_counted(one_at_a_time: Bulks) -> None:
    """However many come together, as many are open as may be."""
    file_id = await one_at_a_time.upload(b'{"item": "a"}\n')
    body = {"input_file_id": file_id, "model": "short"}
    posts = [one_at_a_time.service.post("/v1/bulks", body) for _ in range(8)]

    answers = await asyncio.gather(*posts)

    assert Counter(each.status for each in answers) == {202: 1, 429: 7}
