"""One attempt at a receiver: what counts, what is read, and when to come back."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import ClientSession, InvalidURL, web
from standardwebhooks import Webhook

from contract.config import Settings
from contract.webhooks import create_secret
from tests.worker.harness import create_settings, receive, reply
from worker.webhooks import (
    LADDER_S,
    Attempt,
    _describe,
    choose_delay_s,
    choose_pause_s,
    open_session,
    post,
)

SECRET = create_secret()
BODY = b'{"type":"job.succeeded","timestamp":"2026-01-01T00:00:00Z","sequence":1,"data":{}}'


@pytest.fixture
def settings() -> Settings:
    """Settings that let loopback receivers be called."""
    return create_settings("sqlite+aiosqlite://", "file:///none", "redis://127.0.0.1:1/0")


async def call(
    settings: Settings, url: str, session: ClientSession | None = None, secrets: int = 1
) -> Attempt:
    """Deliver ``BODY`` once."""
    async with session or open_session(settings) as opened:
        return await post(
            opened, settings, url=url, event_id="evt_1", body=BODY, secrets=[SECRET] * secrets
        )


async def test_the_signature_verifies_independently(settings: Settings) -> None:
    """The library of Standard Webhooks accepts what we send, during a rotation too."""
    async with receive() as receiver:
        attempt = await call(settings, receiver.url, secrets=2)

    headers, body = receiver.calls[0]
    lower = {name.lower(): value for name, value in headers.items()}
    assert attempt.delivered
    assert Webhook(SECRET).verify(body.decode(), lower)["type"] == "job.succeeded"
    assert len(lower["webhook-signature"].split()) == 2
    assert abs(int(lower["webhook-timestamp"]) - time.time()) < 5
    assert lower["content-type"] == "application/json"


@pytest.mark.parametrize("status", [200, 201, 204, 299])
async def test_any_2xx_is_delivered(settings: Settings, status: int) -> None:
    """The receiver took it."""
    async with receive(reply(status)) as receiver:
        attempt = await call(settings, receiver.url)

    assert (attempt.delivered, attempt.status, attempt.error) == (True, status, None)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_fails_and_is_not_followed(settings: Settings, status: int) -> None:
    """A receiver cannot send us elsewhere."""
    async with receive() as target, receive(reply(status, location=target.url)) as receiver:
        attempt = await call(settings, receiver.url)

    assert (attempt.delivered, attempt.final, target.calls) == (False, False, [])
    assert "redirects are not followed" in str(attempt.error)


async def test_gone_is_final(settings: Settings) -> None:
    """410 asks us never to come back; 500 does not."""
    async with receive(reply(410), reply(500)) as receiver:
        gone, broken = await call(settings, receiver.url), await call(settings, receiver.url)

    assert (gone.final, broken.final, broken.status) == (True, False, 500)


@pytest.mark.parametrize(
    ("status", "value", "expected"),
    [
        (429, "120", 120.0),
        (503, "7", 7.0),
        (429, "999999999", 86400.0),
        (429, "soon", None),
        (429, "-5", None),
        (429, "", None),
        (500, "120", None),
        (200, "120", None),
    ],
)
async def test_retry_after_in_seconds(
    settings: Settings, status: int, value: str, expected: float | None
) -> None:
    """Honoured where it asks to slow down, bounded, ignored where it makes no sense."""
    async with receive(reply(status, retry_after=value)) as receiver:
        attempt = await call(settings, receiver.url)

    assert attempt.retry_after_s == expected


async def test_retry_after_as_a_date(settings: Settings) -> None:
    """HTTP dates are understood, with and without a zone; the past means now."""
    later = datetime.now(UTC) + timedelta(seconds=90)
    dates = [
        format_datetime(later, usegmt=True),
        later.strftime("%a, %d %b %Y %H:%M:%S -0000"),
        format_datetime(later - timedelta(hours=1), usegmt=True),
    ]
    async with receive(*[reply(429, retry_after=date) for date in dates]) as receiver:
        attempts = [await call(settings, receiver.url) for _ in dates]

    delays = [attempt.retry_after_s or 0.0 for attempt in attempts]
    assert all(85 < delay <= 90 for delay in delays[:2])
    assert delays[2] == 0.0


async def test_little_is_read_of_a_long_answer(settings: Settings) -> None:
    """A receiver that answers for ever takes 16 kB of us and no more."""

    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(160):
            await response.write(b"x" * 65536)
        return response

    async with receive(flood) as receiver:
        attempt = await call(settings, receiver.url)

    assert attempt.delivered
    assert len(attempt.answer) == 16 * 1024


async def test_a_compressed_answer_is_not_unpacked(settings: Settings) -> None:
    """A bomb stays a bomb: its bytes are kept as they came."""
    async with receive(reply(200, b"\x1f\x8bbomb", content_encoding="gzip")) as receiver:
        attempt = await call(settings, receiver.url)

    assert attempt.answer == b"\x1f\x8bbomb"


async def test_no_cookie_comes_back(settings: Settings) -> None:
    """What one receiver sets, no receiver is told."""
    async with receive(reply(200, set_cookie="a=1")) as receiver, open_session(settings) as session:
        for _ in range(2):
            await post(
                session, settings, url=receiver.url, event_id="e", body=BODY, secrets=[SECRET]
            )

    assert all("Cookie" not in headers for headers, _ in receiver.calls)


async def test_a_slow_receiver_times_out(settings: Settings) -> None:
    """Nobody waits longer than the timeout, and the error says which."""
    release = asyncio.Event()

    async def stall(_request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.Response()

    short = create_settings("sqlite+aiosqlite://", "file:///x", "redis://x", webhook_timeout_s=0.2)
    async with receive(stall) as receiver:
        attempt = await call(short, receiver.url)
        release.set()

    assert (attempt.delivered, attempt.status) == (False, None)
    assert attempt.error == "no answer within 0.2 s"


async def test_a_reset_is_a_failure(settings: Settings) -> None:
    """A receiver that hangs up before it answers is asked again later."""

    async def reset(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with receive(reset) as receiver:
        attempt = await call(settings, receiver.url)

    assert (attempt.delivered, attempt.final) == (False, False)
    assert attempt.error


async def test_a_status_counts_though_the_body_breaks_off(settings: Settings) -> None:
    """The receiver said yes; what came after does not matter."""

    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "1000"})
        await response.prepare(request)
        await response.write(b"partly")
        assert request.transport is not None
        request.transport.close()
        return response

    async with receive(break_off) as receiver:
        attempt = await call(settings, receiver.url)

    assert attempt.delivered


async def test_a_status_counts_though_the_body_never_ends(settings: Settings) -> None:
    """The receiver said yes in time; that it dawdles over the rest costs the timeout, no more."""
    release = asyncio.Event()

    async def dawdle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"partly")
        await release.wait()
        return response

    short = create_settings("sqlite+aiosqlite://", "file:///x", "redis://x", webhook_timeout_s=0.3)
    async with receive(dawdle) as receiver:
        attempt = await call(short, receiver.url)
        release.set()

    assert (attempt.delivered, attempt.status, attempt.answer) == (True, 200, b"partly")


async def test_nobody_listens(settings: Settings) -> None:
    """A refused connection is a failure with its reason."""
    async with receive() as receiver:
        url = receiver.url
    attempt = await call(settings, url)

    assert (attempt.delivered, attempt.final) == (False, False)
    assert attempt.error


async def test_an_address_that_may_not_be_called_is_final(settings: Settings) -> None:
    """Plain http and literal private addresses end the delivery without a connection."""
    strict = Settings()
    attempts = [await call(strict, url) for url in ("http://example.org/", "https://10.0.0.1/")]

    assert all(attempt.final and attempt.error for attempt in attempts)


async def test_a_name_that_leads_inside_says_so(settings: Settings) -> None:
    """A denied address behind a name is recorded as such, and may be tried again."""
    async with open_session(Settings(webhook_allow_http=True)) as session:
        attempt = await post(
            session,
            create_settings("sqlite+aiosqlite://", "file:///x", "redis://x"),
            url="http://localhost:8080/hook",
            event_id="e",
            body=BODY,
            secrets=[SECRET],
        )

    assert (attempt.final, attempt.status) == (False, None)
    assert "may not call this address (loopback)" in str(attempt.error)


def test_the_ladder_is_the_documented_one() -> None:
    """Ten attempts: at once, 5 s, 5 min, 30 min, 2, 5, 10, 14, 20 and 24 hours."""
    hours = (2, 5, 10, 14, 20, 24)
    assert LADDER_S == (5.0, 300.0, 1800.0, *(hour * 3600.0 for hour in hours))


def test_each_step_has_its_jitter() -> None:
    """Delays spread ±20 % so that receivers are not hit by all at once, and end after ten."""
    for attempt, step in enumerate(LADDER_S, start=1):
        delays = [choose_delay_s(attempt, None) for _ in range(200)]
        assert all(step * 0.8 <= (delay or 0) <= step * 1.2 for delay in delays)
        assert len(set(delays)) > 100
    assert choose_delay_s(len(LADDER_S) + 1, 5.0) is None


@pytest.mark.parametrize(
    ("status", "unable"),
    [(None, True), (500, True), (503, True), (429, True), (408, True), (301, False), (404, False)],
)
def test_only_a_receiver_that_is_unable_rests(status: int | None, unable: bool) -> None:
    """One that refuses this event may well take the next; a success never pauses."""
    pause = choose_pause_s(1, Attempt(0.0, status=status))

    assert (pause is not None) is unable
    assert choose_pause_s(5, Attempt(0.0, status=204)) is None


def test_pauses_double_up_to_a_minute_and_follow_retry_after() -> None:
    """A receiver that stays down is probed once a minute; one that asks for an hour gets it."""
    down = Attempt(0.0, error="refused")
    pauses = [choose_pause_s(failures, down) or 0 for failures in (1, 2, 3, 8, 2000)]

    for pause, step in zip(pauses, (0.5, 1, 2, 60, 60), strict=True):
        assert step * 0.8 <= pause <= step * 1.2
    assert choose_pause_s(1, Attempt(0.0, status=429, retry_after_s=600.0)) == 600
    assert choose_pause_s(1, Attempt(0.0, status=429, retry_after_s=86400.0)) == 3600


def test_a_url_is_never_in_the_error() -> None:
    """It may hold a token, and errors are logged."""
    assert "token" not in _describe(InvalidURL("https://[x/?token=1"))


def test_retry_after_only_prolongs() -> None:
    """A receiver may ask for more time, not for less."""
    assert choose_delay_s(1, 100.0) == 100.0
    assert (choose_delay_s(2, 1.0) or 0) >= 240
