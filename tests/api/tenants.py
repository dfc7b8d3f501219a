"""Tenants with keys of their own, on one service that requires them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contract.keys import Scope
from storage.keys import KeyRow, add_key
from tests.api.service import Answer, Caller, Service

EVERYTHING = tuple(Scope)


@dataclass(frozen=True, slots=True)
class Tenant(Caller):
    """Someone with a key."""

    service: Service
    row: KeyRow
    key: str

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        """Send a request with the key."""
        headers = {"Authorization": f"Bearer {self.key}", **options.pop("headers", {})}
        return await self.service.request(method, path, headers=headers, **options)


async def make_tenant(
    service: Service, name: str, scopes: Sequence[Scope] = EVERYTHING, **options: Any
) -> Tenant:
    """Make a key for a tenant."""
    async with service.database.transaction() as tx:
        row, key = await add_key(tx, name, scopes, **options)
    return Tenant(service, row, key)
