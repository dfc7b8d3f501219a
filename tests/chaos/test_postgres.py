"""PostgreSQL restarts, cuts connections, has none left, or goes silent: nothing is lost."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator

import asyncpg  # type: ignore[import-untyped]
import pytest

from contract.jobs import JobState
from storage.migrating import migrate
from tests.chaos.proxy import Proxy, run_proxy
from tests.chaos.rig import Rig, open_rig, through
from tests.chaos.servers import PostgresServer, run_postgres
from tests.storage.factories import run_sql
from tests.worker.harness import run_worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
_CUT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = 'scorekeep' AND pid != pg_backend_pid()
"""


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A migrated server with few connections."""
    with run_postgres(max_connections="40", fsync="off") as server:
        migrate(server.url)
        yield server


@pytest.fixture
async def proxy(server: PostgresServer) -> AsyncIterator[Proxy]:
    """A proxy before it."""
    async with run_proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
async def rig(
    server: PostgresServer, proxy: Proxy, blob_url: str, redis_url: str
) -> AsyncIterator[Rig]:
    """An API on it."""
    url = through(proxy, server.url)
    async with open_rig(url, blob_url, redis_url, lease_s=20.0) as rig:
        yield rig


async def submit_until_taken(rig: Rig, count: int) -> tuple[list[str], set[int]]:
    """Submit as a client does that heeds ``Retry-After``; return ids and the statuses seen."""
    seen: set[int] = set()

    async def submit(number: int) -> str:
        body = {"model": "tiny", "items": ["a"]}
        while True:
            answer = await rig.service.post("/v1/jobs", body, Idempotency_Key=f"k{number}")
            seen.add(answer.status)
            if answer.status == 202:
                return str(answer.json["id"])
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            await asyncio.sleep(0.1)

    return list(await asyncio.gather(*(submit(number) for number in range(count)))), seen


async def wait_patiently(rig: Rig, ids: list[str]) -> set[JobState]:
    """Return the states in which the jobs ended; reads again while the store is away."""
    rows = await rig.bench.wait(*ids, timeout_s=60)
    return {row.state for row in rows}


async def test_an_immediate_restart(server: PostgresServer, rig: Rig) -> None:
    """503 with Retry-After while it is away; the worker reconnects; one event per job."""
    async with run_worker(rig.settings, rig.scorer):
        before = await rig.submit(20)
        restarting = asyncio.create_task(server.restart(signal.SIGQUIT))
        await asyncio.sleep(0)
        during, seen = await submit_until_taken(rig, 20)
        await restarting
        states = await wait_patiently(rig, before + during)
    events = await run_sql(rig.bench.database, "SELECT count(*) AS n FROM events")

    assert states == {JobState.SUCCEEDED}
    assert seen <= {202, 503}
    assert events[0].n == 40


async def test_terminated_backends(server: PostgresServer, rig: Rig) -> None:
    """All connections are cut ten times while jobs run."""
    async with run_worker(rig.settings, rig.scorer):
        ids: list[str] = []
        for round_number in range(10):
            await run_sql_apart(server, _CUT)
            more, _ = await submit_until_taken(rig, 5)
            ids += more
            assert round_number < 10
        states = await wait_patiently(rig, sorted(set(ids)))

    assert states == {JobState.SUCCEEDED}


_CUT_OURS = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'scorekeep'
"""


async def test_no_connection_is_left(server: PostgresServer, rig: Rig) -> None:
    """Others took all of them: 503, until one is free again."""
    address = f"postgresql://postgres@127.0.0.1:{server.port}/postgres"
    await rig.bench.database.close()  # its pool is empty
    taken = [await asyncpg.connect(address)]
    ours = 1
    while ours:
        with contextlib.suppress(asyncpg.PostgresError):
            while True:
                taken.append(await asyncpg.connect(address))
        ours = await taken[0].fetchval(_CUT_OURS)  # whatever the service's pool holds is cut
    answer = await rig.service.post("/v1/jobs", {"model": "tiny", "items": ["a"]})
    ready = await rig.service.get("/readyz")
    for connection in taken:
        await connection.close()
    async with run_worker(rig.settings, rig.scorer):
        took_s = await rig.time_one()

    assert answer.status == 503
    assert answer.headers["Retry-After"]
    assert any(reason["part"] == "store" for reason in ready.json["reasons"])
    assert took_s < 20


async def test_half_open_connections(rig: Rig, proxy: Proxy) -> None:
    """Connections that nobody answers on are given up within seconds, and no lease is lost."""
    async with run_worker(rig.settings, rig.scorer):
        await rig.time_one()
        proxy.freeze()
        started_at = time.monotonic()
        ids, _ = await submit_until_taken(rig, 3)
        states = await wait_patiently(rig, ids)
        took_s = time.monotonic() - started_at
        rows = await run_sql(rig.bench.database, "SELECT max(crash_count) AS n FROM jobs")

    print(f"half-open PostgreSQL: {took_s:.1f} s")  # noqa: T201
    assert states == {JobState.SUCCEEDED}
    assert rows[0].n == 0
    assert took_s < 15


async def run_sql_apart(server: PostgresServer, statement: str) -> None:
    """Run a statement past the proxy, in a loop of its own."""
    await asyncio.to_thread(server.admin.execute, statement)
