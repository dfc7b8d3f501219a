"""Registered endpoints and receivers that misbehave: what is recorded, and who is hurt."""

import asyncio
import contextlib
import gzip
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from standardwebhooks import Webhook

from contract.config import Settings
from contract.errors import StoreUnavailableError
from storage import endpoints
from storage.deliveries import record_attempts
from storage.delivery_log import DeliveryRow, list_deliveries
from storage.endpoints import EndpointChange, EndpointRow
from storage.events import add_test_event
from tests.services import free_port
from tests.worker.harness import TENANT, Bench, Receiver, receive, reply, run_worker
from worker import deliveries

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
_Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def register(bench: Bench, url: str) -> EndpointRow:
    """Register an endpoint for every event."""
    async with bench.database.transaction() as tx:
        return await endpoints.create_endpoint(tx, TENANT, EndpointChange(url, None, ""))


async def look(bench: Bench, row: EndpointRow) -> EndpointRow:
    """Read it again."""
    async with bench.database.snapshot() as tx:
        return await endpoints.get_endpoint(tx, TENANT, row.id)


async def send_test(bench: Bench, row: EndpointRow) -> None:
    """Write a test event."""
    async with bench.database.transaction() as tx:
        await add_test_event(tx, row)


async def cancel(bench: Bench, number: int, **fields: Any) -> list[str]:
    """Write so many events: jobs that are cancelled."""
    ids = await bench.submit(*[[[1]]] * number, **fields)
    for job_id in ids:
        await bench.cancel(job_id)
    return ids


async def wait_for_attempts(bench: Bench, number: int) -> list[DeliveryRow]:
    """Return the deliveries when so many attempts are recorded."""
    found: list[DeliveryRow] = []

    async def are_there() -> bool:
        async with bench.database.snapshot() as tx:
            found[:] = await list_deliveries(tx, TENANT)
        return sum(len(each.attempts) for each in found) >= number

    await bench.wait_until(are_there)
    return found


def hold() -> tuple[_Answer, asyncio.Event]:
    """Return an answer that waits, and what lets it go."""
    release = asyncio.Event()

    async def answer(_request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.Response()

    return answer, release


async def reset(request: web.Request) -> web.StreamResponse:
    """Take the event, and hang up without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def flood(request: web.Request) -> web.StreamResponse:
    """Answer with 10 MB."""
    response = web.StreamResponse(status=500)
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        for _ in range(160):
            await response.write(b"x" * 65536)
    return response


@pytest.mark.parametrize(
    ("answer", "status", "state", "kept"),
    [
        (reply(204), 204, "delivered", ""),
        (reply(500, b"oops"), 500, "pending", "oops"),
        (reply(301, location="http://127.0.0.1:1/"), 301, "pending", ""),
        (reply(410, b"gone"), 410, "dead", "gone"),
        (reply(429, retry_after="3600"), 429, "pending", ""),
        (reset, None, "pending", ""),
        (flood, 500, "pending", "x" * 2048),
        (
            reply(500, gzip.compress(b"0" * 10_000_000), content_encoding="gzip"),
            500,
            "pending",
            None,
        ),
    ],
    ids=["ok", "500", "301", "410", "429", "reset", "10MB", "bomb"],
)
async def test_what_a_receiver_does_is_recorded(
    settings: Settings,
    bench: Bench,
    answer: _Answer,
    status: int | None,
    state: str,
    kept: str | None,
) -> None:
    """Status, the first 2 kB as sent, when the next attempt is; 410 disables with its reason."""
    async with receive(answer) as receiver:
        row = await register(bench, receiver.url)
        await send_test(bench, row)
        async with run_worker(settings, deliveries_only=True):
            (found,) = await wait_for_attempts(bench, 1)

    attempt = found.attempts[0]
    after = await look(bench, row)
    assert (attempt.status, found.state, len(receiver.event_ids())) == (status, state, 1)
    assert kept is None or (attempt.answer or "") == kept
    assert len(attempt.answer or "") <= 2048
    assert (after.disabled_at is not None) is (status == 410)
    assert (after.failing_since_at is None) is (status == 204)
    if status == 429:
        assert found.due_at - attempt.created_at >= 3590


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of nobody's for 127.0.0.1, with its key."""
    path = tmp_path / "receiver.pem"
    command = ["/usr/bin/openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=127.0.0.1", "-keyout", str(path), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603
    path.write_text(path.read_text() + (tmp_path / "cert.pem").read_text())
    return path


@contextlib.asynccontextmanager
async def receive_tls(path: Path) -> AsyncIterator[str]:
    """Run a receiver whose certificate nobody trusts."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path)
    app = web.Application()
    app.router.add_post("/hook", reply(204))
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    yield f"https://127.0.0.1:{runner.addresses[0][1]}/hook"
    await runner.cleanup()


@on_sqlite
async def test_broken_tls_is_a_failure(settings: Settings, bench: Bench, certificate: Path) -> None:
    """A certificate that nobody vouches for, and a port that does not speak TLS at all."""
    async with receive_tls(certificate) as untrusted, receive() as plain:
        for url in (untrusted, plain.url.replace("http:", "https:")):
            await send_test(bench, await register(bench, url))
        async with run_worker(settings, deliveries_only=True):
            found = await wait_for_attempts(bench, 2)

    errors = [str(each.attempts[0].error) for each in found]
    assert all(each.state == "pending" for each in found)
    assert any("CERTIFICATE_VERIFY_FAILED" in error for error in errors)
    assert plain.calls == []


async def test_both_secrets_sign_while_one_replaces_the_other(
    settings: Settings, bench: Bench
) -> None:
    """A receiver that has either verifies, by the library of Standard Webhooks."""
    async with receive() as receiver:
        old = await register(bench, receiver.url)
        async with bench.database.transaction() as tx:
            new = await endpoints.rotate_endpoint(tx, TENANT, old.id)
        await send_test(bench, new)
        async with run_worker(settings, deliveries_only=True):
            await receiver.wait(1)

    headers, body = receiver.calls[0]
    lower = {name.lower(): value for name, value in headers.items()}
    for secret in (old.secret, new.secret):
        event = Webhook(secret).verify(body.decode(), lower)
        assert (event["type"], event["data"]["endpoint"]) == ("webhook.test", old.id)


class Busy:
    """A receiver that works for a moment, and counts how many calls it has in hand at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def answer(self, _request: web.Request) -> web.StreamResponse:
        """Work, and say that it was received."""
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)  # the receiver's work
        self.now -= 1
        return web.Response()


async def test_never_more_at_once_than_its_places(settings: Settings, bench: Bench) -> None:
    """Exactly as many as there are places, in every turn; all of them arrive."""
    busy = Busy()
    narrow = msgspec.structs.replace(settings, webhook_endpoint_concurrency=3)
    async with receive(busy.answer) as receiver:
        await cancel(bench, 40, webhook_url=receiver.url)
        async with run_worker(narrow, deliveries_only=True):
            await receiver.wait_for_ids(40)

    assert busy.most == 3


async def test_two_processes_share_a_receiver_s_places(settings: Settings, bench: Bench) -> None:
    """Its places are the fleet's: two processes call it no more at once than one would."""
    busy = Busy()
    narrow = msgspec.structs.replace(settings, webhook_endpoint_concurrency=3)
    async with receive(busy.answer) as receiver:
        await cancel(bench, 60, webhook_url=receiver.url)
        async with (
            run_worker(narrow, deliveries_only=True) as first,
            run_worker(narrow, deliveries_only=True) as second,
        ):
            await receiver.wait_for_ids(60)
            found = await wait_for_attempts(bench, 60)

    assert first.id != second.id
    assert busy.most == 3
    assert len(receiver.calls) == 60
    assert {each.state for each in found} == {"delivered"}


@on_sqlite
async def test_two_processes_leave_a_dead_receiver_alone(settings: Settings, bench: Bench) -> None:
    """What one learns holds for the other: a probe at a time, longer apart, from both together."""
    dead = f"http://127.0.0.1:{free_port()}/hook"
    async with receive() as quick:
        await cancel(bench, 60, webhook_url=dead)
        async with (
            run_worker(settings, deliveries_only=True),
            run_worker(settings, deliveries_only=True),
        ):
            await wait_for_attempts(bench, settings.webhook_endpoint_concurrency)
            await cancel(bench, 40, webhook_url=quick.url)
            await quick.wait_for_ids(40)
            async with bench.database.snapshot() as tx:
                log = await list_deliveries(tx, TENANT, limit=1000)

    tried = [len(each.attempts) for each in log if each.url == dead]
    assert settings.webhook_endpoint_concurrency <= sum(tried)
    assert sum(tried) <= settings.webhook_endpoint_concurrency + 5
    assert {each.state for each in log if each.url == dead} == {"pending"}


@on_sqlite
async def test_slow_and_dead_receivers_hurt_only_themselves(
    settings: Settings, bench: Bench
) -> None:
    """Behind hundreds of their events another gets all of its own, and they are not hammered."""
    stall, release = hold()
    dead = f"http://127.0.0.1:{free_port()}/hook"
    async with receive(stall) as slow, receive() as quick:
        await cancel(bench, 60, webhook_url=slow.url)
        await cancel(bench, 60, webhook_url=dead)
        await cancel(bench, 40, webhook_url=quick.url)
        async with run_worker(settings, deliveries_only=True):
            await quick.wait_for_ids(40)
            held = len(slow.calls)
            async with bench.database.snapshot() as tx:
                log = await list_deliveries(tx, TENANT, limit=1000)
            release.set()

    attempts = sum(len(each.attempts) for each in log if each.url == dead)
    assert held == settings.webhook_endpoint_concurrency
    assert 1 <= attempts <= settings.webhook_endpoint_concurrency + 3
    assert {each.state for each in log if each.url == dead} == {"pending"}


@on_sqlite
async def test_a_store_that_goes_away_loses_no_report(
    settings: Settings, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered meanwhile is recorded once the store is back, and not sent again."""
    faults = 3
    real = record_attempts

    async def record(*arguments: Any, **fields: Any) -> set[str]:
        nonlocal faults
        if arguments[1] and faults:
            faults -= 1
            message = "away"
            raise StoreUnavailableError(message)
        return await real(*arguments, **fields)

    monkeypatch.setattr(deliveries, "record_attempts", record)
    monkeypatch.setattr(deliveries, "_FIRST_BACKOFF_S", 0.01)
    async with receive() as receiver:
        await cancel(bench, 2, webhook_url=receiver.url)
        async with run_worker(settings, deliveries_only=True):
            found = await wait_for_attempts(bench, 2)

    assert faults == 0
    assert [each.state for each in found] == ["delivered"] * 2
    assert len(receiver.calls) == 2


@on_sqlite
async def test_an_error_of_ours_is_an_attempt_like_any_other(
    settings: Settings, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is recorded by its kind, and the ladder bounds how often it happens."""

    async def fail(*_arguments: object) -> bytes:
        message = "a payload that must not be recorded"
        raise KeyError(message)

    monkeypatch.setattr(deliveries, "render_body", fail)
    async with receive() as receiver:
        await cancel(bench, 1, webhook_url=receiver.url)
        async with run_worker(settings, deliveries_only=True):
            (found,) = await wait_for_attempts(bench, 1)

    assert (found.state, receiver.calls) == ("pending", [])
    assert found.attempts[0].error == "an error of ours: KeyError"


@on_sqlite
async def test_no_place_is_claimed_beyond_the_process_s(settings: Settings, bench: Bench) -> None:
    """All receivers together have no more than ``webhook_concurrency``."""
    stall, release = hold()
    async with receive(stall) as first, receive(stall) as second:
        receivers: list[Receiver] = [first, second]
        for receiver in receivers:
            await cancel(bench, 5, webhook_url=receiver.url)
        few = msgspec.structs.replace(settings, webhook_concurrency=3)
        async with run_worker(few, deliveries_only=True):

            async def are_full() -> bool:
                return sum(len(each.calls) for each in receivers) >= 3

            await bench.wait_until(are_full)
            held = sum(len(each.calls) for each in receivers)
            release.set()
            for receiver in receivers:
                await receiver.wait_for_ids(5)

    assert held == 3
