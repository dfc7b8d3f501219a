"""Many who ask the same at once: one look for all, few at a time, and nobody is turned away."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from sqlalchemy import event
from sqlalchemy.pool import QueuePool

from api.auth import Keyring
from api.shared_reads import SharedReads
from api.state import DATABASE, WAITERS
from contract.errors import JobNotFoundError, StoreUnavailableError
from contract.keys import Scope
from storage.database import Database, Transaction
from storage.keys import add_key
from tests.api.conftest import make_settings, running
from tests.api.service import Service
from tests.api.tenants import make_tenant

_CROWD = 400


class _Looks:
    """Counts looks, and lets each go on only when told."""

    def __init__(self) -> None:
        self.begun = 0
        self.most_at_once = 0
        self.may_end = asyncio.Event()
        self._running = 0

    async def __call__(self, _tx: Transaction) -> int:
        self.begun += 1
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        await self.may_end.wait()
        self._running -= 1
        return self.begun


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110  # what is counted tells nobody
            await asyncio.sleep(0.01)


async def test_who_asks_at_once_shares_a_look(sqlite_database: Database) -> None:
    """All who ask before it begins; who asks afterwards is not told what was read before."""
    reads, looks = SharedReads(sqlite_database, most=1), _Looks()
    together = [asyncio.create_task(reads.read("a", looks)) for _ in range(50)]
    await _until(lambda: looks.begun == 1)
    later = [asyncio.create_task(reads.read("a", looks)) for _ in range(50)]
    await asyncio.sleep(0)
    looks.may_end.set()

    assert set(await asyncio.gather(*together)) == {1}
    assert set(await asyncio.gather(*later)) == {2}


async def test_only_so_many_look_at_a_time(sqlite_database: Database) -> None:
    """Different rows take turns; the pool's other connections stay with the others."""
    reads, looks = SharedReads(sqlite_database, most=3), _Looks()
    asked = [asyncio.create_task(reads.read(number, looks)) for number in range(20)]
    await _until(lambda: looks.begun == 3)
    looks.may_end.set()
    await asyncio.gather(*asked)

    assert (looks.begun, looks.most_at_once) == (20, 3)


async def test_an_error_is_everybodys(sqlite_database: Database) -> None:
    """Whoever shares a look is told what went wrong, and the next look is a new one."""
    reads = SharedReads(sqlite_database)

    async def fail(_tx: Transaction) -> None:
        message = "none"
        raise JobNotFoundError(message)

    async def find(_tx: Transaction) -> str:
        return "found"

    failed = await asyncio.gather(
        *(reads.read("a", fail) for _ in range(5)), return_exceptions=True
    )

    assert [type(each) for each in failed] == [JobNotFoundError] * 5
    assert await reads.read("a", find) == "found"


async def test_who_leaves_stops_nobody_else(sqlite_database: Database) -> None:
    """The first who asked goes away; those who share their look are answered."""
    reads, looks = SharedReads(sqlite_database), _Looks()
    first, second = [asyncio.create_task(reads.read("a", looks)) for _ in range(2)]
    await _until(lambda: looks.begun == 1)
    first.cancel()
    await asyncio.wait({first})
    looks.may_end.set()

    assert await second == 1
    assert first.cancelled()
    await reads.close()


async def test_a_turn_that_does_not_come_is_said(sqlite_database: Database) -> None:
    """Waiting for a turn has an end: then the store counts as away."""
    reads, looks = SharedReads(sqlite_database, most=1, patience_s=0.01), _Looks()
    first = asyncio.create_task(reads.read("a", looks))
    await _until(lambda: looks.begun == 1)

    with pytest.raises(StoreUnavailableError, match="no turn"):
        await reads.read("b", looks)

    looks.may_end.set()
    assert await first == 1


@pytest.fixture
async def narrow(
    monkeypatch: pytest.MonkeyPatch,
    database_url: str,
    database: Database,
    blob_url: str,
    redis_url: str,
) -> AsyncIterator[Service]:
    """The application with keys, and with few connections that are not waited for long."""
    monkeypatch.setattr("storage.database._POOL_SIZE", 8)
    monkeypatch.setattr("storage.database._POOL_OVERFLOW", 0)
    monkeypatch.setattr("storage.database._CONNECT_TIMEOUT_S", 0.25)
    settings = make_settings(database_url, blob_url, redis_url, auth="required")
    async with running(Service(settings, database, keep_alive_s=0.5)) as service:
        yield service


@pytest.mark.parametrize("path", ["?wait=60", "/events"], ids=["polls", "streams"])
async def test_a_crowd_that_waits_holds_no_connection(narrow: Service, path: str) -> None:
    """Many times what the pool has: they hold none while they wait, and all see the end."""
    tenant = await make_tenant(narrow, "owner")
    ids = [await tenant.submit() for _ in range(20)]
    pool, waiters = narrow.app[DATABASE]._engine.pool, narrow.app[WAITERS]
    assert isinstance(pool, QueuePool)
    connector, key = aiohttp.TCPConnector(limit=0), {"Authorization": f"Bearer {tenant.key}"}
    async with aiohttp.ClientSession(connector=connector, headers=key) as http:

        async def wait(job_id: str) -> tuple[int, bool]:
            async with http.get(f"{narrow.url}/v1/jobs/{job_id}{path}") as answer:
                return answer.status, b'"succeeded"' in await answer.read()

        crowd = [asyncio.create_task(wait(ids[n % len(ids)])) for n in range(_CROWD)]
        await _until(lambda: sum(waiters.count_of(job_id) for job_id in ids) == _CROWD)
        await _until(lambda: pool.checkedout() == 0)
        waiting = sum(not each.done() for each in crowd)
        await narrow.report_ready()
        await narrow.finish(await narrow.claim())
        ended = Counter(await asyncio.gather(*crowd))

    assert waiting == _CROWD
    assert ended == {(200, True): _CROWD}


async def test_a_crowd_with_one_key_looks_it_up_once(sqlite_database: Database) -> None:
    """Whoever comes while a key is looked up shares that look, valid or not."""
    async with sqlite_database.transaction() as tx:
        _, key = await add_key(tx, "t", [Scope.READ])
    seen = _count_statements(sqlite_database)
    keyring = Keyring(sqlite_database)

    identities = await asyncio.gather(*(keyring.identify(key) for _ in range(100)))

    assert {each.tenant for each in identities} == {"t"}
    assert sum("FROM keys" in statement for statement in seen) == 1


def _count_statements(database: Database) -> list[str]:
    seen: list[str] = []

    def keep(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        seen.append(statement)

    event.listen(database._engine.sync_engine, "before_cursor_execute", keep)
    return seen
