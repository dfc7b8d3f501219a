"""Redis away, SQL away, blobs away, and services that die."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from api.app import _keep_running
from api.limits import Gate
from api.state import CATALOG, SUBMITTER
from api.submitter import Submission, Submitter
from api.waiting import Waiters
from contract.config import Settings
from contract.errors import StoreUnavailableError
from contract.jobs import Lane
from storage import jobs
from storage.database import Database
from storage.jobs import NewJob
from storage.queue import Queue
from tests.api.conftest import make_settings
from tests.api.service import Service
from tests.services import free_port

BODY = {"model": "tiny", "items": ["a"]}
NEW = NewJob(tenant="default", model="tiny", lane=Lane.NORMAL, request=b"{}", item_count=1)


def nowhere() -> str:
    """Return the address of a Redis that is not there."""
    return f"redis://127.0.0.1:{free_port()}/0"


@pytest.fixture
async def without_redis(
    database_url: str, database: Database, blob_url: str
) -> AsyncIterator[Service]:
    """The application without Redis."""
    service = Service(make_settings(database_url, blob_url, nowhere()), database)
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
async def without_sql(
    sqlite_database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Service]:
    """The application without its database."""
    url = f"postgresql+asyncpg://postgres@127.0.0.1:{free_port()}/none"
    service = Service(make_settings(url, blob_url, redis_url), sqlite_database)
    await service.start()
    yield service
    await service.stop()


async def test_submitting_needs_no_redis(without_redis: Service) -> None:
    """202, and who waits is answered by the SQL poll."""
    submitted = await without_redis.post("/v1/jobs", BODY)
    await without_redis.report_ready()
    await without_redis.finish(await without_redis.claim(), tell=False)
    waiting = asyncio.create_task(without_redis.post("/v1/score", BODY))
    await without_redis.finish(await without_redis.next_claim(), tell=False)
    ready = await without_redis.get("/readyz")

    assert submitted.status == 202
    assert (await waiting).status == 200
    assert [reason["part"] for reason in ready.json["reasons"]][:1] == ["queue"]


async def test_without_sql_everything_is_503(without_sql: Service) -> None:
    """503 with ``Retry-After`` in each family's form; only liveness is well."""
    job = f"/v1/jobs/job_{'0' * 32}"
    requests = [("POST", "/v1/jobs"), ("POST", "/v1/score"), ("GET", "/v1/jobs"), ("GET", job)]
    requests += [("POST", f"{job}/cancel"), ("DELETE", job), ("GET", f"{job}/scores")]

    for method, path in requests:
        body = BODY if method == "POST" else None
        answer = await without_sql.request(method, path, json=body)
        assert answer.status == 503, path
        assert int(answer.headers["Retry-After"]) >= 1
        assert "x-should-retry" not in answer.headers
        assert b"store_unavailable" in answer.body
    ready = await without_sql.get("/readyz")
    assert ready.status == 503
    assert "store" in [reason["part"] for reason in ready.json["reasons"]]
    assert (await without_sql.get("/healthz")).status == 200
    assert (await without_sql.get("/v1/models")).status == 200


async def test_without_blobs_nothing_is_ready(sqlite_service: Service, tmp_path: Path) -> None:
    """A blob store that is away is a reason and 503."""
    await sqlite_service.report_ready()
    shutil.rmtree(tmp_path / "blobs")
    (tmp_path / "blobs").write_text("in the way")

    answer = await sqlite_service.get("/readyz")

    assert answer.status == 503
    assert [reason["part"] for reason in answer.json["reasons"]][:1] == ["blobs"]


async def test_a_hanging_part_is_a_reason(
    sqlite_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that does not answer is given up."""

    async def hang(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Queue, "check", hang)
    monkeypatch.setattr("api.routes.health._CHECK_TIMEOUT_S", 0.05)

    answer = await sqlite_service.get("/readyz")

    assert "did not answer" in answer.json["reasons"][0]["detail"]


async def test_a_store_that_leaves_while_we_wait_is_no_error(
    sqlite_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is recorded: 202 with the job as last seen."""

    async def unavailable(*_: object) -> None:
        message = "away"
        raise StoreUnavailableError(message)

    monkeypatch.setattr("api.job_access._read", unavailable)

    answer = await sqlite_service.post("/v1/score", BODY)

    assert answer.status == 202
    assert answer.json["state"] == "queued"


async def test_a_poll_survives_an_outage(
    sqlite_database: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poll goes on after the store came back, and wakes who waits."""
    waiters = Waiters(sqlite_database, Queue(redis_url), poll_s=0.01)
    failures = iter(range(3))

    async def flaky(_tx: object, ids: list[str]) -> set[str]:
        if next(failures, None) is not None:
            message = "away"
            raise StoreUnavailableError(message)
        return set(ids)

    monkeypatch.setattr(jobs, "finished_among", flaky, raising=False)
    polling = asyncio.create_task(waiters.poll())
    with waiters.watch("a") as event, waiters.watch("a") as same:
        async with asyncio.timeout(5):
            await event.wait()
        assert same is event
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)

    assert waiters.count_of("a") == 0


async def test_a_job_that_cannot_be_added_fails_alone(
    sqlite_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a group one bad row costs its own submit and no other's."""
    add_jobs = jobs.add_jobs

    async def picky(tx: object, new: list[NewJob]) -> object:
        if any(job.request == b"bad" for job in new):
            message = "boom"
            raise RuntimeError(message)
        return await add_jobs(tx, new)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs, "add_jobs", picky)
    submitter = sqlite_service.app[SUBMITTER]
    bad = NewJob(tenant="default", model="tiny", lane=Lane.NORMAL, request=b"bad", item_count=1)

    results = await asyncio.gather(
        *(submitter.submit(Submission(job)) for job in (NEW, bad, NEW)), return_exceptions=True
    )

    assert [isinstance(result, RuntimeError) for result in results] == [False, True, False]


async def test_a_stopping_submitter_answers_everybody(
    sqlite_database: Database, redis_url: str
) -> None:
    """Who is still waiting when the process stops is told to come again."""
    queue = Queue(redis_url)
    submitter = Submitter(sqlite_database, queue, Gate(sqlite_database, Settings()))
    async with sqlite_database.transaction():
        running = asyncio.create_task(submitter.run())
        submits = [asyncio.create_task(submitter.submit(Submission(NEW))) for _ in range(3)]
        await asyncio.sleep(0.05)
        submits.append(asyncio.create_task(submitter.submit(Submission(NEW))))
        await asyncio.sleep(0)
        running.cancel()
        results = await asyncio.gather(*submits, return_exceptions=True)
    await asyncio.gather(running, return_exceptions=True)
    await queue.close()

    assert all(isinstance(result, StoreUnavailableError) for result in results)


async def test_a_submit_does_not_wait_for_ever(
    sqlite_database: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that does not answer in time is 503, and the job is then not added."""
    monkeypatch.setattr("api.submitter._ANSWER_TIMEOUT_S", 0.05)
    queue = Queue(redis_url)
    submitter = Submitter(sqlite_database, queue, Gate(sqlite_database, Settings()))

    with pytest.raises(StoreUnavailableError):
        await submitter.submit(Submission(NEW))
    monkeypatch.undo()
    running = asyncio.create_task(submitter.run())
    kept = await submitter.submit(Submission(NEW))
    async with sqlite_database.snapshot() as tx:
        rows = await jobs.list_jobs(tx, "default")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await queue.close()

    assert [row.id for row in rows] == [kept.row.id]


async def test_a_service_that_dies_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a service is logged, and the service is started again."""
    monkeypatch.setattr("api.app._RESTART_S", 0.0)
    starts = asyncio.Semaphore(0)

    async def mortal() -> None:
        starts.release()
        await asyncio.sleep(0)
        message = "boom"
        raise RuntimeError(message)

    running = asyncio.create_task(_keep_running(mortal))
    async with asyncio.timeout(5):
        for _ in range(3):
            await starts.acquire()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_the_last_reading_of_the_models_stands(
    sqlite_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While SQL is away the models stay as they were."""
    await sqlite_service.report_ready()
    before = await sqlite_service.app[CATALOG].statuses()

    async def unavailable(*_: object, **__: object) -> None:
        message = "away"
        raise StoreUnavailableError(message)

    monkeypatch.setattr("storage.workers.models", unavailable)
    sqlite_service.app[CATALOG]._read_at = -10.0

    assert await sqlite_service.app[CATALOG].statuses() == before
