"""Bulks of our own: run, counted, listed in order, paused, cancelled, retried, deleted."""

import asyncio
from typing import Any

from contract.models import ModelConfig
from tests.bulk.bench import MODELS, Bulks, batch_line, rows


async def test_rows_are_scored_in_order(bulks: Bulks) -> None:
    """Every line has its scores, in input order, and each row is the one a job would have had."""
    await bulks.start_worker()

    bulk = await bulks.run(rows(1300), parameters={"apply_softmax": True})
    results = await bulks.results(bulk["id"])

    assert bulk["state"] == "completed", bulk
    assert bulk["counts"]["lines"] == bulk["counts"]["lines_completed"] == 1300
    assert bulk["counts"]["items"] == bulk["counts"]["scored"] == 1300
    assert bulk["counts"]["tokens"] > 1300
    assert bulk["eta_s"] == 0.0
    assert [line["line"] for line in results] == list(range(1, 1301))
    assert [line["custom_id"] for line in results] == [f"row-{n}" for n in range(1300)]
    one = await bulks.service.post(
        "/v1/score", {"model": "tiny", "items": ["text 777"], "apply_softmax": True}
    )
    assert results[777]["scores"] == one.json["scores"]
    assert results[777]["labels"] == ["negative", "positive"]
    assert await bulks.results(bulk["id"], after=1299) == results[1299:]


async def test_rows_of_every_form(sqlite_bulks: Bulks) -> None:
    """Rows with their own query, several items, no items, token ids, and batch lines run."""
    await sqlite_bulks.start_worker()
    lines: list[dict[str, Any]] = [
        {"id": 7, "items": ["a", "b"], "query": "q", "activation": "model"},
        {"custom_id": "none", "items": []},
        {"item": "lonely"},
        {"custom_id": "ids", "items": [[1, 2, 3]]},
        batch_line("batch", items="c", model="other"),
        batch_line("rank", "/v1/rerank", query="q", documents=["a", "b"]),
    ]

    bulk = await sqlite_bulks.run(lines, model=None, parameters={"model": "tiny"})
    bulk = await sqlite_bulks.run(lines)
    results = await sqlite_bulks.results(bulk["id"])

    assert [line["custom_id"] for line in results] == [
        "7",
        "none",
        "line-3",
        "ids",
        "batch",
        "rank",
    ]
    assert [len(line["scores"]) for line in results] == [2, 0, 1, 1, 1, 2]
    assert results[0]["scores"] == results[5]["scores"]
    assert bulk["counts"]["lines_completed"] == 6
    assert bulk["counts"]["items"] == 7


async def test_items_that_fail_are_named_and_retried(bulks: Bulks) -> None:
    """A line without a score says why; a retry runs it, and no other, again."""
    await bulks.start_worker()
    long = {"custom_id": "long", "items": ["far too long to fit"]}
    half = {"custom_id": "half", "items": ["short", "far too long to fit"]}
    bulk = await bulks.run([*rows(3), long, half], model="short")
    results = await bulks.results(bulk["id"])

    assert bulk["counts"]["lines_completed"] == 4
    assert bulk["counts"]["lines_failed"] == 1
    assert bulk["counts"]["scored"] == 4
    assert bulk["counts"]["failed"] == 2
    assert results[3]["scores"] == [None]
    assert results[3]["errors"][0]["code"] == "input_too_long"
    assert results[4]["scores"][0] is not None
    assert results[4]["errors"] == [results[3]["errors"][0] | {"index": 1}]

    await bulks.stop_workers()
    await bulks.start_worker(short=ModelConfig(source=MODELS["short"].source, max_tokens=64))
    answer = await bulks.service.post(f"/v1/bulks/{bulk['id']}/retry", {})
    assert answer.status == 202, answer.body
    again = await bulks.wait(bulk["id"])

    assert again["counts"]["lines_completed"] == 5
    assert again["counts"]["lines_failed"] == again["counts"]["failed"] == 0
    assert again["counts"]["scored"] == again["counts"]["items"] == 6
    fixed = await bulks.results(bulk["id"])
    assert all(row is not None for line in fixed for row in line["scores"])
    assert fixed[:3] == results[:3]
    answer = await bulks.service.post(f"/v1/bulks/{bulk['id']}/retry", {})
    assert answer.status == 409


async def test_a_paused_bulk_waits(bulks: Bulks) -> None:
    """While paused no line is taken; resumed, all run."""
    await bulks.service.report_ready()
    bulk_id = await bulks.start(rows(20))
    await bulks.wait(bulk_id, "running")
    paused = await bulks.service.post(f"/v1/bulks/{bulk_id}/pause", {})
    await bulks.start_worker()
    job = await bulks.service.submit()
    await bulks.service.get(f"/v1/jobs/{job}?wait=10")
    waiting = await bulks.get(bulk_id)

    assert paused.json["paused"]
    assert paused.json["eta_s"] is None
    assert waiting["counts"]["scored"] == 0
    resumed = await bulks.service.post(f"/v1/bulks/{bulk_id}/resume", {})
    assert not resumed.json["paused"]
    assert (await bulks.wait(bulk_id))["counts"]["scored"] == 20
    refused = await bulks.service.post(f"/v1/bulks/{bulk_id}/pause", {})
    assert refused.status == 409


async def test_a_cancelled_bulk_ends_and_can_be_retried(bulks: Bulks) -> None:
    """Nothing of it runs any more; its results say so; a retry runs all of it."""
    await bulks.service.report_ready()
    bulk_id = await bulks.start(rows(600))
    await bulks.wait(bulk_id, "running")
    answer = await bulks.service.post(f"/v1/bulks/{bulk_id}/cancel", {})
    bulk = await bulks.wait(bulk_id)

    assert answer.status == 202
    assert bulk["state"] == "cancelled"
    assert bulk["counts"]["lines_cancelled"] == 600
    results = await bulks.results(bulk_id)
    assert {line["errors"][0]["code"] for line in results} <= {"cancelled"}
    assert (await bulks.service.post(f"/v1/bulks/{bulk_id}/cancel", {})).status == 409

    if results:
        await bulks.start_worker()
        await bulks.service.post(f"/v1/bulks/{bulk_id}/retry", {})
        again = await bulks.wait(bulk_id)
        assert again["counts"]["lines_completed"] == len(results)


async def test_an_idempotency_key_gives_the_same_bulk(sqlite_bulks: Bulks) -> None:
    """The same key and body: one bulk, also found by its key; another body is refused."""
    file_id = await sqlite_bulks.upload(b'{"item": "a"}\n')
    post = sqlite_bulks.service.post
    body = {"input_file_id": file_id, "model": "tiny"}
    first = await post("/v1/bulks", body, Idempotency_Key='"k"')
    second = await post("/v1/bulks", body, Idempotency_Key='"k"')
    other = await post("/v1/bulks", body | {"cache": "off"}, Idempotency_Key='"k"')
    found = await sqlite_bulks.service.get("/v1/bulks?key=k")

    assert first.json["id"] == second.json["id"] == found.json["data"][0]["id"]
    assert second.headers["Idempotent-Replayed"] == "true"
    assert other.status == 422
    assert not (await sqlite_bulks.service.get("/v1/bulks?key=none")).json["data"]


async def test_bulks_are_listed_deleted_and_announced(sqlite_bulks: Bulks) -> None:
    """Lists go newest first by pages; events tell the way; a deleted bulk is gone."""
    await sqlite_bulks.start_worker()
    first = await sqlite_bulks.run(rows(3), metadata={"run": "1"})
    second = await sqlite_bulks.run(rows(2))
    get = sqlite_bulks.service.get
    page = (await get("/v1/bulks?limit=1")).json
    rest = (await get(f"/v1/bulks?limit=1&after={second['id']}")).json
    events = (await get(f"/v1/bulks/{first['id']}/events")).json["data"]

    assert [page["data"][0]["id"], page["has_more"]] == [second["id"], True]
    assert [rest["data"][0]["id"], rest["has_more"]] == [first["id"], False]
    assert rest["data"][0]["metadata"] == {"run": "1"}
    assert events[0]["type"] == "batch.in_progress"
    assert events[-1]["type"] == "batch.completed"
    assert events[-1]["data"]["scored"] == 3
    deleted = await sqlite_bulks.service.request("DELETE", f"/v1/bulks/{first['id']}")
    assert deleted.status == 204
    assert (await get(f"/v1/bulks/{first['id']}")).status == 410
    assert (await get("/v1/bulks/nonsense")).status == 404
    assert (await get(f"/v1/bulks/blk_{'0' * 32}")).status == 404


async def test_two_workers_and_results_while_it_runs(bulks: Bulks) -> None:
    """Two workers share a bulk; reading after the last line seen yields every line once."""
    await asyncio.gather(bulks.start_worker(), bulks.start_worker())
    bulk_id = await bulks.start(rows(3000), cache="off")
    seen: list[int] = []
    while True:
        state = (await bulks.get(bulk_id))["state"]
        seen += [line["line"] for line in await bulks.results(bulk_id, after=len(seen))]
        if state == "completed":
            break
    seen += [line["line"] for line in await bulks.results(bulk_id, after=len(seen))]

    assert seen == list(range(1, 3001))
