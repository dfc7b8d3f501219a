"""Answers that are under way when something goes wrong: whole, ended, or visibly cut off."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from api.routes import events
from api.state import DIGESTS, WAITERS
from contract.errors import StoreUnavailableError
from storage import events as stored_events
from storage.blobs import BlobStore
from storage.database import Transaction
from tests.api.service import Service
from tests.api.test_events import parse_stream

ITEMS = ["x"] * 9000
PIECE_BYTES = 16 * 1024  # stands for files beyond 4 MiB
_Act = Callable[[], Awaitable[object]]


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, _Act], None]:
    """Return what lets something happen right before the blob store's ``n``-th read."""
    monkeypatch.setattr("api.tensor_files._PIECE_BYTES", PIECE_BYTES)
    get_range = BlobStore.get_range

    def arrange(number: int, act: _Act) -> None:
        reads = iter(range(1, 1000))

        async def read(store: BlobStore, key: str, begin: int, end: int) -> bytes:
            if next(reads) == number:
                await act()
            return await get_range(store, key, begin, end)

        monkeypatch.setattr(BlobStore, "get_range", read)

    return arrange


async def _two_jobs_in_one_blob(service: Service) -> tuple[str, str]:
    first = await service.submit(items=ITEMS, return_pooled_hidden_states=True)
    second = await service.submit(items=ITEMS, return_pooled_hidden_states=True)
    await service.finish(await service.claim(), hidden_dtype="F32")
    return first, second


@pytest.mark.parametrize("known", [True, False], ids=["sending", "digesting"])
@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("range_", [None, "bytes=20000-120000"])
async def test_a_file_stays_whole_while_its_neighbours_go(
    sqlite_service: Service,
    meanwhile: Callable[[int, _Act], None],
    number: int,
    range_: str | None,
    *,
    known: bool,
) -> None:
    """The blob is rewritten under another name at any piece: the bytes are the file's."""
    kept, dropped = await _two_jobs_in_one_blob(sqlite_service)
    path = f"/v1/jobs/{kept}/hidden_states"
    headers = {"Range": range_} if range_ else {}
    whole = await sqlite_service.get(path, headers=headers)
    if not known:
        sqlite_service.app[DIGESTS]._digests.clear()
    meanwhile(number, lambda: sqlite_service.request("DELETE", f"/v1/jobs/{dropped}"))

    answer = await sqlite_service.get(path, headers=headers)

    assert answer.status == whole.status
    assert answer.headers["Content-Digest"] == whole.headers["Content-Digest"]
    assert answer.body == whole.body
    gone = await sqlite_service.get(f"/v1/jobs/{dropped}/hidden_states")
    assert gone.status == 410


@pytest.mark.parametrize("error", [StoreUnavailableError("away"), RuntimeError("boom")])
async def test_a_file_that_cannot_go_on_is_cut_off(
    sqlite_service: Service,
    meanwhile: Callable[[int, _Act], None],
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """After the head no error answer is sent into the file: it breaks off, and that is logged."""
    job_id, _ = await _two_jobs_in_one_blob(sqlite_service)
    path = f"/v1/jobs/{job_id}/hidden_states"
    whole = await sqlite_service.get(path)

    async def fail() -> None:
        raise error

    meanwhile(3, fail)

    body = bytearray()
    response = await sqlite_service.http.get(sqlite_service.url + path)
    with pytest.raises(aiohttp.ClientPayloadError):
        await _read_into(body, response)
    response.close()

    assert response.status == 200
    assert whole.body.startswith(body)
    assert len(body) < len(whole.body)
    assert _errors(caplog) == ["answer_cut_off"]
    assert (await sqlite_service.get(path)).body == whole.body


async def test_a_file_whose_job_goes_is_cut_off(
    sqlite_service: Service, meanwhile: Callable[[int, _Act], None]
) -> None:
    """The job itself is deleted amid its download: the reader sees that the file is not whole."""
    kept, dropped = await _two_jobs_in_one_blob(sqlite_service)
    path = f"/v1/jobs/{dropped}/hidden_states"
    await sqlite_service.get(path)
    meanwhile(3, lambda: sqlite_service.request("DELETE", f"/v1/jobs/{dropped}"))

    with pytest.raises(aiohttp.ClientPayloadError):
        await sqlite_service.get(path)

    assert (await sqlite_service.get(path)).status == 410
    assert (await sqlite_service.get(f"/v1/jobs/{kept}/hidden_states")).status == 200


async def test_bytes_that_are_nowhere_are_gone(sqlite_service: Service) -> None:
    """A job whose blob is lost is 410, not a 200 without an end."""
    job_id, _ = await _two_jobs_in_one_blob(sqlite_service)
    await sqlite_service.blobs.delete([blob.key async for blob in sqlite_service.blobs.list()])

    assert (await sqlite_service.get(f"/v1/jobs/{job_id}/hidden_states")).status == 410


async def test_a_reader_who_leaves_is_no_error(
    sqlite_service: Service,
    meanwhile: Callable[[int, _Act], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A connection that the client closes amid a file ends quietly."""
    job_id, _ = await _two_jobs_in_one_blob(sqlite_service)
    path = f"/v1/jobs/{job_id}/hidden_states"
    await sqlite_service.get(path)
    started, left = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        started.set()
        await left.wait()

    meanwhile(2, wait)
    response = await sqlite_service.http.get(sqlite_service.url + path)
    await started.wait()
    response.close()
    await asyncio.sleep(0.1)
    left.set()
    await asyncio.sleep(0.1)

    assert _errors(caplog) == []
    assert (await sqlite_service.get(path)).status == 200


@pytest.fixture
def away(sqlite_service: Service, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """An event: while it is set, streams cannot read the store."""
    monkeypatch.setattr("api.routes.events._AWAY_S", 0.01)
    sqlite_service.app._state[events.KEEP_ALIVE_S] = 0.02
    away = asyncio.Event()
    list_events = stored_events.list_events

    async def read(tx: Transaction, job_id: str) -> list[stored_events.EventRow]:
        if away.is_set():
            message = "away"
            raise StoreUnavailableError(message, retry_after_s=2)
        return await list_events(tx, job_id)

    monkeypatch.setattr(stored_events, "list_events", read)
    return away


async def test_a_stream_outlives_an_outage(sqlite_service: Service, away: asyncio.Event) -> None:
    """While the store is away there are comments; then come the event and the end."""
    job_id = await sqlite_service.submit()
    async with asyncio.timeout(15), _stream(sqlite_service, job_id) as response:
        seen = await _read_until_away(response, away)
        await sqlite_service.finish(await sqlite_service.claim())
        away.clear()
        seen += await response.read()

    messages = parse_stream(seen.decode())
    assert [one["event"] for one in messages if "event" in one] == ["job.state", "job.succeeded"]


async def test_a_stream_ends_with_a_deleted_job(
    sqlite_service: Service, away: asyncio.Event
) -> None:
    """A job that is deleted before its end was read has nothing more to tell."""
    job_id = await sqlite_service.submit()
    async with asyncio.timeout(15), _stream(sqlite_service, job_id) as response:
        seen = await _read_until_away(response, away)
        await sqlite_service.finish(await sqlite_service.claim())
        deleted = await sqlite_service.request("DELETE", f"/v1/jobs/{job_id}")
        away.clear()
        seen += await response.read()

    assert deleted.status == 204
    assert b"event: job.state" in seen
    assert b"HTTP/1.1" not in seen


async def test_a_stopping_server_ends_streams_amid_an_outage(
    sqlite_service: Service, away: asyncio.Event
) -> None:
    """The stream ends when the server stops, whether or not the store came back."""
    job_id = await sqlite_service.submit()
    async with asyncio.timeout(15), _stream(sqlite_service, job_id) as response:
        seen = await _read_until_away(response, away)
        sqlite_service.app[WAITERS].stop()
        seen += await response.read()

    assert b"event: job.state" in seen


@pytest.mark.parametrize("error", [StoreUnavailableError("away"), RuntimeError("boom")])
async def test_no_answer_lies_in_another(
    sqlite_service: Service, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever fails in a stream that began, the reader sees a broken connection, at once."""
    job_id = await sqlite_service.submit()

    def fail(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(events, "_render_state", fail)

    async with asyncio.timeout(10):
        with pytest.raises(aiohttp.ClientError):
            async with _stream(sqlite_service, job_id) as response:
                await response.read()


async def _read_into(body: bytearray, response: aiohttp.ClientResponse) -> None:
    async for piece in response.content.iter_any():
        body += piece


def _errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the actions of what was logged as an error."""
    return [str(vars(one).get("action")) for one in caplog.records if one.levelname == "ERROR"]


def _stream(
    service: Service, job_id: str
) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
    return service.http.get(f"{service.url}/v1/jobs/{job_id}/events")


async def _read_until_away(response: aiohttp.ClientResponse, away: asyncio.Event) -> bytes:
    """Read the state, take the store away, and read until the stream noticed."""
    seen = await response.content.readany()
    away.set()
    while seen.count(b": the store is away") < 2:
        seen += await response.content.readany()
    return seen
