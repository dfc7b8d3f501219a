"""``Client.webhooks``: the methods of ``AsyncClient.webhooks`` without ``await``."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, Protocol, TypeVar

from contract.endpoints import Delivery, Endpoint, EndpointUpdate, SentTest
from scorekeep.webhooks import Webhooks

__all__ = ["BlockingWebhooks"]

_T = TypeVar("_T")


class _Run(Protocol):
    """Awaits what a call returns, and blocks until it is there."""

    def __call__(self, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T: ...


class BlockingWebhooks:
    """Endpoints, the log of deliveries, sending again; every method is one request, and blocks."""

    def __init__(self, webhooks: Webhooks, run: _Run) -> None:
        self._webhooks = webhooks
        self._run = run

    def create(
        self, url: str, *, events: Sequence[str] | None = None, description: str = ""
    ) -> Endpoint:
        """See ``Webhooks.create``."""
        return self._run(lambda: self._webhooks.create(url, events=events, description=description))

    def list(self) -> Sequence[Endpoint]:
        """See ``Webhooks.list``."""
        return self._run(self._webhooks.list)

    def get(self, endpoint_id: str) -> Endpoint:
        """See ``Webhooks.get``."""
        return self._run(lambda: self._webhooks.get(endpoint_id))

    def update(self, endpoint_id: str, change: EndpointUpdate) -> Endpoint:
        """See ``Webhooks.update``."""
        return self._run(lambda: self._webhooks.update(endpoint_id, change))

    def rotate(self, endpoint_id: str) -> Endpoint:
        """See ``Webhooks.rotate``."""
        return self._run(lambda: self._webhooks.rotate(endpoint_id))

    def disable(self, endpoint_id: str, *, reason: str | None = None) -> Endpoint:
        """See ``Webhooks.disable``."""
        return self._run(lambda: self._webhooks.disable(endpoint_id, reason=reason))

    def enable(self, endpoint_id: str) -> Endpoint:
        """See ``Webhooks.enable``."""
        return self._run(lambda: self._webhooks.enable(endpoint_id))

    def delete(self, endpoint_id: str) -> None:
        """See ``Webhooks.delete``."""
        self._run(lambda: self._webhooks.delete(endpoint_id))

    def test(self, endpoint_id: str) -> SentTest:
        """See ``Webhooks.test``."""
        return self._run(lambda: self._webhooks.test(endpoint_id))

    def secrets(self) -> Sequence[str]:
        """See ``Webhooks.secrets``."""
        return self._run(self._webhooks.secrets)

    def rotate_default(self) -> Sequence[str]:
        """See ``Webhooks.rotate_default``."""
        return self._run(self._webhooks.rotate_default)

    def deliveries(
        self,
        *,
        job: str | None = None,
        bulk: str | None = None,
        endpoint: str | None = None,
        state: str | None = None,
        limit: int = 50,
    ) -> Sequence[Delivery]:
        """See ``Webhooks.deliveries``."""
        return self._run(
            lambda: self._webhooks.deliveries(
                job=job, bulk=bulk, endpoint=endpoint, state=state, limit=limit
            )
        )

    def delivery(self, delivery_id: str) -> Delivery:
        """See ``Webhooks.delivery``."""
        return self._run(lambda: self._webhooks.delivery(delivery_id))

    def redeliver(self, delivery_id: str) -> Delivery:
        """See ``Webhooks.redeliver``."""
        return self._run(lambda: self._webhooks.redeliver(delivery_id))

    def redeliver_range(
        self,
        since: str,
        *,
        until: str | None = None,
        endpoint: str | None = None,
        state: Literal["dead", "delivered", "any"] = "dead",
    ) -> int:
        """See ``Webhooks.redeliver_range``."""
        return self._run(
            lambda: self._webhooks.redeliver_range(
                since, until=until, endpoint=endpoint, state=state
            )
        )
