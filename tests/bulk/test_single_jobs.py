"""Single jobs and bulks share one score cache; what a client says and sees of it."""

from typing import Any

import pytest

from tests.bulk.bench import Bulks, rows

ASKED = {"model": "tiny", "items": ["text 0", "text 1"]}


async def score(bulks: Bulks, body: dict[str, Any]) -> dict[str, Any]:
    """Submit a job and return it at its end, as ``GET`` shows it."""
    answer = await bulks.service.post("/v1/jobs", body)
    assert answer.status == 202, answer.body
    return dict((await bulks.service.get(f"/v1/jobs/{answer.json['id']}?wait=20")).json)


async def test_usage_and_receipt_tell(bulks: Bulks) -> None:
    """By default nothing is taken; ``read`` takes what ``read`` kept, with equal scores."""
    await bulks.start_worker()
    first = await score(bulks, ASKED | {"cache": "read"})
    known = await score(bulks, ASKED | {"cache": "read", "return_pooled_hidden_states": False})
    plain = await score(bulks, ASKED)

    assert known["usage"]["from_cache"] == known["receipt"]["from_cache"] == 2
    assert known["usage"]["computed_tokens"] == 0
    assert known["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    for job in (first, plain):
        assert "from_cache" not in job["usage"]
        assert "from_cache" not in job["receipt"]
    read = [
        (await bulks.service.get(f"/v1/jobs/{job['id']}/scores")).json["scores"]
        for job in (first, known, plain)
    ]
    assert read[0] == read[1] == read[2]


async def test_hidden_states_are_taken_where_they_were_kept(sqlite_bulks: Bulks) -> None:
    """A job that kept its hidden states serves both kinds; one that did not serves one."""
    await sqlite_bulks.start_worker()
    asked = ASKED | {"cache": "read"}
    await score(sqlite_bulks, asked)
    first = await score(sqlite_bulks, asked | {"return_pooled_hidden_states": True})
    second = await score(sqlite_bulks, asked | {"return_pooled_hidden_states": True})
    without = await score(sqlite_bulks, asked)
    get = sqlite_bulks.service.get

    assert "from_cache" not in first["usage"]
    assert second["usage"]["from_cache"] == without["usage"]["from_cache"] == 2
    assert "hidden_states" not in without["links"]
    kept = [
        (await get(f"/v1/jobs/{job['id']}/items/1/hidden_state")).body[-32:]  # behind the name
        for job in (first, second)
    ]
    assert kept[0] == kept[1]


async def test_jobs_find_what_bulks_kept_and_bulks_what_jobs_kept(sqlite_bulks: Bulks) -> None:
    """One line of a bulk is a job of one item, and the other way round."""
    await sqlite_bulks.start_worker()
    bulk = await sqlite_bulks.run(rows(20))
    await sqlite_bulks.wait_until_indexed(bulk["id"])

    job = await score(sqlite_bulks, {"model": "tiny", "items": "text 7", "cache": "read"})
    await score(sqlite_bulks, {"model": "tiny", "items": ["new"], "cache": "refresh"})
    again = await sqlite_bulks.run([{"custom_id": "a", "item": "new"}])

    assert job["usage"]["from_cache"] == 1
    line = (await sqlite_bulks.results(bulk["id"]))[7]
    scores = (await sqlite_bulks.service.get(f"/v1/jobs/{job['id']}/scores")).json["scores"]
    assert scores == line["scores"]
    assert again["counts"]["from_cache"] == 1


async def test_compatible_routes_ask_in_the_address(sqlite_bulks: Bulks) -> None:
    """``?cache=`` on a route whose body has no place for it; what it is not is named."""
    await sqlite_bulks.start_worker()
    post = sqlite_bulks.service.post

    first = await post("/v1/score?cache=read", ASKED)
    second = await post("/v1/score?cache=read", ASKED)
    wrong = await post("/v1/score?cache=perhaps", ASKED)

    assert second.json["scores"] == first.json["scores"]
    assert "from_cache" not in first.json["usage"]
    assert second.json["usage"]["from_cache"] == 2
    assert wrong.status == 422
    assert wrong.json["error"]["param"] == "cache"


@pytest.mark.parametrize("cache", ["perhaps", 1])
async def test_other_words_are_refused(sqlite_bulks: Bulks, cache: object) -> None:
    """The field is named."""
    await sqlite_bulks.service.report_ready()

    answer = await sqlite_bulks.service.post("/v1/jobs", ASKED | {"cache": cache})

    assert answer.status == 422
    assert answer.json["param"] == "cache"
