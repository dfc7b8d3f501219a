"""Nobody sees what is another's: every route with a foreign id, every list, every wait."""

import asyncio
from typing import Any

import aiohttp
import pytest

from api.state import WAITERS
from contract.errors import NotFoundError
from storage import files, jobs
from storage.database import Database
from storage.tenancy import acting_as
from tests.api.service import Service
from tests.api.tenants import Tenant, make_tenant

#: What goes where a path has a name, by the folder that it lies in.
_IDS = {
    "/v1/jobs/": "job",
    "/v1/bulks/": "bulk",
    "/v1/batches/": "batch",
    "/v1/files/": "file",
    "/v1/webhook_endpoints/": "endpoint",
    "/v1/deliveries/": "delivery",
}
#: What is everybody's: files of pages, and models.
_SHARED = ("/dashboard/", "/docs/", "/v1/models/")
_BODIES: dict[str, Any] = {"PATCH": {"description": "mine now"}}
_SHARD = "hidden_states-00001-of-00001.safetensors"
_LONG_AGO = "2020-01-01T00:00:00Z"
_ENDPOINT = {"url": "https://receiver.example/hook"}


class _Owner:
    """A tenant that has one of everything."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.ids: dict[str, str] = {}

    async def fill(self) -> None:
        """Make one of everything; the worker's part is played."""
        service = self.tenant.service
        await service.report_ready()
        endpoint = await self.tenant.post("/v1/webhook_endpoints", _ENDPOINT)
        job_id = await self.tenant.submit(return_pooled_hidden_states=True)
        await service.finish(await service.claim())
        log = await self.tenant.get(f"/v1/jobs/{job_id}/deliveries")
        self.ids = {"job": job_id, "endpoint": endpoint.json["id"]}
        self.ids |= {"delivery": log.json["data"][0]["id"], "file": await self._upload()}
        body = {"input_file_id": self.ids["file"], "model": "tiny", "hidden_states": True}
        bulk = await self.tenant.post("/v1/bulks", body, Idempotency_Key="the-key")
        self.ids["bulk"] = bulk.json["id"]
        await service.finish(await service.next_claim())
        line = b'{"custom_id":"a","method":"POST","url":"/v1/score","body":{"items":["x"]}}\n'
        batch = await self.tenant.post(
            "/v1/batches",
            {
                "input_file_id": await self._upload(line),
                "endpoint": "/v1/score",
                "completion_window": "24h",
            },
        )
        self.ids["batch"] = batch.json["id"]
        await wait_for_bulk(self.tenant, self.ids["bulk"])

    async def _upload(self, data: bytes = b'{"item":"x"}\n') -> str:
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", data, filename="x.jsonl")
        answer = await self.tenant.request("POST", "/v1/files", data=form)
        assert answer.status == 200, answer.body
        file_id: str = answer.json["id"]
        return file_id


async def wait_for_bulk(tenant: Tenant, bulk_id: str) -> Any:  # what the service answers
    """Return the bulk once it has completed; polled as a client does."""
    async with asyncio.timeout(15):
        while True:
            shown = (await tenant.get(f"/v1/bulks/{bulk_id}")).json
            if shown["state"] == "completed":
                return shown
            await asyncio.sleep(0.02)


@pytest.fixture
async def owner(guarded: Service) -> _Owner:
    """The tenant that has everything."""
    owner = _Owner(await make_tenant(guarded, "owner"))
    await owner.fill()
    return owner


def _paths(service: Service, ids: dict[str, str]) -> list[tuple[str, str]]:
    """Every route with a name in its path, filled with the owner's ids."""
    found = []
    for route in service.app.router.routes():
        info: Any = route.resource.get_info() if route.resource is not None else {}
        pattern = str(info.get("formatter", ""))
        if not pattern or pattern.startswith(_SHARED):
            continue
        folder = next((folder for folder in _IDS if pattern.startswith(folder)), None)
        assert folder is not None, f"{pattern}: say in _IDS what its id names"
        owned = ids[_IDS[folder]]
        names = {"id": owned, "a": owned, "b": owned, "index": "0", "file": _SHARD}
        found.append((route.method, pattern.format(**names)))
    return found


async def test_every_route_hides_what_is_anothers(guarded: Service, owner: _Owner) -> None:
    """404 for a foreign id on every route that names one, as for an id that there never was."""
    stranger = await make_tenant(guarded, "stranger")
    paths = _paths(guarded, owner.ids)
    for method, path in paths:
        answer = await stranger.request(method, path, json=_BODIES.get(method, {}))

        assert answer.status == 404, (method, path, answer.status, answer.body)
    assert len(paths) > 40
    for method, path in paths:  # they were there, and nothing was done to them
        if method == "GET" and "/events" not in path and not path.startswith("/v1/batches"):
            answer = await owner.tenant.get(path)
            assert answer.status == 200, (path, answer.status, answer.body)


async def test_no_list_shows_what_is_anothers(guarded: Service, owner: _Owner) -> None:
    """Each is empty for a stranger, with filters, cursors and keys of the owner too."""
    stranger = await make_tenant(guarded, "stranger")
    lists = ("jobs", "bulks", "batches", "files", "webhook_endpoints")
    for name in lists:
        assert (await owner.tenant.get(f"/v1/{name}")).json["data"], name
        assert (await stranger.get(f"/v1/{name}")).json["data"] == [], name
    for path in (
        f"/v1/bulks?after=blk_{'f' * 32}",
        "/v1/bulks?key=the-key",
        f"/v1/files?after=fil_{'f' * 32}",
        "/v1/jobs?state=succeeded&model=tiny",
    ):
        assert (await stranger.get(path)).json["data"] == [], path


async def test_what_a_body_names_is_looked_for_among_ones_own(
    guarded: Service, owner: _Owner
) -> None:
    """Files, bulks, jobs and endpoints of another's cannot be used."""
    stranger, ids = await make_tenant(guarded, "stranger"), owner.ids
    batch = {"endpoint": "/v1/score", "completion_window": "24h"}
    refused = (
        ("/v1/bulks", {"input_file_id": ids["file"], "model": "tiny"}),
        ("/v1/batches", {"input_file_id": ids["file"], **batch}),
        ("/v1/rescore", {"source": {"bulk": ids["bulk"]}}),
        (
            "/v1/deliveries/redeliver",
            {"since": "2020-01-01T00:00:00Z", "endpoint": ids["endpoint"]},
        ),
    )
    for path, body in refused:
        assert (await stranger.post(path, body)).status == 404, path
    again = await stranger.post("/v1/deliveries/redeliver", {"since": _LONG_AGO})
    assert again.json["count"] == 0
    found = await stranger.post("/v1/rescore", {"source": {"jobs": [ids["job"]]}, "model": "tiny"})
    shown = await wait_for_bulk(stranger, found.json["id"])
    assert (shown["counts"]["scored"], shown["counts"]["lines_failed"]) == (0, 1)
    results = await stranger.get(f"/v1/bulks/{shown['id']}/results")
    assert b'"gone"' in results.body


async def test_keys_of_the_same_name_are_each_tenants_own(guarded: Service) -> None:
    """One idempotency key, two tenants: two jobs, and neither is a replay."""
    one, other = await make_tenant(guarded, "a"), await make_tenant(guarded, "b")
    answers = [
        await tenant.post("/v1/jobs", {"model": "tiny", "items": ["x"]}, Idempotency_Key="k")
        for tenant in (one, other)
    ]

    assert [answer.status for answer in answers] == [202, 202]
    assert answers[0].json["id"] != answers[1].json["id"]
    assert all("Idempotent-Replayed" not in answer.headers for answer in answers)


async def test_nobody_waits_for_what_is_anothers(guarded: Service) -> None:
    """Long polls and event streams answer 404 at once, and leave no waiter behind."""
    one, other = await make_tenant(guarded, "a"), await make_tenant(guarded, "b")
    job_id = await one.submit()

    async with asyncio.timeout(5):
        for path in (f"/v1/jobs/{job_id}?wait=30", f"/v1/jobs/{job_id}/events"):
            assert (await other.get(path, headers={"Last-Event-ID": "1"})).status == 404

    assert len(guarded.app[WAITERS]) == 0


async def test_a_query_without_its_tenant_gives_nothing_away(database: Database) -> None:
    """Should one ever forget it: the row does not come out of storage."""
    new = [
        jobs.NewJob(tenant=name, model="m", lane="normal", request=b"{}", item_count=1)  # type: ignore[arg-type]
        for name in ("a", "b")
    ]
    async with database.transaction() as tx:
        one, other = await jobs.add_jobs(tx, new)
        await files.start_file(tx, "b", filename="f", purpose="batch", part_bytes=1)

    async with database.snapshot() as tx:
        query = jobs.select_jobs(payload=True)
        with acting_as("a"):
            assert (await jobs.get_job(tx, "a", one.id)).tenant == "a"
            with pytest.raises(NotFoundError):
                [jobs.parse_job(row) for row in await tx.execute(query)]
            with pytest.raises(NotFoundError):
                await jobs.get_job(tx, "b", other.id)
        assert len([jobs.parse_job(row) for row in await tx.execute(query)]) == 2
