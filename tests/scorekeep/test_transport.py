"""Requests are repeated when that may help, and answers become the errors of one tree."""

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from contract.errors import (
    ConflictError,
    ForbiddenError,
    IllegalTransitionError,
    InvalidRequestError,
    JobNotFoundError,
    NoCapacityError,
    OverloadedError,
    ScoreError,
    StoreUnavailableError,
    UnavailableError,
)
from scorekeep import AsyncClient, transport
from scorekeep.bulk import BulkClient
from scorekeep.transport import create_error
from tests.scorekeep.scripted import JOB_ID, Script, job, problem


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client would have slept."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return slept


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_passing_failure_is_tried_again(
    client: AsyncClient, script: Script, status: int
) -> None:
    """What a repetition may cure never reaches the caller."""
    script.answer(b"<html>a proxy</html>", status=status)
    script.answer(job("succeeded"))

    found = await client.get(JOB_ID)

    assert found.id == JOB_ID
    assert len(script.calls) == 2


async def test_a_lost_connection_is_tried_again(client: AsyncClient, script: Script) -> None:
    """A connection that ends without an answer is no reason to give up."""
    script.hang_up()
    script.answer(job("succeeded"))

    assert (await client.get(JOB_ID)).id == JOB_ID


@pytest.mark.parametrize("status", [None, 500, 502, 504])
@pytest.mark.usefixtures("naps")
async def test_what_may_be_done_is_not_done_twice(script: Script, status: int | None) -> None:
    """An act on a bulk has no key: where it may have been done, only its caller can tell."""
    script.hang_up() if status is None else script.answer(b"a proxy", status=status)
    async with BulkClient(script.url) as bulks:
        with pytest.raises(ScoreError):
            await bulks.act("blk_1", "retry")

    assert [call.path for call in script.calls] == ["/v1/bulks/blk_1/retry"]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.usefixtures("naps")
async def test_what_was_refused_is_tried_again(script: Script, status: int) -> None:
    """Without a key too, where the service said that it did not begin."""
    script.answer(problem("no_capacity", status), status=status)
    script.answer(problem("conflict", 409), status=409)
    async with BulkClient(script.url) as bulks:
        with pytest.raises(ConflictError):
            await bulks.act("blk_1", "retry")

    assert len(script.calls) == 2


async def test_retries_end(client: AsyncClient, script: Script) -> None:
    """After max_retries repetitions the last answer is the caller's."""
    for _ in range(3):
        script.answer(problem("store_unavailable", 503), status=503)

    with pytest.raises(StoreUnavailableError, match="store_unavailable!"):
        await client.get(JOB_ID)
    assert len(script.calls) == 3


@pytest.mark.parametrize(
    ("headers", "expected_s"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After-Ms": "1500", "Retry-After": "9"}, 1.5),
        ({"Retry-After": "0.25"}, 0.25),
        ({"Retry-After": format_datetime(datetime.now(UTC) - timedelta(hours=1))}, 0.0),
    ],
)
async def test_the_service_says_when(
    client: AsyncClient,
    script: Script,
    naps: list[float],
    headers: dict[str, str],
    expected_s: float,
) -> None:
    """Retry-After in each of its forms sets the pause; the finer form wins."""
    script.answer(problem("overloaded", 429), status=429, headers=headers)
    script.answer(job())

    await client.get(JOB_ID)

    assert naps == [expected_s]


@pytest.mark.parametrize("word", ["soon", "3600", "Mon, 99 Foo"])
async def test_an_odd_retry_after_is_not_obeyed(
    client: AsyncClient, script: Script, naps: list[float], word: str
) -> None:
    """A word that is no time, or an hour, gives way to our own back-off."""
    script.answer(problem("no_capacity", 503), status=503, headers={"Retry-After": word})
    script.answer(job())

    await client.get(JOB_ID)

    assert naps == [0.0]


async def test_a_dated_retry_after_is_a_pause(
    client: AsyncClient, script: Script, naps: list[float]
) -> None:
    """A date in the future is waited for."""
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=60))
    script.answer(problem("no_capacity", 503), status=503, headers={"Retry-After": later})
    script.answer(job())

    await client.get(JOB_ID)

    assert 50 < naps[0] <= 60


async def test_the_service_may_forbid_and_ask_for_a_retry(
    client: AsyncClient, script: Script
) -> None:
    """x-should-retry beats the status, both ways."""
    script.answer(problem("conflict", 409), status=409, headers={"x-should-retry": "true"})
    script.answer(problem("no_capacity", 503), status=503, headers={"x-should-retry": "false"})

    with pytest.raises(NoCapacityError):
        await client.get(JOB_ID)
    assert len(script.calls) == 2


async def test_an_error_says_where_and_when(client: AsyncClient, script: Script) -> None:
    """Field, pause and request id of a problem document reach the caller."""
    for _ in range(3):
        script.answer(
            problem("overloaded", 429, param="items[3]", request_id="req_1"),
            status=429,
            headers={"Retry-After": "0"},
        )

    with pytest.raises(OverloadedError, match="overloaded!") as caught:
        await client.get(JOB_ID)
    assert (caught.value.param, caught.value.retry_after_s) == ("items[3]", 0.0)
    assert caught.value.__notes__ == ["request id: req_1"]


async def test_the_other_error_form_is_read_too(client: AsyncClient, script: Script) -> None:
    """Compatible routes wrap their errors; the code counts all the same."""
    body = {"error": {"message": "no", "type": "x", "param": "model", "code": "invalid_request"}}
    script.answer(body, status=422)

    with pytest.raises(InvalidRequestError, match="no") as caught:
        await client.get(JOB_ID)
    assert caught.value.param == "model"


async def test_a_bare_status_is_an_error_with_that_status(
    client: AsyncClient, script: Script
) -> None:
    """An answer of somebody else's making still gets the nearest class."""
    script.answer(b"go away", status=403, headers={"X-Request-Id": "req_2"})

    with pytest.raises(ForbiddenError, match="403") as caught:
        await client.get(JOB_ID)
    assert caught.value.__notes__ == ["request id: req_2"]


async def test_nobody_there_is_named() -> None:
    """A service that does not listen is an UnavailableError with its address."""
    async with AsyncClient("http://127.0.0.1:1/", max_retries=0) as client:
        with pytest.raises(UnavailableError, match=r"http://127\.0\.0\.1:1: "):
            await client.get(JOB_ID)


async def test_silence_is_a_time_out(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange takes no longer than timeout_s."""

    async def never(*_arguments: object) -> None:
        raise TimeoutError

    async with AsyncClient(script.url, max_retries=0) as client:
        monkeypatch.setattr(client._transport, "_send_once", never)
        with pytest.raises(UnavailableError, match="no answer in time"):
            await client.get(JOB_ID)


async def test_a_key_travels_as_a_bearer_token(script: Script) -> None:
    """The API key is in Authorization, and nowhere else."""
    script.answer(job())

    async with AsyncClient(script.url, api_key="k1") as client:
        await client.get(JOB_ID)

    assert script.calls[0].headers["Authorization"] == "Bearer k1"


def test_every_code_of_the_tree_has_its_class() -> None:
    """Also those whose constructor takes other arguments; unknown ones fall back on the status."""
    assert type(create_error("illegal_transition", "x")) is IllegalTransitionError
    assert type(create_error("job_not_found", "x")) is JobNotFoundError
    assert type(create_error("of_tomorrow", "x", status=403)) is ForbiddenError
    assert type(create_error("of_tomorrow", "x", status=418)) is ScoreError
    assert create_error("internal", "why").message == "why"


def test_back_off_grows_to_a_limit() -> None:
    """Without a word of the service, pauses double and stay below eight seconds and a quarter."""
    pauses = [transport._delay_s(None, attempt) for attempt in range(12)]

    assert 0.18 < pauses[0] < 0.32
    assert max(pauses) <= 10.0
