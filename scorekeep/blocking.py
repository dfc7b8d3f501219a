"""The client for everybody else: the same methods without ``await``, also in a notebook."""

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from scorekeep.bulk import BulkClient
from scorekeep.client import DEFAULT_URL, AsyncClient
from scorekeep.webhooks import Webhooks

__all__ = ["BlockingBulks", "BlockingWebhooks", "Client"]

_A = TypeVar("_A")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _blocking(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate["Client", _P], _T]:
    """Return a method of ``Client`` that does what ``method`` does, and blocks."""

    @functools.wraps(method)
    def call(client: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return client.run(lambda: method(client.asynchronous, *args, **kwargs))

    return call


def _blocking_each(
    method: Callable[Concatenate[AsyncClient, _P], AsyncIterator[_T]],
) -> Callable[Concatenate["Client", _P], Iterator[_T]]:
    """Return a method of ``Client`` that yields what ``method`` yields."""

    @functools.wraps(method)
    def call(client: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        return client.iterate_over(method(client.asynchronous, *args, **kwargs))

    return call


class _Part(Generic[_A]):
    """A group of methods of the client, such as its bulks."""

    def __init__(self, client: "Client", choose: Callable[[AsyncClient], _A]) -> None:
        self.client = client
        self.choose = choose


def _of_part(
    method: Callable[Concatenate[_A, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[_Part[_A], _P], _T]:
    """Return a method of ``_Part`` that does what ``method`` does, and blocks."""

    @functools.wraps(method)
    def call(part: _Part[_A], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        async def act() -> _T:
            return await method(part.choose(part.client.asynchronous), *args, **kwargs)

        return part.client.run(act)

    return call


class BlockingBulks(_Part[BulkClient]):
    """``AsyncClient.bulks`` for code that is not async."""

    submit = _of_part(BulkClient.submit)
    rescore = _of_part(BulkClient.rescore)
    get = _of_part(BulkClient.get)
    list = _of_part(BulkClient.list)
    act = _of_part(BulkClient.act)
    write_results = _of_part(BulkClient.write_results)
    write_hidden_states = _of_part(BulkClient.write_hidden_states)


class BlockingWebhooks(_Part[Webhooks]):
    """``AsyncClient.webhooks`` for code that is not async: every method is one request."""

    create = _of_part(Webhooks.create)
    list = _of_part(Webhooks.list)
    get = _of_part(Webhooks.get)
    update = _of_part(Webhooks.update)
    rotate = _of_part(Webhooks.rotate)
    disable = _of_part(Webhooks.disable)
    enable = _of_part(Webhooks.enable)
    delete = _of_part(Webhooks.delete)
    test = _of_part(Webhooks.test)
    secrets = _of_part(Webhooks.secrets)
    rotate_default = _of_part(Webhooks.rotate_default)
    deliveries = _of_part(Webhooks.deliveries)
    delivery = _of_part(Webhooks.delivery)
    redeliver = _of_part(Webhooks.redeliver)
    redeliver_range = _of_part(Webhooks.redeliver_range)


class Client:
    """``AsyncClient`` for code that is not async; every method is that one's, and blocks.

    It runs an event loop in a thread of its own, so it works where a loop already runs (notebooks)
    and may be shared by threads. Close it, or use it as ``with Client() as client``.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        max_retries: int = 4,
    ) -> None:
        #: Whose methods these are; it lives on the loop of ``run``.
        self.asynchronous = AsyncClient(
            base_url, api_key=api_key, timeout_s=timeout_s, max_retries=max_retries
        )
        #: Files of many lines.
        self.bulks = BlockingBulks(self, lambda client: client.bulks)
        #: Endpoints, the log of deliveries, sending again.
        self.webhooks = BlockingWebhooks(self, lambda client: client.webhooks)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="scorekeep-client", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; a second time does nothing."""
        if self._loop.is_closed():
            return
        self.run(self.asynchronous.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    submit = _blocking(AsyncClient.submit)
    get = _blocking(AsyncClient.get)
    wait = _blocking(AsyncClient.wait)
    score = _blocking(AsyncClient.score)
    rerank = _blocking(AsyncClient.rerank)
    classify = _blocking(AsyncClient.classify)
    scores = _blocking(AsyncClient.scores)
    hidden_states = _blocking(AsyncClient.hidden_states)
    hidden_states_file = _blocking(AsyncClient.hidden_states_file)
    list = _blocking(AsyncClient.list)
    iterate = _blocking_each(AsyncClient.iterate)
    events = _blocking_each(AsyncClient.events)
    bulk_results = _blocking_each(AsyncClient.bulk_results)
    wait_for_bulk = _blocking(AsyncClient.wait_for_bulk)
    cancel = _blocking(AsyncClient.cancel)
    retry = _blocking(AsyncClient.retry)
    delete = _blocking(AsyncClient.delete)
    models = _blocking(AsyncClient.models)
    limits = _blocking(AsyncClient.limits)
    webhook_secret = _blocking(AsyncClient.webhook_secret)

    def run(self, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Await ``call()`` on the client's own loop; an interrupt here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(call(), self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # does nothing to one that has ended

    def iterate_over(self, values: AsyncIterator[_T]) -> Iterator[_T]:
        """Yield what ``values`` yields; leaving early closes it."""

        async def take() -> tuple[_T] | None:
            try:
                return (await anext(values),)
            except StopAsyncIteration:
                return None

        async def close() -> None:
            if isinstance(values, AsyncGenerator):
                await values.aclose()

        try:
            while (found := self.run(take)) is not None:
                yield found[0]
        finally:
            self.run(close)
