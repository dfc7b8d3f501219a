"""The client's side of webhooks: endpoints, the log of deliveries, sending again."""

import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from contract.endpoints import (
    Delivery,
    Endpoint,
    EndpointRequest,
    EndpointUpdate,
    RedeliveryRequest,
    SentTest,
)
from contract.errors import InvalidRequestError
from scorekeep.transport import Transport

__all__ = ["Webhooks"]

_ENDPOINTS = "/v1/webhook_endpoints"


class _EndpointList(msgspec.Struct, frozen=True):
    data: list[Endpoint]


class _DeliveryList(msgspec.Struct, frozen=True):
    data: list[Delivery]


class _Secrets(msgspec.Struct, frozen=True):
    secrets: list[str]


class _Count(msgspec.Struct, frozen=True):
    count: int


class Webhooks:
    """``AsyncClient.webhooks``: every method is one request. POSTs carry an idempotency key."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self, url: str, *, events: Sequence[str] | None = None, description: str = ""
    ) -> Endpoint:
        """Register an endpoint. Its ``secret`` is in this answer only."""
        wanted = EndpointRequest(
            url=url, events=None if events is None else list(events), description=description
        )
        return await self._endpoint("POST", _ENDPOINTS, wanted)

    async def list(self) -> Sequence[Endpoint]:
        """Return the endpoints, oldest first."""
        answer = await self._transport.send("GET", _ENDPOINTS)
        return msgspec.json.decode(answer.body, type=_EndpointList).data

    async def get(self, endpoint_id: str) -> Endpoint:
        """Return one endpoint."""
        return await self._endpoint("GET", f"{_ENDPOINTS}/{endpoint_id}")

    async def update(self, endpoint_id: str, change: EndpointUpdate) -> Endpoint:
        """Change an endpoint; what is left out of ``change`` stays."""
        return await self._endpoint("PATCH", f"{_ENDPOINTS}/{endpoint_id}", change)

    async def rotate(self, endpoint_id: str) -> Endpoint:
        """Replace the secret: the new one is in this answer only, the old one holds a day."""
        return await self._endpoint("POST", f"{_ENDPOINTS}/{endpoint_id}/rotate")

    async def disable(self, endpoint_id: str, *, reason: str | None = None) -> Endpoint:
        """Send nothing more to an endpoint."""
        body = None if reason is None else {"reason": reason}
        return await self._endpoint("POST", f"{_ENDPOINTS}/{endpoint_id}/disable", body)

    async def enable(self, endpoint_id: str) -> Endpoint:
        """Send to an endpoint again."""
        return await self._endpoint("POST", f"{_ENDPOINTS}/{endpoint_id}/enable")

    async def delete(self, endpoint_id: str) -> None:
        """Remove an endpoint."""
        await self._transport.send("DELETE", f"{_ENDPOINTS}/{endpoint_id}")

    async def test(self, endpoint_id: str) -> SentTest:
        """Send a test event."""
        answer = await self._post(f"{_ENDPOINTS}/{endpoint_id}/test")
        return msgspec.json.decode(answer, type=SentTest)

    async def secrets(self) -> Sequence[str]:
        """Return the secrets that sign what goes to the URLs of jobs, newest first."""
        answer = await self._transport.send("GET", "/v1/webhooks/default/secret")
        return msgspec.json.decode(answer.body, type=_Secrets).secrets

    async def rotate_default(self) -> Sequence[str]:
        """Replace the secret that signs what goes to the URLs of jobs."""
        answer = await self._post("/v1/webhooks/default/rotate")
        return msgspec.json.decode(answer, type=_Secrets).secrets

    async def deliveries(
        self,
        *,
        job: str | None = None,
        bulk: str | None = None,
        endpoint: str | None = None,
        state: str | None = None,
        limit: int = 50,
    ) -> Sequence[Delivery]:
        """Return deliveries of one job, bulk or endpoint, newest first, with their attempts.

        Raises ``InvalidRequestError`` where not exactly one of them is named.
        """
        places = {"/v1/jobs": job, "/v1/bulks": bulk, _ENDPOINTS: endpoint}
        named = [f"{path}/{name}" for path, name in places.items() if name is not None]
        if len(named) != 1:
            message = "name one job, one bulk or one endpoint"
            raise InvalidRequestError(message)
        path = named[0]
        query = {"limit": str(limit)} | ({} if state is None else {"state": state})
        answer = await self._transport.send("GET", f"{path}/deliveries", query=query)
        return msgspec.json.decode(answer.body, type=_DeliveryList).data

    async def delivery(self, delivery_id: str) -> Delivery:
        """Return one delivery with its attempts."""
        answer = await self._transport.send("GET", f"/v1/deliveries/{delivery_id}")
        return msgspec.json.decode(answer.body, type=Delivery)

    async def redeliver(self, delivery_id: str) -> Delivery:
        """Send one delivery again, now."""
        answer = await self._post(f"/v1/deliveries/{delivery_id}/redeliver")
        return msgspec.json.decode(answer, type=Delivery)

    async def redeliver_range(
        self,
        since: str,
        *,
        until: str | None = None,
        endpoint: str | None = None,
        state: Literal["dead", "delivered", "any"] = "dead",
    ) -> int:
        """Send again what ended between two moments (RFC 3339); return how many."""
        wanted = RedeliveryRequest(since=since, until=until, endpoint=endpoint, state=state)
        answer = await self._post("/v1/deliveries/redeliver", wanted)
        return msgspec.json.decode(answer, type=_Count).count

    async def _endpoint(
        self,
        method: str,
        path: str,
        body: Any = None,  # noqa: ANN401  # whatever msgspec encodes
    ) -> Endpoint:
        if method == "POST":
            return msgspec.json.decode(await self._post(path, body), type=Endpoint)
        data = None if body is None else msgspec.json.encode(body)
        answer = await self._transport.send(method, path, body=data)
        return msgspec.json.decode(answer.body, type=Endpoint)

    async def _post(self, path: str, body: Any = None) -> bytes:  # noqa: ANN401  # as above
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Idempotency-Key": f'"{uuid.uuid4().hex}"'}
        return (await self._transport.send("POST", path, body=data, headers=headers)).body
