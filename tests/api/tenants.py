"""Tenants with keys of their own, on one service that requires them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contract.keys import Scope
from storage.keys import KeyRow, add_key
from tests.api.service import Answer, Service

EVERYTHING = tuple(Scope)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Someone with a key."""

    service: Service
    row: KeyRow
    key: str

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        """Send a request with the key."""
        headers = {"Authorization": f"Bearer {self.key}", **options.pop("headers", {})}
        return await self.service.request(method, path, headers=headers, **options)

    async def get(self, path: str, **options: Any) -> Answer:
        """GET ``path``."""
        return await self.request("GET", path, **options)

    async def post(self, path: str, body: object, **headers: str) -> Answer:
        """POST ``body`` as JSON; underscores in header names become hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.request("POST", path, json=body, headers=named)

    async def submit(self, **fields: Any) -> str:
        """Submit a job to ``tiny`` and return its id."""
        answer = await self.post("/v1/jobs", {"model": "tiny", "items": ["a", "b"], **fields})
        assert answer.status == 202, answer.body
        job_id: str = answer.json["id"]
        return job_id


async def make_tenant(
    service: Service, name: str, scopes: Sequence[Scope] = EVERYTHING, **options: Any
) -> Tenant:
    """Make a key for a tenant."""
    async with service.database.transaction() as tx:
        row, key = await add_key(tx, name, scopes, **options)
    return Tenant(service, row, key)
