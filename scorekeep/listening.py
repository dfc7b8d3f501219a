"""``scorekeep listen``: receive events on this machine, verify, print, and pass them on.

Knows only the contract and HTTP. It registers itself as an endpoint while it runs, so that every
event of the tenant comes, and takes what goes to the URLs of jobs too.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from contract.errors import AddressRefusedError, SignatureError
from contract.webhooks import Event, verify
from scorekeep.client import AsyncClient

__all__ = ["Listener", "listening", "run_listen"]

_FORWARD_TIMEOUT_S = 15.0
_MAX_BODY_BYTES = 64 * 1024
#: What is passed on: what a receiver needs to verify by itself.
_PASSED = ("content-type", "webhook-id", "webhook-timestamp", "webhook-signature")
_HINT = (
    "the service does not call this machine: start it with SCOREKEEP_WEBHOOK_ALLOW_HTTP=1 and "
    "SCOREKEEP_WEBHOOK_ALLOWED_NETWORKS=127.0.0.0/8, or listen with --no-register"
)


@dataclass
class Listener:
    """Answers deliveries. ``secrets`` are all that may sign them; ``say`` prints a line."""

    secrets: list[str]
    say: Callable[[str], None]
    forward: str | None = None
    session: aiohttp.ClientSession | None = None
    events: list[Event] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Verify one delivery and print it; 400 for one that does not verify.

        With ``forward`` the answer is the status of the receiver that it was passed on to, so that
        the service tries again when that one fails.
        """
        body = await request.read()
        event_id = request.headers.get("webhook-id", "-")[:100]
        try:
            event = self._verify(body, request)
        except SignatureError as error:
            self.say(f"refused {event_id}: {error.message}")
            return web.Response(status=error.http_status, text=error.message)
        self.events.append(event)
        status, text = await self._pass_on(body, request)
        self.say(f"{event.timestamp} {event.type} {event_id} {_describe(event)} -> {text}")
        return web.Response(status=status)

    def _verify(self, body: bytes, request: web.Request) -> Event:
        for secret in self.secrets[:-1]:
            with contextlib.suppress(SignatureError):
                return verify(body, request.headers, secret)
        return verify(body, request.headers, self.secrets[-1])

    async def _pass_on(self, body: bytes, request: web.Request) -> tuple[int, str]:
        if self.forward is None or self.session is None:
            return 204, "204"
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        try:
            async with self.session.post(
                self.forward, data=body, headers=headers, allow_redirects=False
            ) as answer:
                return answer.status, f"{answer.status} from {self.forward}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return 502, f"no answer from {self.forward} ({type(error).__name__})"


@contextlib.asynccontextmanager
async def listening(listener: Listener, port: int) -> AsyncIterator[str]:
    """Serve ``listener`` on a loopback port, 0 for a free one; yield its URL."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.router.add_post("/{tail:.*}", listener.handle)
    runner = web.AppRunner(app, access_log=None)
    timeout = aiohttp.ClientTimeout(total=_FORWARD_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as http:
        listener.session = http
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
        finally:
            await runner.cleanup()


def run_listen(options: argparse.Namespace, url: str) -> int:
    """Listen until Ctrl-C or SIGTERM; ``url`` is the service."""
    return asyncio.run(_listen(options, url))


async def _listen(options: argparse.Namespace, url: str) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncClient(url) as client:
        secrets = list(options.secrets or await client.webhooks.secrets())
        listener = Listener(secrets, _say, options.forward)
        async with listening(listener, options.port) as own:
            _say(f"listening on {own}, forwarding to {options.forward or 'nobody'}")
            if options.no_register:
                await stop.wait()
                return 0
            async with _registered(client, own, options.events, listener):
                await stop.wait()
    return 0


@contextlib.asynccontextmanager
async def _registered(
    client: AsyncClient, own: str, events: Sequence[str] | None, listener: Listener
) -> AsyncIterator[None]:
    try:
        endpoint = await client.webhooks.create(own, events=events, description="scorekeep listen")
    except AddressRefusedError as error:
        error.add_note(_HINT)
        raise
    listener.secrets.insert(0, str(endpoint.secret))
    _say(f"registered as {endpoint.id} until Ctrl-C")
    try:
        yield
    finally:
        await client.webhooks.delete(endpoint.id)


def _describe(event: Event) -> str:
    """Name what the event is about, and no more: a payload may hold what nobody should see."""
    words = [str(event.data[name]) for name in ("id", "state", "model") if name in event.data]
    return " ".join(words) or "-"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
