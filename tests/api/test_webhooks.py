"""Endpoints, the log of deliveries and sending again, as clients use them."""

from typing import Any

import pytest

from contract.moments import render_moment
from storage.deliveries import AttemptReport, DeliveryAttempt, claim_deliveries, record_attempts
from tests.api.service import Service

URL = "https://example.com/hook"
ENDPOINTS = "/v1/webhook_endpoints"
UNKNOWN = "whe_" + "0" * 32


async def register(service: Service, **fields: Any) -> dict[str, Any]:
    """Register an endpoint."""
    answer = await service.post(ENDPOINTS, {"url": URL, **fields})
    assert answer.status == 201, answer.body
    made: dict[str, Any] = answer.json
    return made


async def fail_all(service: Service) -> None:
    """Attempt everything that is due, in vain and for the last time."""
    async with service.database.transaction() as tx:
        due = (await claim_deliveries(tx, worker="w", limit=99, lease_s=30, places=99)).due
        attempt = DeliveryAttempt(latency_s=0.25, status=500, answer="no")
        reports = [
            AttemptReport(delivery=each, attempt=attempt, delivered=False, reason="it failed")
            for each in due
        ]
        await record_attempts(tx, reports, hopeless_s=1e9)


async def test_a_secret_is_shown_once(service: Service) -> None:
    """In the answer that makes it; afterwards nowhere."""
    made = await register(service, events=["job.failed"], description="mine")
    answers = [await service.get(ENDPOINTS), await service.get(f"{ENDPOINTS}/{made['id']}")]
    changed = await service.request("PATCH", f"{ENDPOINTS}/{made['id']}", json={"events": None})

    assert made["secret"].startswith("whsec_")
    assert (made["state"], made["events"], made["description"]) == (
        "enabled",
        ["job.failed"],
        "mine",
    )
    assert all(made["secret"].encode() not in answer.body for answer in [*answers, changed])
    assert answers[1].json == {name: made[name] for name in made if name != "secret"}
    assert answers[0].json["data"] == [answers[1].json]
    assert (changed.json["events"], changed.json["url"]) == (None, URL)


async def test_the_way_of_an_endpoint(service: Service) -> None:
    """Changed, rotated, disabled with a reason, enabled, deleted."""
    made = await register(service)
    path = f"{ENDPOINTS}/{made['id']}"

    changed = await service.request(
        "PATCH", path, json={"url": "https://b.example/", "description": "b"}
    )
    rotated = await service.post(f"{path}/rotate", {})
    disabled = await service.post(f"{path}/disable", {"reason": "holidays"})
    refused = await service.request("POST", f"{path}/test")
    enabled = await service.request("POST", f"{path}/enable")
    again = await service.request("POST", f"{path}/disable")
    deleted = await service.request("DELETE", path)

    assert (changed.json["url"], changed.json["description"]) == ("https://b.example/", "b")
    assert rotated.json["secret"] != made["secret"]
    assert rotated.json["old_secret_until"] > rotated.json["updated_at"]
    assert (disabled.json["state"], disabled.json["disabled_reason"]) == ("disabled", "holidays")
    assert (refused.status, refused.json["code"]) == (409, "conflict")
    assert enabled.json["state"] == "enabled"
    assert again.json["disabled_reason"] == "disabled by its owner"
    assert deleted.status == 204
    assert [(await service.get(path)).status, (await service.get(f"{path}/deliveries")).status] == [
        404,
        404,
    ]


async def test_the_default_secret_rotates(service: Service) -> None:
    """Both sign for a day, the newest first; the same key rotates once."""
    first = (await service.get("/v1/webhooks/default/secret")).json
    rotated = [
        (await service.post("/v1/webhooks/default/rotate", {}, Idempotency_Key="k")).json
        for _ in range(2)
    ]

    assert rotated[0] == rotated[1] == (await service.get("/v1/webhooks/default/secret")).json
    assert rotated[0]["secrets"] == [rotated[0]["key"], first["key"]]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"url": "http://example.com/"}, "address_refused", "url"),
        ({"url": "https://127.0.0.1/"}, "address_refused", "url"),
        ({"url": "https://example.com:6379/"}, "address_refused", "url"),
        ({"url": "https://\ud800.com/"}, "malformed_request", None),
        ({"events": ["job.done"]}, "invalid_request", "events[0]"),
        ({"events": []}, "invalid_request", "events"),
        ({"description": "\0"}, "invalid_request", "description"),
        ({"description": "x" * 513}, "invalid_request", "description"),
        ({"secret": "mine"}, "invalid_request", "secret"),
    ],
)
async def test_what_cannot_be_registered_names_its_field(
    sqlite_service: Service, fields: dict[str, Any], code: str, param: str | None
) -> None:
    """When it is made and when it is changed; nothing is stored."""
    made = await sqlite_service.post(ENDPOINTS, {"url": URL, **fields})
    kept = await register(sqlite_service)
    changed = await sqlite_service.request("PATCH", f"{ENDPOINTS}/{kept['id']}", json=fields)

    for answer in (made, changed):
        assert answer.json["code"] in {code, "address_refused", "invalid_request"}
        assert param is None or answer.json["param"] == param
        assert answer.status in {400, 422}
    assert len((await sqlite_service.get(ENDPOINTS)).json["data"]) == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"{ENDPOINTS}/x"),
        ("GET", f"{ENDPOINTS}/{UNKNOWN}"),
        ("PATCH", f"{ENDPOINTS}/{UNKNOWN}"),
        ("DELETE", f"{ENDPOINTS}/{UNKNOWN}"),
        ("POST", f"{ENDPOINTS}/{UNKNOWN}/rotate"),
        ("POST", f"{ENDPOINTS}/{UNKNOWN}/disable"),
        ("POST", f"{ENDPOINTS}/{UNKNOWN}/enable"),
        ("POST", f"{ENDPOINTS}/{UNKNOWN}/test"),
        ("GET", f"{ENDPOINTS}/{UNKNOWN}/deliveries"),
        ("GET", "/v1/deliveries/dlv_x"),
        ("GET", f"/v1/deliveries/dlv_{'0' * 32}"),
        ("POST", f"/v1/deliveries/dlv_{'0' * 32}/redeliver"),
        ("GET", f"/v1/jobs/job_{'0' * 32}/deliveries"),
    ],
)
async def test_what_is_not_there_is_404(sqlite_service: Service, method: str, path: str) -> None:
    """An unknown id, or one that cannot be."""
    answer = await sqlite_service.request(method, path, json={})

    assert answer.status == 404


async def test_an_idempotency_key_makes_one(service: Service) -> None:
    """The repetition has the same endpoint and its secret, the same test event, one rotation."""
    body, key = {"url": URL}, {"Idempotency_Key": "one"}
    first, second = [await service.post(ENDPOINTS, body, **key) for _ in range(2)]
    other = await service.post(ENDPOINTS, {"url": URL, "description": "x"}, **key)
    path = f"{ENDPOINTS}/{first.json['id']}"
    rotated = [(await service.post(f"{path}/rotate", {}, **key)).json for _ in range(2)]
    tests = [(await service.post(f"{path}/test", {}, **key)).json]
    await service.post(f"{path}/disable", {})
    tests.append((await service.post(f"{path}/test", {}, **key)).json)

    assert first.json == second.json
    assert second.headers["Idempotent-Replayed"] == "true"
    assert (other.status, other.json["code"]) == (422, "idempotency_key_reused")
    assert rotated[0]["secret"] == rotated[1]["secret"]
    assert tests[0] == tests[1]
    assert len((await service.get(f"{path}/deliveries")).json["data"]) == 1


async def test_a_late_repetition_changes_nothing(service: Service) -> None:
    """A disabling that comes again, after the endpoint was enabled, is answered and not done."""
    made = await register(service)
    path = f"{ENDPOINTS}/{made['id']}"

    answers = [
        await service.post(f"{path}/{action}", {}, Idempotency_Key=key)
        for action, key in (("disable", "d"), ("enable", "e"), ("disable", "d"), ("enable", "e"))
    ]

    assert [each.status for each in answers] == [200] * 4
    assert [each.json["disabled_reason"] is None for each in answers] == [False, True, True, True]
    assert ["Idempotent-Replayed" in each.headers for each in answers] == [False] * 2 + [True] * 2


async def test_the_log_of_a_job_and_of_an_endpoint(service: Service) -> None:
    """Every delivery with its attempts, newest first, by pages and by state."""
    made = await register(service)
    job = await service.submit_and_finish(webhook=URL, webhook_events=["job.succeeded"])
    await service.submit_and_finish()
    await fail_all(service)

    of_job = (await service.get(f"/v1/jobs/{job}/deliveries")).json
    path = f"{ENDPOINTS}/{made['id']}/deliveries"
    page = (await service.get(path, params={"limit": "1", "state": "dead"})).json
    rest = (await service.get(path, params={"limit": "1", "cursor": page["next_cursor"]})).json
    one = (await service.get(f"/v1/deliveries/{rest['data'][0]['id']}")).json

    assert [each["endpoint"] for each in of_job["data"]] == [made["id"], None]
    assert (of_job["data"][1]["state"], of_job["data"][1]["reason"]) == ("dead", "it failed")
    assert of_job["data"][1]["attempts"][0]["status"] == 500
    assert of_job["data"][1]["attempts"][0]["answer"] == "no"
    assert (page["has_more"], rest["has_more"]) == (True, False)
    assert page["data"][0]["id"] > rest["data"][0]["id"]
    assert one == rest["data"][0]
    assert (await service.get(path, params={"state": "delivered"})).json["data"] == []
    assert (await service.get(path, params={"state": "lost"})).status == 422


async def test_sending_again(service: Service) -> None:
    """One, as often as it is asked for with new keys; and all of a time."""
    made = await register(service)
    job = await service.submit_and_finish(webhook=URL)
    await fail_all(service)
    found = (await service.get(f"/v1/jobs/{job}/deliveries")).json["data"]
    path = f"/v1/deliveries/{found[0]['id']}/redeliver"
    answers = [await service.post(path, {}, Idempotency_Key="k") for _ in range(2)]
    since = render_moment(0)

    ranged = [
        (await service.post("/v1/deliveries/redeliver", {"since": since, **more})).json["count"]
        for more in ({"until": since}, {"endpoint": made["id"]}, {}, {"state": "any"})
    ]

    assert [answer.status for answer in answers] == [202, 202]
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    assert answers[0].json["state"] == "pending"
    assert answers[0].json["event"] == found[0]["event"]
    assert ranged == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"since": "yesterday"}, "since"),
        ({"since": "2026-01-01T00:00:00"}, "since"),
        ({"since": "2026-01-01T00:00:00Z", "until": "x"}, "until"),
        ({"since": "2026-01-01T00:00:00Z", "state": "pending"}, None),
    ],
)
async def test_a_range_that_says_nothing_is_refused(
    sqlite_service: Service, body: dict[str, Any], param: str | None
) -> None:
    """With the field at fault; an endpoint that is not there is 404."""
    answer = await sqlite_service.post("/v1/deliveries/redeliver", body)
    unknown = {"since": "2026-01-01T00:00:00Z", "endpoint": UNKNOWN}

    assert answer.status == 422
    assert param is None or answer.json["param"] == param
    assert (await sqlite_service.post("/v1/deliveries/redeliver", unknown)).status == 404
