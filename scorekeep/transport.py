"""One HTTP exchange with the service: retries, time limits, and answers turned into errors.

The only place of the client that knows status codes and headers.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec

from contract.config import default_api_key
from contract.errors import ScoreError, UnavailableError

__all__ = ["Answer", "Transport", "create_error", "render_authorization"]

_RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_REFUSED_STATUSES = frozenset({429, 503})
_LONGEST_RETRY_AFTER_S = 120.0
_FIRST_BACK_OFF_S = 0.25
_LONGEST_BACK_OFF_S = 8.0
#: Streams send a comment every 15 s: silence for longer is a connection that is dead.
_SILENCE_S = 60.0


class _Fault(msgspec.Struct):
    """The members of a problem document that a client acts on; every one may be missing."""

    code: str = ""
    detail: str = ""
    title: str = ""
    message: str = ""
    param: str | None = None
    request_id: str | None = None


class _FamilyFault(msgspec.Struct):
    """The error form of the compatible routes."""

    error: _Fault


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer. ``headers`` are looked up without regard to case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Transport:
    """Sends requests to one service, again where the service or the network says that it may help.

    A POST without an idempotency key is sent again only where the first surely did nothing. Not
    for use from more than one event loop.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None, timeout_s: float, max_retries: int
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {"User-Agent": "scorekeep-python"}
        self._headers |= render_authorization(api_key)
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._session: aiohttp.ClientSession | None = None

    @property
    def base_url(self) -> str:
        """The service's address, without a slash at its end."""
        return self._base_url

    async def send(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> Answer:
        """Return the answer, whose status is below 400.

        ``wait_s`` is how long the service was asked to hold the answer back; it extends the time
        limit. Raises the class of ``contract.errors`` that the answer's code names, and
        ``UnavailableError`` where no answer came.
        """
        attempt, may_be_done_twice = 0, method != "POST" or "Idempotency-Key" in (headers or {})
        while True:
            answer: Answer | None = None
            cause: Exception | None = None
            try:
                answer = await self._send_once(method, path, body, query, headers, wait_s)
            except (aiohttp.ClientError, TimeoutError) as error:
                cause = error
            if answer is not None and answer.status < 400:
                return answer
            helps = may_be_done_twice or _did_nothing(answer, cause)
            if attempt >= self._max_retries or not (helps and _is_retryable(answer)):
                raise self._error(answer, cause) from cause
            await asyncio.sleep(_delay_s(answer, attempt))
            attempt += 1

    @contextlib.asynccontextmanager
    async def stream(
        self,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a GET whose answer is read line by line, for as long as it lasts.

        Raises as ``send`` does for an answer that is an error; a connection that breaks raises
        ``aiohttp.ClientError``, one that is silent for a minute ``TimeoutError``.
        """
        timeout = aiohttp.ClientTimeout(sock_connect=self._timeout_s, sock_read=_SILENCE_S)
        async with self._open().get(
            self._base_url + path,
            params=query,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
        ) as response:
            if response.status >= 400:
                answer = Answer(response.status, response.headers, await response.read())
                raise self._error(answer, None)
            yield _read_lines(response.content)

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session

    async def _send_once(
        self,
        method: str,
        path: str,
        body: bytes | None,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
        wait_s: float,
    ) -> Answer:
        content_type = {"Content-Type": "application/json"} if body is not None else {}
        async with self._open().request(
            method,
            self._base_url + path,
            data=body,
            params=query,
            headers={**content_type, **(headers or {})},
            timeout=aiohttp.ClientTimeout(total=self._timeout_s + wait_s),
            allow_redirects=False,
        ) as response:
            return Answer(response.status, response.headers, await response.read())

    def _error(self, answer: Answer | None, cause: Exception | None) -> ScoreError:
        if answer is not None:
            return _error_of(answer)
        reason = str(cause) or "no answer in time"
        error = UnavailableError(f"no answer from {self._base_url}: {reason}")
        error.add_note("is the service running, and is this its address? scorekeep up starts one")
        return error


def render_authorization(api_key: str | None) -> dict[str, str]:
    """Return the header that carries the key: the given one, else ``SCOREKEEP_API_KEY``'s."""
    key = default_api_key() if api_key is None else api_key
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _read_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield whole lines of any length; the last may lack its end."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def create_error(
    code: str,
    message: str,
    *,
    status: int | None = None,
    param: str | None = None,
    retry_after_s: float | None = None,
) -> ScoreError:
    """Return an error of the class whose ``code`` this is.

    An unknown code gives the class with that ``status``, or ``ScoreError``: a newer service may
    know errors that this client does not.
    """
    tree = list(_descend(ScoreError))
    kind = next((each for each in tree if each.code == code), None)
    if kind is None:
        kind = next((each for each in tree if each.http_status == status), ScoreError)
    error = kind.__new__(kind)  # some constructors take other arguments
    ScoreError.__init__(error, message, param=param, retry_after_s=retry_after_s)
    return error


def _descend(kind: type[ScoreError]) -> list[type[ScoreError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _descend(child))]


def _did_nothing(answer: Answer | None, cause: Exception | None) -> bool:
    """Tell whether the service surely did nothing: it was not reached, or refused to begin."""
    if answer is None:
        return isinstance(cause, aiohttp.ClientConnectorError)
    return answer.status in _REFUSED_STATUSES


def _is_retryable(answer: Answer | None) -> bool:
    if answer is None:
        return True
    said = answer.headers.get("x-should-retry")
    if said in {"true", "false"}:
        return said == "true"
    return answer.status in _RETRIED_STATUSES


def _delay_s(answer: Answer | None, attempt: int) -> float:
    asked = None if answer is None else _retry_after_s(answer.headers)
    if asked is not None and asked <= _LONGEST_RETRY_AFTER_S:
        return asked
    back_off_s = min(_FIRST_BACK_OFF_S * 2.0**attempt, _LONGEST_BACK_OFF_S)
    return back_off_s * random.uniform(0.75, 1.25)  # noqa: S311  # jitter, not a secret


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Read ``retry-after-ms``, or ``retry-after`` in its two forms: seconds and a date."""
    try:
        if milliseconds := headers.get("retry-after-ms"):
            return max(0.0, float(milliseconds) / 1000)
        raw = headers.get("retry-after")
        if raw is None:
            return None
        if raw.replace(".", "", 1).isdigit():
            return float(raw)
        return max(0.0, (parsedate_to_datetime(raw) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _error_of(answer: Answer) -> ScoreError:
    fault = _parse_fault(answer.body)
    message = fault.detail or fault.message or fault.title or f"the service said {answer.status}"
    error = create_error(
        fault.code,
        message,
        status=answer.status,
        param=fault.param,
        retry_after_s=_retry_after_s(answer.headers),
    )
    request_id = fault.request_id or answer.headers.get("x-request-id")
    if request_id:
        error.add_note(f"request id: {request_id}")
    return error


def _parse_fault(body: bytes) -> _Fault:
    kinds: tuple[Any, ...] = (_FamilyFault, _Fault)
    for kind in kinds:
        try:
            parsed = msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError:
            continue
        return parsed.error if isinstance(parsed, _FamilyFault) else parsed
    return _Fault()
