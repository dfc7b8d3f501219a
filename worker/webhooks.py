"""One attempt to deliver one event: sign, POST, judge. No SQL.

The only place for the retry ladder and for what counts as delivered (Standard Webhooks 1.0).
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from aiohttp import (
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    InvalidURL,
)

from contract.addresses import check_url
from contract.config import Settings
from contract.errors import AddressRefusedError
from contract.webhooks import sign
from worker.addresses import AddressDeniedError, SocketFactory, create_connector

__all__ = [
    "HOPELESS_S",
    "LADDER_S",
    "Attempt",
    "choose_delay_s",
    "choose_pause_s",
    "open_session",
    "post",
]

_HOUR_S = 3600.0
#: Seconds between one attempt and the next; the first is at once. Ten attempts over about 3 days.
LADDER_S: tuple[float, ...] = (
    5.0,
    300.0,
    1800.0,
    2 * _HOUR_S,
    5 * _HOUR_S,
    10 * _HOUR_S,
    14 * _HOUR_S,
    20 * _HOUR_S,
    24 * _HOUR_S,
)
#: What has only failed for so long is not tried any more: five days.
HOPELESS_S = 120 * _HOUR_S
_JITTER = 0.2
#: A failing receiver rests after each failure in a row twice as long, between these.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
#: The longest that one ``Retry-After`` keeps a receiver's other events waiting.
_LONGEST_ASKED_PAUSE_S = _HOUR_S
_MAX_RETRY_AFTER_S = 24 * _HOUR_S
_ANSWER_BYTES = 16 * 1024
#: Statuses whose ``Retry-After`` is a request to slow down.
_THROTTLED = frozenset({429, 502, 503, 504})
#: Statuses under 500 that say that the receiver itself cannot now, whatever the event.
_UNABLE = frozenset({408, 425, 429})
_GONE = 410


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one attempt went. ``status`` is None where there was no answer; then ``error`` says why.

    ``final`` means that no further attempt can help.
    """

    latency_s: float
    status: int | None = None
    error: str | None = None
    answer: bytes = b""
    retry_after_s: float | None = None
    final: bool = False

    @property
    def delivered(self) -> bool:
        """Whether the receiver took the event: any 2xx."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def is_gone(self) -> bool:
        """Whether the receiver asked for no more events."""
        return self.status == _GONE

    @property
    def is_unable(self) -> bool:
        """Whether the receiver is down, too slow, or asks for a pause; not that it refuses this."""
        return self.status is None or self.status >= 500 or self.status in _UNABLE


def open_session(settings: Settings, open_socket: SocketFactory | None = None) -> ClientSession:
    """Return the session for deliveries: checked addresses, no cookies, no proxy from outside."""
    connector = create_connector(
        settings.allowed_networks, limit=settings.webhook_concurrency, open_socket=open_socket
    )
    return ClientSession(
        connector=connector,
        cookie_jar=DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
        timeout=ClientTimeout(total=settings.webhook_timeout_s),
        read_bufsize=_ANSWER_BYTES,
        headers={"user-agent": "scorekeep-webhooks/1"},
    )


async def post(
    session: ClientSession,
    settings: Settings,
    *,
    url: str,
    event_id: str,
    body: bytes,
    secrets: Sequence[str],
) -> Attempt:
    """POST a signed event once and say how it went; never raises for what a receiver does."""
    started_at = time.monotonic()
    try:
        check_url(
            url,
            allow_http=settings.webhook_allow_http,
            allowed_networks=settings.allowed_networks,
        )
        headers = _sign_headers(event_id, body, secrets)
        async with session.post(url, data=body, headers=headers, allow_redirects=False) as response:
            answer = await _read_bounded(response)
            return Attempt(
                time.monotonic() - started_at,
                status=response.status,
                error=_describe_status(response.status),
                answer=answer,
                retry_after_s=_parse_retry_after(response),
                final=response.status == _GONE,
            )
    except AddressRefusedError as error:
        return Attempt(time.monotonic() - started_at, error=error.message, final=True)
    except TimeoutError:
        message = f"no answer within {settings.webhook_timeout_s:g} s"
        return Attempt(time.monotonic() - started_at, error=message)
    except (ClientError, OSError, ValueError) as error:
        hopeless = isinstance(error, InvalidURL)  # 134744072: a spelling that aiohttp refuses
        return Attempt(time.monotonic() - started_at, error=_describe(error), final=hopeless)


def choose_delay_s(failures: int, retry_after_s: float | None) -> float | None:
    """Return the seconds until the next attempt after so many failed ones, or None for never.

    The ladder's step ±20 %, or ``Retry-After`` where that is longer.
    """
    if failures > len(LADDER_S):
        return None
    return max(_spread(LADDER_S[failures - 1]), retry_after_s or 0.0)


def choose_pause_s(failures: int, attempt: Attempt) -> float | None:
    """Return how long to leave a receiver alone after so many failures in a row.

    None where the attempt does not say that the receiver is unable.
    """
    if attempt.delivered or not attempt.is_unable:
        return None
    doubled_s = _FIRST_PAUSE_S * 2.0 ** min(failures - 1, 30)
    asked_s = min(attempt.retry_after_s or 0.0, _LONGEST_ASKED_PAUSE_S)
    return max(_spread(min(doubled_s, _LONGEST_PAUSE_S)), asked_s)


def _spread(seconds: float) -> float:
    return seconds * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311  # jitter, not a secret


def _sign_headers(event_id: str, body: bytes, secrets: Sequence[str]) -> dict[str, str]:
    timestamp = int(time.time())
    return {
        "content-type": "application/json",
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(secrets, event_id=event_id, timestamp=timestamp, body=body),
    }


async def _read_bounded(response: ClientResponse) -> bytes:
    """Read at most 16 kB, as sent: nothing is unpacked. What follows is never read."""
    read = bytearray()
    while len(read) < _ANSWER_BYTES:
        try:
            chunk = await response.content.read(_ANSWER_BYTES - len(read))
        except (ClientError, TimeoutError, asyncio.IncompleteReadError):
            break  # the status arrived, and the status is the answer
        if not chunk:
            break
        read += chunk
    return bytes(read)


def _parse_retry_after(response: ClientResponse) -> float | None:
    raw = response.headers.get("retry-after", "").strip()
    if response.status not in _THROTTLED or not raw:
        return None
    if raw.isascii() and raw.isdigit():
        return min(float(raw), _MAX_RETRY_AFTER_S)
    try:
        moment = parsedate_to_datetime(raw)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return min(max((moment - datetime.now(UTC)).total_seconds(), 0.0), _MAX_RETRY_AFTER_S)


def _describe_status(status: int) -> str | None:
    if 200 <= status < 300:
        return None
    if 300 <= status < 400:
        return f"the receiver answered {status}; redirects are not followed"
    return f"the receiver answered {status}"


def _describe(error: Exception) -> str:
    if isinstance(error, InvalidURL):
        return "InvalidURL: the URL cannot be used"  # its text would be the URL
    cause = getattr(error, "os_error", None) or error
    if isinstance(cause, AddressDeniedError) or "may not call this address" in str(cause):
        return str(cause)
    return f"{type(cause).__name__}: {cause}"[:500]
