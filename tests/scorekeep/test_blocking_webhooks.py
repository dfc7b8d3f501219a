"""``Client.webhooks``: what AsyncClient's can do, without ``await``."""

import inspect

import pytest

from contract.endpoints import EndpointUpdate
from contract.errors import InvalidRequestError
from scorekeep import Client
from scorekeep.blocking import BlockingWebhooks
from scorekeep.webhooks import Webhooks
from tests.scorekeep.scripted import JOB_ID, Script
from tests.scorekeep.test_webhook_commands import (
    BULK_ID,
    DELIVERY_ID,
    ENDPOINT_ID,
    delivery,
    endpoint,
)

SECRETS = ["whsec_new", "whsec_old"]


def methods_of(kind: type) -> dict[str, list[str]]:
    """Return the public methods with the names of their arguments."""
    return {
        name: list(inspect.signature(function).parameters)
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_it_has_every_method_with_the_same_arguments() -> None:
    """None is missing, none is spelled otherwise."""
    assert methods_of(BlockingWebhooks) == methods_of(Webhooks)


def test_endpoints_are_made_changed_and_removed(script: Script) -> None:
    """Each method reaches its route and returns the plain result."""
    path = f"/v1/webhook_endpoints/{ENDPOINT_ID}"
    with Client(script.url) as client:
        webhooks = client.webhooks
        script.answer(endpoint(secret="whsec_x"), status=201)  # noqa: S106
        made = webhooks.create("https://example.org/hook", events=["batch.completed"])
        script.answer({"data": [endpoint()]})
        assert [each.id for each in webhooks.list()] == [ENDPOINT_ID]
        script.answer(endpoint())
        assert webhooks.get(ENDPOINT_ID).id == ENDPOINT_ID
        script.answer(endpoint(description="new"))
        changed = webhooks.update(ENDPOINT_ID, EndpointUpdate(description="new"))
        script.answer(endpoint(secret="whsec_y"))  # noqa: S106
        assert webhooks.rotate(ENDPOINT_ID).secret == "whsec_y"  # noqa: S105
        script.answer(endpoint(state="disabled"))
        assert webhooks.disable(ENDPOINT_ID, reason="r").state == "disabled"
        script.answer(endpoint())
        assert webhooks.enable(ENDPOINT_ID).state == "enabled"
        script.answer({"event": "evt_1", "delivery": DELIVERY_ID}, status=202)
        assert webhooks.test(ENDPOINT_ID).delivery == DELIVERY_ID
        script.answer(b"", status=204)
        webhooks.delete(ENDPOINT_ID)

    assert (made.secret, changed.description) == ("whsec_x", "new")
    assert [(each.method, each.path) for each in script.calls][3:] == [
        ("PATCH", path),
        ("POST", f"{path}/rotate"),
        ("POST", f"{path}/disable"),
        ("POST", f"{path}/enable"),
        ("POST", f"{path}/test"),
        ("DELETE", path),
    ]
    assert script.calls[0].json["events"] == ["batch.completed"]


def test_the_log_is_read_and_sent_again(script: Script) -> None:
    """Of a job, a bulk, an endpoint or one delivery; one or all of a time."""
    with Client(script.url) as client:
        webhooks = client.webhooks
        for _ in range(3):
            script.answer({"data": [delivery()]})
        of_job = webhooks.deliveries(job=JOB_ID)
        of_bulk = webhooks.deliveries(bulk=BULK_ID)
        of_endpoint = webhooks.deliveries(endpoint=ENDPOINT_ID)
        for found in (of_job, of_bulk, of_endpoint):
            assert [each.id for each in found] == [DELIVERY_ID]
        script.answer(delivery())
        assert webhooks.delivery(DELIVERY_ID).state == "dead"
        script.answer(delivery(state="pending"), status=202)
        assert webhooks.redeliver(DELIVERY_ID).state == "pending"
        script.answer({"count": 3}, status=202)
        assert webhooks.redeliver_range("2026-11-30T00:00:00Z", endpoint=ENDPOINT_ID) == 3
        script.answer({"secrets": SECRETS})
        assert webhooks.secrets() == SECRETS
        script.answer({"secrets": SECRETS})
        assert webhooks.rotate_default() == SECRETS
        with pytest.raises(InvalidRequestError, match="one job, one bulk or one endpoint"):
            webhooks.deliveries()

    assert [each.path for each in script.calls][:3] == [
        f"/v1/jobs/{JOB_ID}/deliveries",
        f"/v1/bulks/{BULK_ID}/deliveries",
        f"/v1/webhook_endpoints/{ENDPOINT_ID}/deliveries",
    ]
    assert script.answers == []
