"""Scored again: only what the cache lacks runs; another model is another key; compared."""

from contract.models import ModelConfig
from storage.database import Database
from tests.api.tenants import make_tenant
from tests.bulk.bench import MODELS, Bulks, batch_line, render, rows
from tests.bulk.conftest import run
from tests.worker.harness import create_settings


async def test_only_what_is_not_known_runs(bulks: Bulks) -> None:
    """The same model finds everything in the cache, with equal results; one new line runs alone."""
    await bulks.start_worker()
    first = await bulks.run(rows(700))
    await bulks.wait_until_indexed(first["id"])

    again = await bulks.rescore(bulk=first["id"])
    more = await bulks.run([*rows(700), {"custom_id": "new", "item": "new"}])
    fresh = await bulks.rescore(bulk=first["id"], cache="refresh")
    off = await bulks.rescore(bulk=first["id"], cache="off")

    assert first["counts"]["from_cache"] == 0
    assert again["counts"]["from_cache"] == again["counts"]["scored"] == 700
    assert again["counts"]["tokens"] == 0
    assert more["counts"]["from_cache"] == 700
    assert more["counts"]["scored"] == 701
    assert fresh["counts"]["from_cache"] == off["counts"]["from_cache"] == 0
    results = await bulks.results(first["id"])
    for bulk in (again, fresh, off):
        assert await bulks.results(bulk["id"]) == results


async def test_another_model_or_parameter_is_another_key(sqlite_bulks: Bulks) -> None:
    """Nothing is taken from the cache that another model, or other parameters, produced."""
    await sqlite_bulks.start_worker()
    first = await sqlite_bulks.run(rows(10))
    await sqlite_bulks.wait_until_indexed(first["id"])

    other = await sqlite_bulks.rescore(bulk=first["id"], model="other")
    soft = await sqlite_bulks.rescore(bulk=first["id"], apply_softmax=True)
    await sqlite_bulks.wait_until_indexed(soft["id"])
    soft_again = await sqlite_bulks.rescore(bulk=soft["id"], model="tiny")
    hidden = await sqlite_bulks.rescore(bulk=first["id"], return_pooled_hidden_states=True)
    await sqlite_bulks.stop_workers()
    await sqlite_bulks.wait_until_unserved()
    await sqlite_bulks.start_worker(tiny=ModelConfig(source=MODELS["tiny"].source, max_tokens=99))
    changed = await sqlite_bulks.rescore(bulk=first["id"])

    assert other["counts"]["from_cache"] == soft["counts"]["from_cache"] == 0
    assert soft_again["counts"]["from_cache"] == 10
    assert hidden["counts"]["from_cache"] == 0  # its hidden states were not kept
    assert changed["counts"]["from_cache"] == 0  # the name is the same, the model is not
    assert (await sqlite_bulks.results(other["id"]))[0]["model"] == "other"


async def test_another_instruction_is_another_key(sqlite_bulks: Bulks) -> None:
    """Of parameters and of lines alike; the same one is found, and a model without refuses it."""
    told = ModelConfig(source=MODELS["tiny"].source, instruction="judge")
    await sqlite_bulks.start_worker(tiny=told, other=MODELS["other"])
    first = await sqlite_bulks.run(rows(5))
    await sqlite_bulks.wait_until_indexed(first["id"])

    asked = await sqlite_bulks.rescore(bulk=first["id"], instruction="rate")
    await sqlite_bulks.wait_until_indexed(asked["id"])
    lines = await sqlite_bulks.run([row | {"instruction": "rate"} for row in rows(5)])
    back = await sqlite_bulks.rescore(bulk=asked["id"], instruction=None)
    refused = await sqlite_bulks.rescore(bulk=asked["id"], model="other")
    (first_line, *_), (asked_line, *_), (refused_line, *_) = [
        await sqlite_bulks.results(bulk["id"]) for bulk in (first, asked, refused)
    ]

    assert asked["counts"]["from_cache"] == 0
    assert lines["counts"]["from_cache"] == back["counts"]["from_cache"] == 5
    assert first_line["scores"] != asked_line["scores"]
    assert "takes no instruction" in refused_line["errors"][0]["message"]


async def test_limits_of_tokens_may_change(sqlite_bulks: Bulks) -> None:
    """Whatever a request may say beside its texts can be another."""
    await sqlite_bulks.start_worker()
    first = await sqlite_bulks.run([{"custom_id": "a", "item": "a long text"}])

    again = await sqlite_bulks.rescore(
        bulk=first["id"], max_tokens=4, truncation="item", truncation_side="right"
    )
    cut = await sqlite_bulks.run([{"custom_id": "a", "item": "a lo"}])
    results = [(await sqlite_bulks.results(bulk["id"]))[0]["scores"] for bulk in (again, cut)]

    assert results[0] == results[1]


async def test_jobs_and_filters_are_scored_again(sqlite_bulks: Bulks) -> None:
    """Single jobs become lines, named by their ids; one that is gone says so."""
    await sqlite_bulks.start_worker()
    submit, get = sqlite_bulks.service.submit, sqlite_bulks.service.get
    ids = [await submit(metadata={"set": "a"}), await submit(items=["c"])]
    for job_id in ids:
        await get(f"/v1/jobs/{job_id}?wait=10")

    by_ids = await sqlite_bulks.rescore(source={"jobs": [*ids, f"job_{'0' * 32}"]}, model="other")
    by_filter = await sqlite_bulks.rescore(
        source={"filter": {"metadata.set": "a", "state": "succeeded"}}
    )
    results = await sqlite_bulks.results(by_ids["id"])

    assert [line["custom_id"] for line in results[:2]] == ids
    assert [len(line["scores"]) for line in results] == [2, 1, 0]
    assert results[2]["errors"][0]["code"] == "gone"
    assert by_ids["counts"]["lines_failed"] == 1
    assert by_filter["counts"]["items"] == 2
    assert by_ids["source"] == {"jobs": 3}


async def test_what_cannot_be_scored_again(sqlite_bulks: Bulks) -> None:
    """Requests that name nothing, or change the input itself, are refused by field."""
    post = sqlite_bulks.service.post
    await sqlite_bulks.service.report_ready()
    failed = await sqlite_bulks.run(b"x\n")
    bulk = {"bulk": failed["id"]}
    for body, status, param in (
        ({}, 422, None),
        ({"source": {}}, 422, "source"),
        ({"source": {"bulk": "x", "jobs": []}}, 422, "source"),
        ({"source": {"jobs": []}}, 422, "source.jobs"),
        ({"source": {"filter": {}}}, 422, "source.filter"),
        ({"source": {"filter": {"colour": "x"}}}, 422, "source.filter"),
        ({"source": {"filter": {"state": "x"}}}, 422, "source.filter.state"),
        ({"source": {"colour": "x"}}, 422, "source"),
        ({"source": bulk, "items": []}, 422, "items"),
        ({"source": bulk, "temperature": -1}, 422, "temperature"),
        ({"source": bulk}, 409, None),
        ({"source": {"bulk": f"blk_{'0' * 32}"}}, 404, None),
    ):
        answer = await post("/v1/rescore", body)
        assert answer.status == status, (body, answer.body)
        assert answer.json.get("param") == param, body


async def test_scores_that_were_deleted_are_not_found(sqlite_bulks: Bulks) -> None:
    """A deleted bulk's scores are gone from the cache: everything runs."""
    await sqlite_bulks.start_worker()
    first = await sqlite_bulks.run(rows(5))
    await sqlite_bulks.wait_until_indexed(first["id"])
    await sqlite_bulks.service.request("DELETE", f"/v1/bulks/{first['id']}")

    assert (await sqlite_bulks.run(rows(5)))["counts"]["from_cache"] == 0


async def test_bulks_and_jobs_are_compared(sqlite_bulks: Bulks) -> None:
    """Equal runs have no difference; other activations differ in the receipt and the numbers."""
    await sqlite_bulks.start_worker()
    get = sqlite_bulks.service.get
    first = await sqlite_bulks.run(rows(600), cache="off")
    same = await sqlite_bulks.rescore(bulk=first["id"], cache="off")
    soft = await sqlite_bulks.rescore(bulk=first["id"], cache="off", apply_softmax=True)
    more = await sqlite_bulks.run([*rows(600), {"custom_id": "x", "item": "x"}])
    strange = await sqlite_bulks.run([{"custom_id": "x", "item": "x"}])

    equal = (await get(f"/v1/bulks/{first['id']}/compare/{same['id']}")).json
    changed = (await get(f"/v1/bulks/{first['id']}/compare/{soft['id']}")).json
    longer = (await get(f"/v1/bulks/{first['id']}/compare/{more['id']}")).json
    refused = await get(f"/v1/bulks/{first['id']}/compare/{strange['id']}")

    assert equal["items"] == equal["identical"] == 600
    assert equal["max_difference"] == equal["mean_difference"] == equal["flips"] == 0
    assert equal["rank_correlation"] == [1.0, 1.0]
    assert equal["receipt"] == {}
    assert equal["labels"] == ["negative", "positive"]
    assert changed["receipt"]["activation"] == ["none", "softmax"]
    assert changed["flips"] == 0  # softmax keeps the order
    assert 0 < changed["rank_correlation"][0] < 1
    assert changed["changed"][0]["difference"] == changed["max_difference"]
    assert len(changed["changed"]) == 50
    assert (longer["only_in_a"], longer["only_in_b"]) == (0, 1)
    assert refused.status == 409

    a, b = (
        await sqlite_bulks.service.submit(),
        await sqlite_bulks.service.submit(apply_softmax=True),
    )
    for job_id in (a, b):
        await get(f"/v1/jobs/{job_id}?wait=10")
    jobs = (await get(f"/v1/jobs/{a}/compare/{b}")).json
    assert jobs["labels"] == ["negative", "positive"]
    assert jobs["items"] == 2
    assert "activation" in jobs["receipt"]


async def test_what_still_runs_is_not_compared(sqlite_bulks: Bulks) -> None:
    """Half a bulk beside a whole one would say little: 409, and it may be asked again."""
    await sqlite_bulks.service.report_ready()
    first, second = await sqlite_bulks.start(rows(2)), await sqlite_bulks.start(rows(2))
    answer = await sqlite_bulks.service.get(f"/v1/bulks/{first}/compare/{second}")

    assert answer.status == 409
    assert answer.json["code"] == "result_not_ready"


async def test_a_batch_is_scored_again(sqlite_bulks: Bulks) -> None:
    """A batch of OpenAI's routes is a source like any bulk."""
    await sqlite_bulks.start_worker()
    lines = [batch_line(f"r{n}", model="tiny", items=[f"text {n}"]) for n in range(5)]
    file_id = await sqlite_bulks.upload(render(lines))
    body = {"input_file_id": file_id, "endpoint": "/v1/score", "completion_window": "24h"}
    batch = (await sqlite_bulks.service.post("/v1/batches", body)).json
    await sqlite_bulks.wait(batch["id"])
    await sqlite_bulks.wait_until_indexed(batch["id"])

    again = await sqlite_bulks.rescore(source={"batch": batch["id"]})
    other = await sqlite_bulks.rescore(source={"batch": batch["id"]}, model="other")

    assert again["counts"]["from_cache"] == 5
    assert other["counts"]["from_cache"] == 0
    assert other["counts"]["scored"] == 5


async def test_a_cancelled_run_is_known_to_the_cache(sqlite_bulks: Bulks) -> None:
    """What a cancelled bulk scored need not run again."""
    await sqlite_bulks.start_worker()
    bulk_id = await sqlite_bulks.start(rows(600))
    while (await sqlite_bulks.get(bulk_id))["counts"]["scored"] < 512:
        pass
    await sqlite_bulks.service.post(f"/v1/bulks/{bulk_id}/cancel", {})
    await sqlite_bulks.wait(bulk_id)
    await sqlite_bulks.wait_until_indexed(bulk_id)

    assert (await sqlite_bulks.run(rows(600)))["counts"]["from_cache"] >= 512


async def test_tenants_do_not_share_the_cache(
    sqlite_url: str, sqlite_database: Database, blob_url: str, redis_url: str
) -> None:
    """Another that scores the same finds nothing, and does not put away what was known."""
    settings = create_settings(sqlite_url, blob_url, redis_url, auth="required")
    async with run(settings, sqlite_database) as bulks:
        headers = bulks.service.http.headers
        keys = {name: (await make_tenant(bulks.service, name)).key for name in ("a", "b")}
        headers["Authorization"] = f"Bearer {keys['a']}"
        await bulks.start_worker()

        found = []
        for name in ("a", "b", "a"):
            headers["Authorization"] = f"Bearer {keys[name]}"
            bulk = await bulks.run(rows(3))
            await bulks.wait_until_indexed(bulk["id"], name)
            found.append(bulk["counts"]["from_cache"])

    assert found == [0, 0, 3]
