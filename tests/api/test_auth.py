"""Keys on every route: who may do what, and how a refusal looks."""

import asyncio
from typing import Any

import aiohttp
import pytest

from api.auth import KEYRING, OPEN_PATHS, Keyring, scope_of
from contract.errors import UnauthorizedError
from contract.keys import Scope, create_key
from storage import keys
from storage.database import Database
from tests.api.service import Service
from tests.api.tenants import Tenant, make_tenant


def _routes(service: Service) -> list[tuple[str, str]]:
    found = []
    for route in service.app.router.routes():
        info: Any = route.resource.get_info() if route.resource is not None else {}
        path = info.get("path") or info.get("formatter") or f"{info.get('prefix')}/x"
        found.append((route.method, str(path)))
    return sorted(found)


async def test_every_route_but_the_open_ones_needs_a_key(sqlite_guarded: Service) -> None:
    """Without one, with a wrong one, with one that is no key: 401, and nothing else is told."""
    wrong, _ = create_key()
    asked = 0
    for method, path in _routes(sqlite_guarded):
        if scope_of(method, path) is None:
            continue
        for headers in ({}, {"Authorization": f"Bearer {wrong}"}, {"Authorization": "Basic eDp4"}):
            answer = await sqlite_guarded.request(method, path, headers=headers)

            assert answer.status == 401, (method, path)
            assert answer.headers["WWW-Authenticate"].startswith("Bearer")
            asked += 1
    assert asked > 100


async def test_a_path_that_there_is_not_needs_a_key_too(sqlite_guarded: Service) -> None:
    """Who has none does not learn which routes there are."""
    assert (await sqlite_guarded.get("/v1/nothing")).status == 401
    tenant = await make_tenant(sqlite_guarded, "a")
    assert (await tenant.get("/v1/nothing")).status == 404


async def test_health_is_open_and_readiness_tells_strangers_no_details(guarded: Service) -> None:
    """Liveness for anybody; what is wrong, with its paths and hosts, for who may read."""
    reader = await make_tenant(guarded, "a", [Scope.READ])
    writer = await make_tenant(guarded, "a", [Scope.SUBMIT])

    assert (await guarded.get("/healthz")).status == 200
    stranger = (await guarded.get("/readyz")).json
    assert [reason["detail"] for reason in stranger["reasons"]] == ["", ""]
    assert stranger["models"] == {"tiny": "loading", "other": "loading"}
    assert (await writer.get("/readyz")).json == stranger
    assert all(reason["detail"] for reason in (await reader.get("/readyz")).json["reasons"])
    wrong = await guarded.get("/readyz", headers={"Authorization": "Bearer x"})
    assert wrong.status == 503
    assert wrong.json == stranger


@pytest.mark.parametrize("scope", list(Scope))
async def test_a_scope_opens_its_routes_and_no_other(sqlite_guarded: Service, scope: Scope) -> None:
    """Every route: 403 exactly where the key lacks what the route asks for."""
    tenant = await make_tenant(sqlite_guarded, "a", [scope])
    for method, path in _routes(sqlite_guarded):
        wanted = scope_of(method, path)
        if wanted is None or path == "/v1/overview/events":  # a stream that never ends
            continue

        answer = await tenant.request(method, path)

        assert (answer.status == 403) == (wanted is not scope), (method, path, answer.status)


def test_the_scopes_of_routes() -> None:
    """Reading reads, all else submits; what forges webhooks is not for readers."""
    assert {scope_of("GET", path) for path in OPEN_PATHS} == {None}
    assert scope_of("GET", "/docs/docs.js") is None
    assert scope_of("GET", "/dashboard/1/main.js") is None
    assert scope_of("GET", "/v1/overview") is Scope.ADMIN
    assert scope_of("GET", "/v1/overview/events") is Scope.ADMIN
    assert scope_of("GET", "/v1/jobs") is scope_of("HEAD", "/v1/jobs/x") is Scope.READ
    assert scope_of("POST", "/v1/score") is scope_of("DELETE", "/v1/jobs/x") is Scope.SUBMIT
    assert scope_of("GET", "/v1/webhooks/default/secret") is Scope.SUBMIT
    assert scope_of("GET", "/metrics") is scope_of("GET", "/v1/workers") is Scope.ADMIN


async def test_refusals_have_the_form_of_the_routes_family(sqlite_guarded: Service) -> None:
    """Problem details on our routes, OpenAI's form on those of its family."""
    own = await sqlite_guarded.post("/v1/jobs", {})
    foreign = await sqlite_guarded.post("/v1/score", {})
    reader = await make_tenant(sqlite_guarded, "a", [Scope.READ])
    forbidden = await reader.post("/v1/score", {"items": ["a"]})

    assert own.headers["Content-Type"].startswith("application/problem+json")
    assert (own.json["code"], own.json["param"]) == ("unauthorized", "Authorization")
    assert (foreign.status, foreign.json["error"]["type"]) == (401, "authentication_error")
    assert (forbidden.status, forbidden.json["error"]["type"]) == (403, "permission_error")
    assert "submit" in forbidden.json["error"]["message"]


async def test_two_authorization_headers_are_refused(sqlite_guarded: Service) -> None:
    """Which of them counts would depend on who reads."""
    tenant = await make_tenant(sqlite_guarded, "a")
    headers = [("Authorization", f"Bearer {tenant.key}")] * 2

    answer = await sqlite_guarded.get("/v1/jobs", headers=headers)

    assert answer.status == 401


async def test_keys_end_when_they_are_revoked_rotated_or_expire(
    database: Database,
) -> None:
    """A keyring that keeps nothing sees it at once; one that keeps sees it when that time ends."""
    async with database.transaction() as tx:
        row, key = await keys.add_key(tx, "t", [Scope.READ], expires_in_s=1000)
    fresh, slow = Keyring(database, kept_s=0), Keyring(database, kept_s=1000)
    for ring in (fresh, slow):
        assert (await ring.identify(key)).tenant == "t"

    async with database.transaction() as tx:
        await keys.revoke_key(tx, row.id)

    with pytest.raises(UnauthorizedError):
        await fresh.identify(key)
    assert (await slow.identify(key)).key_id == row.id


async def test_a_right_prefix_with_a_wrong_secret_is_no_key(database: Database) -> None:
    """The prefix finds the row; the hash decides."""
    async with database.transaction() as tx:
        row, key = await keys.add_key(tx, "t", [Scope.READ])
    other, prefix = create_key()

    with pytest.raises(UnauthorizedError):
        await Keyring(database).identify(other.replace(prefix, row.prefix))
    assert (await Keyring(database).identify(key)).key_id == row.id


async def test_the_last_use_is_written_apart_from_requests(guarded: Service) -> None:
    """A request writes nothing; the service's loop does, once for all of them."""
    tenant = await make_tenant(guarded, "a")
    for _ in range(3):
        assert (await tenant.get("/v1/jobs")).status == 200
    async with guarded.database.snapshot() as tx:
        (before,) = await keys.list_keys(tx, "a")

    written = await guarded.app[KEYRING].write_uses()

    async with guarded.database.snapshot() as tx:
        (after,) = await keys.list_keys(tx, "a")
    assert before.last_used_at is None
    assert written == 1
    assert after.last_used_at is not None
    assert await guarded.app[KEYRING].write_uses() == 0


async def test_without_keys_another_site_cannot_use_the_browsers_way(
    sqlite_service: Service,
) -> None:
    """A foreign Origin and a rebound name are refused; ours, and no Origin, are not."""
    own = sqlite_service.url
    port = own.rpartition(":")[2]
    cases = {
        (None, None): 200,
        (own, None): 200,
        (None, f"localhost:{port}"): 200,
        ("https://evil.example", None): 403,
        ("null", None): 403,
        (None, "evil.example"): 403,
        ("http://evil.example", "evil.example"): 403,
        (None, "[::1]:80"): 200,
    }
    for (origin, host), status in cases.items():
        given = {"Origin": origin, "Host": host}
        headers = {name: value for name, value in given.items() if value is not None}

        answer = await sqlite_service.get("/v1/jobs", headers=headers)

        assert answer.status == status, (origin, host)


async def test_streams_end_with_their_key(guarded: Service) -> None:
    """A revoked key is told nothing more, also where it was told something before; others are."""
    admin, other = await make_tenant(guarded, "a"), await make_tenant(guarded, "b")
    paths = [f"/v1/jobs/{await admin.submit()}/events", "/v1/overview/events"]
    streams = [await _open_stream(admin, path) for path in paths]
    kept = await _open_stream(other, "/v1/overview/events")

    async with guarded.database.transaction() as tx:
        await keys.revoke_key(tx, admin.row.id)

    async with asyncio.timeout(10):
        for stream in streams:
            await stream.read()

    assert not kept.content.is_eof()
    kept.close()


async def _open_stream(tenant: Tenant, path: str) -> aiohttp.ClientResponse:
    headers = {"Authorization": f"Bearer {tenant.key}"}
    response = await tenant.service.http.get(tenant.service.url + path, headers=headers)
    assert response.status == 200
    await response.content.readuntil(b"\n\n")
    return response
