"""``/v1/jobs``: submit, look, wait, list, cancel, delete, on both databases."""

import asyncio

import pytest

from contract.scores import Problem
from storage.claims import retry_later
from storage.sweeps import reap_jobs
from tests.api.service import Service
from tests.storage.factories import run_sql

HOOK = "https://example.org/hook"


async def test_a_submitted_job_is_accepted_and_recorded(service: Service) -> None:
    """202 with the job, where it is, and when to ask again; then it is there."""
    answer = await service.post(
        "/v1/jobs",
        {
            "model": "tiny",
            "items": ["a", "b"],
            "query": "q",
            "metadata": {"run": "1"},
            "priority": "bulk",
            "webhook": HOOK,
            "webhook_events": ["job.failed"],
            "queue_deadline_s": 60,
        },
    )
    job = answer.json
    seen = await service.get(answer.headers["Location"])

    assert answer.status == 202
    assert answer.headers["Location"] == f"/v1/jobs/{job['id']}"
    assert int(answer.headers["Retry-After"]) >= 1
    assert job["state"] == "queued"
    assert job["priority"] == "bulk"
    assert job["metadata"] == {"run": "1"}
    assert job["counts"] == {"total": 2, "succeeded": 0, "failed": 0}
    assert job["links"]["cancel"].endswith("/cancel")
    assert seen.status == 200
    assert seen.json == job
    assert seen.headers["Retry-After"]


async def test_the_worker_gets_what_was_asked(service: Service) -> None:
    """The stored request is the scoring part under the model's name."""
    await service.submit(webhook=HOOK, query="q", metadata={"a": "b"})

    (job,) = await service.claim()

    assert job.request == b'{"items":["a","b"],"model":"tiny","query":"q"}'


async def test_an_ended_job_shows_all(service: Service) -> None:
    """State, counts, usage, receipt and links are there once the job ended."""
    job_id = await service.submit_and_finish()

    answer = await service.get(f"/v1/jobs/{job_id}")
    job = answer.json

    assert job["state"] == "succeeded"
    assert job["counts"] == {"total": 2, "succeeded": 2, "failed": 0}
    assert job["usage"]["prompt_tokens"] == 7
    assert job["receipt"] == {"model": "tiny"}
    assert job["finished_at"] >= job["started_at"] >= job["created_at"]
    assert set(job["links"]) == {"self", "events", "scores", "hidden_states"}
    assert "Retry-After" not in answer.headers


async def test_an_unchanged_job_is_not_sent_again(service: Service) -> None:
    """``If-None-Match`` with the tag gives 304, until the job changes."""
    job_id = await service.submit()
    tag = (await service.get(f"/v1/jobs/{job_id}")).headers["ETag"]

    unchanged = await service.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": tag})
    await service.finish(await service.claim())
    changed = await service.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": tag})

    assert unchanged.status == 304
    assert unchanged.body == b""
    assert unchanged.headers["Retry-After"]
    assert changed.status == 200
    assert changed.headers["ETag"] != tag


async def test_a_long_poll_ends_with_the_job(service: Service) -> None:
    """``?wait`` answers as soon as the job ended."""
    job_id = await service.submit()
    waiting = asyncio.create_task(service.get(f"/v1/jobs/{job_id}?wait=15"))

    await service.finish(await service.claim())
    answer = await waiting

    assert answer.json["state"] == "succeeded"


async def test_a_long_poll_gives_up_in_time(service: Service) -> None:
    """``?wait`` answers with the job as it is when the time has passed."""
    job_id = await service.submit()

    answer = await service.get(f"/v1/jobs/{job_id}?wait=0.05")

    assert answer.status == 200
    assert answer.json["state"] == "queued"


async def test_a_submit_may_wait(service: Service) -> None:
    """``Prefer: wait`` on a submit gives 200 with the ended job."""
    body = {"model": "tiny", "items": ["a"]}
    waiting = asyncio.create_task(service.post("/v1/jobs", body, Prefer="wait=15"))

    await service.finish(await service.next_claim())
    answer = await waiting
    late = await service.post("/v1/jobs", body, Prefer="wait=0")
    both = await service.post("/v1/jobs", body, Prefer="respond-async, wait=5")

    assert answer.status == 200
    assert answer.json["state"] == "succeeded"
    assert answer.headers["Preference-Applied"] == "wait=15"
    assert late.status == 202
    assert both.status == 202
    assert both.headers["Preference-Applied"] == "respond-async"


async def test_pages_hold_every_job_once_newest_first(service: Service) -> None:
    """The pages that ``Link`` leads through hold all jobs, in order, once."""
    ids = [await service.submit() for _ in range(5)]

    seen, path = [], "/v1/jobs?limit=2&model=tiny"
    while path:
        page = await service.get(path)
        seen += [job["id"] for job in page.json["data"]]
        link = page.headers.get("Link", "")
        assert bool(link) == page.json["has_more"]
        path = link.partition(">")[0].removeprefix("<")

    assert seen == ids[::-1]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", [0, 1, 2]),
        ("state=succeeded", [0]),
        ("state=queued", [1, 2]),
        ("metadata.run=1", [1]),
        ("metadata.run=1&metadata.kind=x", []),
        ("metadata.no=1", []),
        ("model=tiny", [0, 1, 2]),
        ("model=other", []),
        ('metadata.a"b=1', []),
        ("metadata.a.b=2", [2]),
        ("metadata.$[0]=1", []),
        ("metadata.a'b=1", []),
        ("metadata.%=1", []),
        ("model=%FF%FE", []),
    ],
)
async def test_lists_are_filtered(service: Service, query: str, expected: list[int]) -> None:
    """Filters combine; a key of any spelling is a key and nothing else."""
    first = await service.submit()
    await service.finish(await service.claim())
    ids = [first, await service.submit(metadata={"run": "1"})]
    ids.append(await service.submit(metadata={"a.b": "2"}))

    page = await service.get(f"/v1/jobs?{query}")

    assert page.status == 200
    assert [job["id"] for job in page.json["data"]] == [ids[index] for index in expected[::-1]]


async def test_a_queued_job_is_cancelled_at_once(service: Service) -> None:
    """200 with the cancelled job; who waits for it is told."""
    job_id = await service.submit()
    waiting = asyncio.create_task(service.get(f"/v1/jobs/{job_id}?wait=15"))

    answer = await service.post(f"/v1/jobs/{job_id}/cancel", {})

    assert answer.status == 200
    assert answer.json["state"] == "cancelled"
    assert (await waiting).json["state"] == "cancelled"


async def test_a_running_job_is_asked_to_stop(service: Service) -> None:
    """202 while a worker holds it; asking again is the same."""
    job_id = await service.submit()
    await service.claim()

    answer = await service.post(f"/v1/jobs/{job_id}/cancel", {})
    again = await service.post(f"/v1/jobs/{job_id}/cancel", {})

    assert answer.status == again.status == 202
    assert answer.json["state"] == "running"
    assert answer.json["cancel_requested_at"]


async def test_an_ended_job_cannot_be_cancelled(service: Service) -> None:
    """409, and clients are told not to try again."""
    job_id = await service.submit_and_finish()

    answer = await service.post(f"/v1/jobs/{job_id}/cancel", {})

    assert answer.status == 409
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json["code"] == "illegal_transition"


async def test_a_cancel_with_a_key_may_be_repeated(service: Service) -> None:
    """The same key is the same cancel, also after the end."""
    job_id = await service.submit()
    path = f"/v1/jobs/{job_id}/cancel"

    first = await service.post(path, {}, Idempotency_Key="k")
    second = await service.post(path, {}, Idempotency_Key="k")
    other = await service.post(path, {"a": 1}, Idempotency_Key="k")

    assert first.status == second.status == 200
    assert second.headers["Idempotent-Replayed"] == "true"
    assert second.json == first.json
    assert other.status == 422


async def test_deleting_removes_rows_and_bytes(service: Service) -> None:
    """When DELETE answers no blob holds the job's bytes; a neighbour's are untouched."""
    ids = [await service.submit(return_pooled_hidden_states=True) for _ in range(2)]
    await service.finish(await service.claim())
    before = (await service.get(f"/v1/jobs/{ids[1]}/hidden_states")).body

    deleted = await service.request("DELETE", f"/v1/jobs/{ids[0]}")
    left = [await service.blobs.get(info.key) async for info in service.blobs.list()]
    after = await service.get(f"/v1/jobs/{ids[1]}/hidden_states")

    assert deleted.status == 204
    assert deleted.body == b""
    assert all(ids[0].encode() not in data for data in left)
    assert after.body == before
    for path in ("", "/scores", "/hidden_states", "/events"):
        gone = await service.get(f"/v1/jobs/{ids[0]}{path}")
        assert gone.status == 410
        assert gone.json["code"] == "gone"
    assert (await service.request("DELETE", f"/v1/jobs/{ids[0]}")).status == 410
    assert (await service.request("DELETE", f"/v1/jobs/{ids[1]}")).status == 204
    assert [info async for info in service.blobs.list()] == []


async def test_only_ended_jobs_are_deleted(service: Service) -> None:
    """409 for a job that is not at its end."""
    job_id = await service.submit()

    answer = await service.request("DELETE", f"/v1/jobs/{job_id}")

    assert answer.status == 409
    assert answer.headers["x-should-retry"] == "false"


async def test_a_failed_job_says_why(service: Service) -> None:
    """The job carries the problem."""
    job_id = await service.submit()
    (job,) = await service.claim()

    await service.fail(job, Problem("model_unavailable", "the head is missing", 503))
    answer = await service.get(f"/v1/jobs/{job_id}")

    assert answer.json["state"] == "failed"
    assert answer.json["error"]["message"] == "the head is missing"


async def test_a_client_that_leaves_loses_nothing(service: Service) -> None:
    """The job of a client that disconnects while it waits is scored all the same."""
    body = {"model": "tiny", "items": ["a"]}
    waiting = asyncio.create_task(service.post("/v1/score", body))
    claimed = await service.next_claim()

    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await service.finish(claimed)

    answer = await service.get(f"/v1/jobs/{claimed[0].id}?wait=5")
    assert answer.json["state"] == "succeeded"


async def test_the_request_is_shown_as_recorded(service: Service) -> None:
    """What was asked and nothing else; 404 for an unknown job, 410 once it is deleted."""
    job_id = await service.submit(query="q", apply_softmax=True, metadata={"a": "b"})
    answer = await service.get(f"/v1/jobs/{job_id}/request")
    await service.finish(await service.claim())
    await service.request("DELETE", f"/v1/jobs/{job_id}")
    gone = await service.get(f"/v1/jobs/{job_id}/request")
    unknown = await service.get(f"/v1/jobs/job_{'0' * 32}/request")
    odd = await service.get("/v1/jobs/x/request")

    asked = {"model": "tiny", "items": ["a", "b"], "query": "q", "apply_softmax": True}
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json == asked
    assert (gone.status, unknown.status, odd.status) == (410, 404, 404)


async def test_jobs_are_listed_by_their_bulk(service: Service) -> None:
    """A job names its bulk; what is no bulk's id is refused."""
    bulk_id = f"blk_{'1' * 32}"
    job_id = await service.submit()
    await service.submit()
    update = "UPDATE jobs SET bulk_id = :bulk WHERE id = :id"
    await run_sql(service.database, update, bulk=bulk_id, id=job_id)

    listed = await service.get(f"/v1/jobs?bulk={bulk_id}")
    odd = await service.get("/v1/jobs?bulk=x")

    assert [(job["id"], job["bulk"]) for job in listed.json["data"]] == [(job_id, bulk_id)]
    assert odd.status == 404


async def test_a_poisoned_job_shows_its_history(service: Service) -> None:
    """Per attempt its worker, when, and how it ended; a job at its first attempt has none."""
    job_id = await service.submit()
    fresh = (await service.get(f"/v1/jobs/{job_id}")).json["history"]
    (failed,) = await service.claim()
    async with service.database.transaction() as tx:
        await retry_later(tx, [failed.claim], b'{"code":"forward_failed","message":"m"}', 0.0)
    await service.claim()
    await run_sql(service.database, "UPDATE jobs SET lease_until_at = 1")
    async with service.database.transaction() as tx:
        await reap_jobs(tx, max_crashes=1, limit=10)

    job = (await service.get(f"/v1/jobs/{job_id}")).json
    listed = (await service.get("/v1/jobs?state=failed&error_code=poisoned")).json["data"]

    assert fresh == []
    assert job["state"] == "failed"
    assert job["error"]["code"] == "poisoned"
    assert [(end["attempt"], end["outcome"], end["worker"]) for end in job["history"]] == [
        (1, "failed", "w"),
        (2, "lost", "w"),
    ]
    assert job["history"][0]["error"]["code"] == "forward_failed"
    assert all(end["started_at"] <= end["ended_at"] for end in job["history"])
    assert [each["id"] for each in listed] == [job_id]
