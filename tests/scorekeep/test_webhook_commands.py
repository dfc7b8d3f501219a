"""``scorekeep webhooks`` and ``scorekeep listen``: what they ask the service, what they print."""

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from contract.webhooks import Event, EventType, create_secret, sign
from scorekeep import listening as module
from scorekeep import transport
from scorekeep.cli import main
from scorekeep.listening import Listener, listening, run_listen
from tests.scorekeep.scripted import JOB_ID, Script, problem

ENDPOINT_ID = "whe_0123456789abcdef0123456789abcdef"
DELIVERY_ID = "dlv_0123456789abcdef0123456789abcdef"
BULK_ID = "blk_0123456789abcdef0123456789abcdef"
EVENT = Event(
    type=EventType.JOB_FAILED,
    timestamp="2026-11-30T10:00:00Z",
    sequence=3,
    data={"id": JOB_ID, "state": "failed", "model": "m", "metadata": {"secret": "payload"}},
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries take no time, tables are wide, and no setting is left over."""
    monkeypatch.setattr(transport, "_FIRST_BACK_OFF_S", 0.0)
    monkeypatch.setenv("COLUMNS", "220")
    for name in [name for name in os.environ if name.startswith("SCOREKEEP_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def url(script: Script, monkeypatch: pytest.MonkeyPatch) -> str:
    """The scripted service is the one that the settings name."""
    monkeypatch.setenv("SCOREKEEP_PUBLIC_URL", script.url)
    return script.url


def endpoint(**fields: Any) -> dict[str, Any]:
    """An endpoint as the API shows it."""
    return {
        "id": ENDPOINT_ID,
        "object": "webhook_endpoint",
        "url": "https://example.org/hook",
        "description": "",
        "events": None,
        "state": "enabled",
        "created_at": "2026-11-30T00:00:00Z",
        "updated_at": "2026-11-30T00:00:00Z",
        **fields,
    }


def delivery(**fields: Any) -> dict[str, Any]:
    """A delivery as the API shows it."""
    attempt = {"attempt": 1, "at": "2026-11-30T00:00:00Z", "latency_s": 0.5, "status": 500}
    return {
        "id": DELIVERY_ID,
        "event": "evt_1",
        "type": "job.failed",
        "job": JOB_ID,
        "endpoint": None,
        "url": "https://example.org/hook",
        "state": "dead",
        "created_at": "2026-11-30T00:00:00Z",
        "reason": "every attempt failed",
        "attempts": [attempt, {**attempt, "attempt": 2, "status": None, "error": "reset"}],
        **fields,
    }


@pytest.mark.parametrize(
    ("words", "method", "path", "body"),
    [
        (
            ["create", "https://a.org/", "--event", "job.failed", "--description", "d"],
            "POST",
            "",
            {"url": "https://a.org/", "events": ["job.failed"], "description": "d"},
        ),
        (["show", ENDPOINT_ID], "GET", f"/{ENDPOINT_ID}", None),
        (
            ["update", ENDPOINT_ID, "--target", "https://b.org/", "--all-events"],
            "PATCH",
            f"/{ENDPOINT_ID}",
            {"url": "https://b.org/", "events": None},
        ),
        (["rotate", ENDPOINT_ID], "POST", f"/{ENDPOINT_ID}/rotate", None),
        (
            ["disable", ENDPOINT_ID, "--reason", "r"],
            "POST",
            f"/{ENDPOINT_ID}/disable",
            {"reason": "r"},
        ),
        (["disable", ENDPOINT_ID], "POST", f"/{ENDPOINT_ID}/disable", None),
        (["enable", ENDPOINT_ID], "POST", f"/{ENDPOINT_ID}/enable", None),
    ],
)
def test_what_is_asked_of_an_endpoint(
    script: Script,
    url: str,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    method: str,
    path: str,
    body: dict[str, Any] | None,
) -> None:
    """One request each; a secret is printed where there is one, as a line and as JSON."""
    made = endpoint(secret="whsec_x")  # noqa: S106
    for _ in range(2):
        script.answer(made)

    assert main(["webhooks", *words]) == 0
    table = capsys.readouterr().out
    assert main(["webhooks", *words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)

    call = script.calls[0]
    assert (call.method, call.path) == (method, f"/v1/webhook_endpoints{path}")
    assert (json.loads(call.body) if call.body else None) == body
    assert ("secret  whsec_x" in table) is (words[0] in {"create", "rotate"})
    assert printed[0]["secret"] == "whsec_x"  # noqa: S105


def test_endpoints_are_listed_with_what_is_wrong(
    script: Script, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which are disabled and why, which fail since when."""
    rows = [
        endpoint(events=["job.failed"], failing_since="2026-11-30T01:00:00Z"),
        endpoint(state="disabled", disabled_reason="holidays"),
    ]
    script.answer({"data": rows})

    assert main(["webhooks", "list"]) == 0
    printed = capsys.readouterr().out
    assert "failing since 2026-11-30T01:00:00Z" in printed
    assert "holidays" in printed
    assert "job.failed" in printed


def test_delete_test_and_the_default_secret(
    script: Script, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each says what there is to say."""
    script.answer(b"", status=204)
    assert main(["webhooks", "delete", ENDPOINT_ID]) == 0
    for words in (["test", ENDPOINT_ID], ["test", ENDPOINT_ID, "--json"]):
        script.answer({"event": "evt_1", "delivery": DELIVERY_ID}, status=202)
        assert main(["webhooks", *words]) == 0
    for words in (["rotate", "default"], ["rotate", "default", "--json"]):
        script.answer({"key": "whsec_n", "secrets": ["whsec_n", "whsec_o"]})
        assert main(["webhooks", *words]) == 0

    printed = capsys.readouterr().out
    assert f"event evt_1, delivery {DELIVERY_ID}" in printed
    assert "secret  whsec_n" in printed
    assert script.calls[-1].path == "/v1/webhooks/default/rotate"


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (JOB_ID, f"/v1/jobs/{JOB_ID}/deliveries"),
        (ENDPOINT_ID, f"/v1/webhook_endpoints/{ENDPOINT_ID}/deliveries"),
        (BULK_ID, f"/v1/bulks/{BULK_ID}/deliveries"),
        (DELIVERY_ID, f"/v1/deliveries/{DELIVERY_ID}"),
    ],
)
def test_the_log(
    script: Script, url: str, capsys: pytest.CaptureFixture[str], target: str, path: str
) -> None:
    """Of a job, an endpoint, or one delivery: every attempt's status, and what went wrong."""
    body = delivery()
    script.answer(body if target == DELIVERY_ID else {"data": [body, delivery(attempts=[])]})

    assert main(["webhooks", "log", target, "--state", "dead"]) == 0
    printed = capsys.readouterr().out
    assert script.calls[0].path == path
    assert "500 -" in printed
    assert "every attempt failed" in printed


def test_sending_again(script: Script, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One delivery, or a time; neither and both are refused."""
    script.answer(delivery(state="pending", reason=None), status=202)
    assert main(["webhooks", "redeliver", DELIVERY_ID]) == 0
    since = ["--since", "2026-11-30T00:00:00Z", "--endpoint", ENDPOINT_ID]
    for more in ([], ["--json"]):
        script.answer({"count": 7}, status=202)
        assert main(["webhooks", "redeliver", *since, *more]) == 0
    assert main(["webhooks", "redeliver"]) == 2
    assert main(["webhooks", "redeliver", DELIVERY_ID, *since]) == 2

    assert script.calls[1].json == {
        "since": "2026-11-30T00:00:00Z",
        "until": None,
        "endpoint": ENDPOINT_ID,
        "state": "dead",
    }
    assert "7 sent again" in capsys.readouterr().out


async def deliver(url: str, secret: str, body: bytes | None = None) -> int:
    """Send the event as the service does."""
    raw, now = body or msgspec.json.encode(EVENT), int(time.time())
    headers = {
        "webhook-id": "evt_1",
        "webhook-timestamp": str(now),
        "webhook-signature": sign([secret], event_id="evt_1", timestamp=now, body=raw),
    }
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, data=raw, headers=headers) as answer,
    ):
        return answer.status


async def test_a_listener_verifies_prints_and_answers() -> None:
    """Any of its secrets will do; what does not verify is refused and not passed on."""
    secrets, lines = [create_secret(), create_secret()], list[str]()
    listener = Listener(secrets, lines.append)
    async with listening(listener, 0) as url:
        statuses = [await deliver(url, secret) for secret in (*secrets, create_secret())]

    assert statuses == [204, 204, 400]
    assert [event.sequence for event in listener.events] == [3, 3]
    assert "job.failed evt_1" in lines[0]
    assert JOB_ID in lines[0]
    assert "payload" not in "".join(lines)
    assert lines[2].startswith("refused evt_1: no signature")


async def test_a_listener_passes_on_and_answers_what_it_heard(script: Script) -> None:
    """The same bytes with the same signature; a receiver that is not there is a 502."""
    secret, lines = create_secret(), list[str]()
    script.answer({}, status=503)
    listener = Listener([secret], lines.append, f"{script.url}/hook")
    async with listening(listener, 0) as url:
        status = await deliver(url, secret)
        script.hang_up()
        lost = await deliver(url, secret)

    assert (status, lost) == (503, 502)
    assert script.calls[0].body == msgspec.json.encode(EVENT)
    assert {"webhook-id", "webhook-signature"} <= {n.lower() for n in script.calls[0].headers}
    assert "503 from" in lines[0]
    assert "no answer from" in lines[1]


@contextmanager
def stopped_by(
    signal_number: int, monkeypatch: pytest.MonkeyPatch, line: str
) -> Iterator[list[str]]:
    """Send this process a signal as soon as ``listen`` printed ``line``."""
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        if text.startswith(line):
            os.kill(os.getpid(), signal_number)

    monkeypatch.setattr(module, "_say", say)
    yield lines


def test_listen_registers_itself_while_it_runs(
    script: Script, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the events that were asked for; it is gone afterwards."""
    script.answer({"key": "whsec_d", "secrets": ["whsec_d"]})
    script.answer(endpoint(secret="whsec_e"), status=201)  # noqa: S106
    script.answer(b"", status=204)
    with stopped_by(signal.SIGINT, monkeypatch, "registered as") as lines:
        code = main(["listen", "--event", "job.failed"])

    assert code == 0
    assert script.calls[1].json["events"] == ["job.failed"]
    assert script.calls[1].json["url"] in lines[0]
    assert (script.calls[2].method, script.calls[2].path) == (
        "DELETE",
        f"/v1/webhook_endpoints/{ENDPOINT_ID}",
    )


def test_listen_without_registering(
    script: Script, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a secret of one's own it asks the service for nothing."""
    with stopped_by(signal.SIGTERM, monkeypatch, "listening on"):
        options = argparse.Namespace(
            secrets=[create_secret()], forward=None, port=0, no_register=True, events=None
        )
        code = run_listen(options, url)

    assert (code, script.calls) == (0, [])


def test_a_service_that_may_not_call_here_says_what_to_do(
    script: Script, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal, and the two settings that lift it."""
    script.answer({"key": "whsec_d", "secrets": ["whsec_d"]})
    script.answer(problem("address_refused", 422, param="url"), status=422)

    assert main(["listen"]) == 1
    assert "SCOREKEEP_WEBHOOK_ALLOWED_NETWORKS" in capsys.readouterr().err
