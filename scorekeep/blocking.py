"""The client for everybody else: the same methods without ``await``, also in a notebook."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from contract.jobs import JobState
from contract.models import ModelStatus
from contract.scores import Job, Scores
from scorekeep.blocking_webhooks import BlockingWebhooks
from scorekeep.client import DEFAULT_URL, AsyncClient, JobPage
from scorekeep.options import JobOptions
from scorekeep.tensors import Framework

__all__ = ["Client"]

_T = TypeVar("_T")


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
        self._client = AsyncClient(
            base_url, api_key=api_key, timeout_s=timeout_s, max_retries=max_retries
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="scorekeep-client", daemon=True
        )
        self._thread.start()
        #: Endpoints, the log of deliveries, sending again.
        self.webhooks = BlockingWebhooks(self._client.webhooks, self._run)

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
        self._run(self._client.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def submit(
        self,
        items: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        idempotency_key: str | None = None,
        wait_s: float = 0.0,
        **options: Unpack[JobOptions],
    ) -> Job:
        """See ``AsyncClient.submit``."""
        return self._run(
            lambda: self._client.submit(
                items, idempotency_key=idempotency_key, wait_s=wait_s, **options
            )
        )

    def get(self, job: str | Job, *, wait_s: float = 0.0) -> Job:
        """See ``AsyncClient.get``."""
        return self._run(lambda: self._client.get(job, wait_s=wait_s))

    def wait(self, job: str | Job, *, timeout_s: float | None = None) -> Job:
        """See ``AsyncClient.wait``."""
        return self._run(lambda: self._client.wait(job, timeout_s=timeout_s))

    def score(
        self,
        items: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        idempotency_key: str | None = None,
        timeout_s: float | None = 300.0,
        **options: Unpack[JobOptions],
    ) -> Scores:
        """See ``AsyncClient.score``."""
        return self._run(
            lambda: self._client.score(
                items, idempotency_key=idempotency_key, timeout_s=timeout_s, **options
            )
        )

    def scores(self, job: str | Job) -> Scores:
        """See ``AsyncClient.scores``."""
        return self._run(lambda: self._client.scores(job))

    def hidden_states(
        self, job: str | Job, *, framework: Framework = "numpy", item: int | None = None
    ) -> Any:  # noqa: ANN401  # an array or a tensor, as asked
        """See ``AsyncClient.hidden_states``."""
        return self._run(lambda: self._client.hidden_states(job, framework=framework, item=item))

    def hidden_states_file(self, job: str | Job, *, item: int | None = None) -> bytes:
        """See ``AsyncClient.hidden_states_file``."""
        return self._run(lambda: self._client.hidden_states_file(job, item=item))

    def list(
        self,
        *,
        state: JobState | None = None,
        model: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> JobPage:
        """See ``AsyncClient.list``."""
        return self._run(
            lambda: self._client.list(state=state, model=model, cursor=cursor, limit=limit)
        )

    def iterate(self, *, state: JobState | None = None, model: str | None = None) -> Iterator[Job]:
        """See ``AsyncClient.iterate``."""
        page = self.list(state=state, model=model, limit=100)
        while True:
            yield from page.jobs
            if page.next_cursor is None:
                return
            page = self.list(state=state, model=model, cursor=page.next_cursor, limit=100)

    def cancel(self, job: str | Job) -> Job:
        """See ``AsyncClient.cancel``."""
        return self._run(lambda: self._client.cancel(job))

    def retry(self, job: str | Job) -> Job:
        """See ``AsyncClient.retry``."""
        return self._run(lambda: self._client.retry(job))

    def delete(self, job: str | Job) -> None:
        """See ``AsyncClient.delete``."""
        self._run(lambda: self._client.delete(job))

    def models(self) -> Sequence[ModelStatus]:
        """See ``AsyncClient.models``."""
        return self._run(self._client.models)

    def webhook_secret(self) -> str:
        """See ``AsyncClient.webhook_secret``."""
        return self._run(self._client.webhook_secret)

    def _run(self, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Await ``call()`` on the client's own loop; an interrupt here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(call(), self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # does nothing to one that has ended
