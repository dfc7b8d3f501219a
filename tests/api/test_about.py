"""Models, limits, health, readiness, the webhook secret."""

import base64

import msgspec

from api.state import CATALOG
from contract.models import ModelConfig, ModelState, ModelStatus
from tests.api.service import Service


async def test_models_show_what_workers_say(service: Service) -> None:
    """Registered names are there from the start; reports add state, reason and abilities."""
    failed = ModelStatus(name="other", state=ModelState.FAILED, reason="the head is missing")
    await service.report_ready()
    await service.report(failed)

    answer = await service.get("/v1/models")
    models = {model["id"]: model for model in answer.json["data"]}

    assert answer.json["object"] == "list"
    assert list(models) == ["other", "tiny"]
    assert models["tiny"]["state"] == "ready"
    assert models["tiny"]["description"]["labels"] == ["negative", "positive"]
    assert models["other"]["state"] == "failed"
    assert models["other"]["reason"] == "the head is missing"


async def test_the_only_model_needs_no_name(sqlite_service: Service) -> None:
    """With one model served it is taken; with none the message says what to do."""
    await sqlite_service.stop()
    sqlite_service.registry = {}
    await sqlite_service.start()
    none = await sqlite_service.post("/v1/jobs", {"items": ["a"]})
    named = await sqlite_service.post("/v1/jobs", {"items": ["a"], "model": "x"})
    await sqlite_service.stop()

    sqlite_service.registry = {"tiny": ModelConfig(source="x")}
    await sqlite_service.start()
    one = await sqlite_service.post("/v1/jobs", {"items": ["a"]})

    assert none.status == named.status == 404
    assert "start a worker" in none.json["detail"]
    assert one.status == 202
    assert one.json["model"] == "tiny"


async def test_readiness_follows_the_models(service: Service) -> None:
    """503 while nothing can be scored; then 200, and the model that failed is named."""
    before = await service.get("/readyz")
    await service.report_ready()
    await service.report(ModelStatus(name="other", state=ModelState.FAILED, reason="no head"))
    service.app[CATALOG]._read_at = -10.0
    after = await service.get("/readyz")

    assert before.status == 503
    assert before.headers["Retry-After"]
    assert before.json["ready"] is False
    assert before.json["models"] == {"other": "loading", "tiny": "loading"}
    assert after.status == 200
    assert after.json["ready"] is True
    assert after.json["models"] == {"other": "failed", "tiny": "ready"}
    assert after.json["reasons"] == [
        {"part": "model other", "code": "model_load_failed", "detail": "no head"}
    ]


async def test_no_models_at_all_is_a_reason(sqlite_service: Service) -> None:
    """An empty registry without workers is said plainly."""
    await sqlite_service.stop()
    sqlite_service.registry = {}
    await sqlite_service.start()

    answer = await sqlite_service.get("/readyz")

    assert answer.status == 503
    assert [reason["code"] for reason in answer.json["reasons"]] == ["no_model"]


async def test_health_and_limits(sqlite_service: Service) -> None:
    """Liveness asks nobody; every limit has its value."""
    health = await sqlite_service.get("/healthz")
    limits = (await sqlite_service.get("/v1/limits")).json

    assert (health.status, health.json) == (200, {"status": "ok"})
    assert limits["max_items"] == sqlite_service.settings.max_items
    assert limits["max_body_bytes"] == sqlite_service.settings.max_body_bytes
    assert all(value > 0 for value in limits.values())


async def test_the_webhook_secret_stays(service: Service) -> None:
    """The secret is made once, and is what verifiers take."""
    first = (await service.get("/v1/webhooks/default/secret")).json
    second = (await service.get("/v1/webhooks/default/secret")).json

    assert first == second
    assert first["secrets"] == [first["key"]]
    prefix, _, encoded = first["key"].partition("_")
    assert prefix == "whsec"
    assert 24 <= len(base64.b64decode(encoded)) <= 64


async def test_links_are_absolute_where_the_address_is_known(sqlite_service: Service) -> None:
    """``public_url`` is put before every link."""
    await sqlite_service.stop()
    sqlite_service.settings = msgspec.structs.replace(
        sqlite_service.settings, public_url="https://s.example/"
    )
    await sqlite_service.start()

    answer = await sqlite_service.post("/v1/jobs", {"model": "tiny", "items": ["a"]})

    expected = f"https://s.example/v1/jobs/{answer.json['id']}"
    assert answer.headers["Location"] == answer.json["links"]["self"] == expected
