"""Signatures are those of Standard Webhooks 1.0, as independent libraries understand them."""

import base64
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from replicate.webhook import Webhooks, WebhookSigningSecret, WebhookValidationError
from standardwebhooks.webhooks import Webhook

from contract.errors import InvalidRequestError, SignatureError
from contract.webhooks import (
    EVENT_OF_STATE,
    SUBSCRIBABLE,
    Event,
    EventType,
    check_events,
    create_secret,
    sign,
    verify,
)

EVENT = Event(
    type=EventType.JOB_SUCCEEDED, timestamp="2026-11-30T10:00:00Z", sequence=3, data={"id": "job_1"}
)
BODY = msgspec.json.encode(EVENT)
NOW = int(datetime.now(UTC).timestamp())


def _headers(*secrets: str, body: bytes = BODY, at: int | None = None) -> dict[str, str]:
    at = int(datetime.now(UTC).timestamp()) if at is None else at
    return {
        "Webhook-Id": "evt_1",
        "webhook-timestamp": str(at),
        "webhook-signature": sign(secrets, event_id="evt_1", timestamp=at, body=body),
    }


def test_the_specification_s_own_example() -> None:
    """The vector printed by the Standard Webhooks reference libraries is reproduced."""
    header = sign(
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"],
        event_id="msg_p5jXN8AQM9LWM0D4loKWxJek",
        timestamp=1614265330,
        body=b'{"test": 2432232314}',
    )

    assert header == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_standardwebhooks_accepts_ours() -> None:
    """The reference library verifies what we sign."""
    secret = create_secret()

    assert Webhook(secret).verify(BODY, _headers(secret))["type"] == "job.succeeded"


def test_the_openai_client_accepts_ours() -> None:
    """``webhooks.unwrap`` of the stock client verifies and reads what we sign."""
    secret = create_secret()
    client = OpenAI(api_key="-", webhook_secret=secret)

    unwrapped: Any = client.webhooks.unwrap(BODY.decode(), _headers(secret))
    client.close()

    assert unwrapped.type == "job.succeeded"
    assert unwrapped.data == {"id": "job_1"} or unwrapped.data.id == "job_1"


def test_replicate_s_validator_accepts_ours() -> None:
    """``Webhooks.validate`` of the stock client verifies what we sign, while rotating too."""
    old, new = create_secret(), create_secret()
    headers = _headers(old, new)

    for secret in (old, new):
        key = WebhookSigningSecret(key=secret)
        Webhooks.validate(headers=headers, body=BODY.decode(), secret=key, tolerance=3600)
    with pytest.raises(WebhookValidationError):
        Webhooks.validate(headers=headers, body="x", secret=WebhookSigningSecret(key=old))


def test_either_secret_verifies_while_rotating() -> None:
    """With two valid secrets the header holds two signatures, and each suffices."""
    old, new = create_secret(), create_secret()
    headers = _headers(old, new)

    assert verify(BODY, headers, old) == verify(BODY, headers, new) == EVENT


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"webhook-timestamp": str(NOW - 301)}, "from now"),
        ({"webhook-timestamp": str(NOW + 301)}, "from now"),
        ({"webhook-timestamp": "soon"}, "malformed"),
        ({"webhook-timestamp": ""}, "missing"),
        ({"webhook-timestamp": str(NOW - 1)}, "no signature"),
        ({"Webhook-Id": "evt_2"}, "no signature"),
        ({"webhook-signature": "v1,é"}, "no signature"),
        ({"webhook-signature": ""}, "no signature"),
    ],
    ids=range(8),
)
def test_anything_changed_is_refused(changed: dict[str, str], message: str) -> None:
    """A stale, moved, renamed or unsigned event does not verify."""
    secret = create_secret()

    with pytest.raises(SignatureError, match=message):
        verify(BODY, _headers(secret, at=NOW) | changed, secret, now=NOW)


@pytest.mark.parametrize("name", ["Webhook-Id", "webhook-timestamp", "webhook-signature"])
def test_a_missing_header_is_refused(name: str) -> None:
    """All three headers are needed."""
    secret = create_secret()
    headers = _headers(secret)
    del headers[name]

    with pytest.raises(SignatureError, match="missing"):
        verify(BODY, headers, secret)


def test_a_signed_body_that_is_no_event_is_refused() -> None:
    """A good signature over something else is still not an event."""
    secret = create_secret()

    with pytest.raises(SignatureError, match="not an event"):
        verify(b"[]", _headers(secret, body=b"[]"), secret)


def test_a_secret_that_is_not_base64_is_refused() -> None:
    """A mistyped secret is an error of ours, not a stack trace."""
    with pytest.raises(SignatureError, match="base64"):
        sign(["whsec_ä"], event_id="e", timestamp=1, body=b"")


@given(st.binary(max_size=80), st.integers(0, 2**31), st.binary(min_size=24, max_size=64))
def test_one_changed_byte_is_refused(body: bytes, at: int, key: bytes) -> None:
    """The body is bound to its signature, whatever it is."""
    secret = "whsec_" + base64.b64encode(key).decode()
    headers = _headers(secret, body=body, at=at)

    with pytest.raises(SignatureError, match="no signature"):
        verify(body + b" ", headers, secret, now=at)


def test_secrets_are_long_and_never_the_same() -> None:
    """A secret holds 32 random bytes."""
    first, second = create_secret(), create_secret()

    assert first != second
    assert len(base64.b64decode(first.removeprefix("whsec_"))) == 32


def test_every_terminal_state_has_its_event() -> None:
    """A job announces its end, whichever end it is."""
    assert {kind.removeprefix("job.") for kind in EVENT_OF_STATE.values()} == set(EVENT_OF_STATE)


@pytest.mark.parametrize(
    ("names", "param"),
    [
        ([], "events"),
        (["job.succeeded", "x"], "events[1]"),
        (["webhook.test"], "events[0]"),
        (["job.failed", "job.failed"], "events[1]"),
    ],
)
def test_events_that_nobody_can_ask_for_are_refused(names: list[str], param: str) -> None:
    """By their place in the list; the others pass."""
    with pytest.raises(InvalidRequestError) as caught:
        check_events(names, param="events")

    assert caught.value.param == param
    check_events([str(kind) for kind in SUBSCRIBABLE], param="events")
