"""Delivers events: claim, sign, POST, record, and again until the receiver took it.

Needs no model and no torch. A delivery is claimed and fenced like a job, so any number of
processes may deliver; the event's id is the same at every attempt. A receiver that is slow
takes up its own places only.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import ClientSession

from contract.config import Settings
from contract.errors import StoreUnavailableError
from storage.database import Transaction
from storage.deliveries import (
    DeliveryAttempt,
    DueDelivery,
    claim_deliveries,
    record_attempt,
)
from storage.tenants import webhook_secrets
from worker.bodies import render_body
from worker.crashing import crash_here
from worker.stores import Stores
from worker.webhooks import Attempt, choose_delay_s, post

__all__ = ["Deliverer"]

_LOG = logging.getLogger(__name__)
#: The share of all places that one receiver may take.
_ORIGIN_SHARE = 8
_KEPT_ANSWER_BYTES = 2048
_LONGEST_BACKOFF_S = 5.0


@dataclass(frozen=True, slots=True)
class _Report:
    delivery: DueDelivery
    attempt: Attempt


class Deliverer:
    """Delivers until stopped. Belongs to the event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        stores: Stores,
        session: ClientSession,
        worker: str,
    ) -> None:
        self.delivered = 0
        self.attempts = 0
        self._settings = settings
        self._database = stores.database
        self._blobs = stores.blobs
        self._session = session
        self._worker = worker
        self._wake = asyncio.Event()
        self._reported = asyncio.Event()
        self._stopping = False
        self._closed = False
        self._busy: Counter[str] = Counter()
        self._reports: list[_Report] = []
        self._origin_places = max(1, settings.webhook_concurrency // _ORIGIN_SHARE)
        #: Longer than an attempt can take: what is not recorded by then is somebody else's.
        self._lease_s = settings.webhook_timeout_s * 2 + settings.lease_s

    def wake(self) -> None:
        """Look for due deliveries now."""
        self._wake.set()

    def totals(self) -> dict[str, float]:
        """Return what was done since the start, by counter."""
        return {"delivery_attempts": self.attempts, "deliveries": self.delivered}

    def stop(self) -> None:
        """Claim no more; attempts in flight end and are recorded."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Deliver until ``stop``, then until what is in flight is recorded."""
        async with asyncio.TaskGroup() as recording:
            recording.create_task(self._record_all())
            async with asyncio.TaskGroup() as attempts:
                while not self._stopping:
                    self._wake.clear()
                    due = await self._claim()
                    for delivery, secrets in due:
                        attempts.create_task(self._deliver(delivery, secrets))
                    if not due:
                        await self._sleep()
            self._closed = True
            self._reported.set()

    async def _sleep(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.sweep_s):
                await self._wake.wait()

    async def _claim(self) -> list[tuple[DueDelivery, list[str]]]:
        free = self._settings.webhook_concurrency - self._busy.total()
        if free <= 0:
            return []
        busy = [origin for origin, count in self._busy.items() if count >= self._origin_places]
        try:
            async with self._database.transaction() as tx:
                due = await claim_deliveries(
                    tx,
                    worker=self._worker,
                    limit=min(free, self._origin_places),
                    lease_s=self._lease_s,
                    busy_origins=busy,
                )
                secrets = {d.tenant: await webhook_secrets(tx, d.tenant) for d in due}
        except StoreUnavailableError as error:  # the next sweep tries again
            _LOG.warning("no delivery claimed", extra={"reason": error.message})
            return []
        self._busy.update(_origin_of(delivery) for delivery in due)
        return [(delivery, secrets[delivery.tenant]) for delivery in due]

    async def _deliver(self, delivery: DueDelivery, secrets: Sequence[str]) -> None:
        try:
            attempt = await self._attempt(delivery, secrets)
            crash_here("after_event", self._settings.crash_at)
            self._reports.append(_Report(delivery, attempt))
            self._reported.set()
        except Exception:  # noqa: BLE001  # the claim ends, and the delivery is due again
            _LOG.exception("delivery raised", extra={"delivery": delivery.id})
        finally:
            origin = _origin_of(delivery)
            self._busy[origin] -= 1
            if self._busy[origin] <= 0:
                del self._busy[origin]
            self._wake.set()

    async def _attempt(self, delivery: DueDelivery, secrets: Sequence[str]) -> Attempt:
        body = await render_body(self._settings, self._blobs, delivery)
        return await post(
            self._session,
            self._settings,
            url=delivery.url,
            event_id=delivery.event_id,
            body=body,
            secrets=secrets,
        )

    async def _record_all(self) -> None:
        """Record until ``run`` is over and nothing is left."""
        while not self._closed or self._reports:
            await self._reported.wait()
            self._reported.clear()
            await self._record_batch()

    async def _record_batch(self) -> None:
        """Write all that is reported in one transaction; kept until the store takes it."""
        reports, self._reports = self._reports, []
        backoff_s = 0.1
        while reports:
            try:
                async with self._database.transaction() as tx:
                    for report in reports:
                        await self._record(tx, report)
            except StoreUnavailableError as error:
                _LOG.warning("attempts not recorded", extra={"reason": error.message})
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)
            else:
                break
        self.attempts += len(reports)
        self.delivered += sum(report.attempt.delivered for report in reports)
        self._wake.set()

    async def _record(self, tx: Transaction, report: _Report) -> None:
        attempt, delivery = report.attempt, report.delivery
        next_s = None
        if not attempt.delivered and not attempt.final:
            next_s = choose_delay_s(delivery.attempt, attempt.retry_after_s)
        kept = await record_attempt(
            tx,
            delivery,
            DeliveryAttempt(
                status=attempt.status,
                latency_s=attempt.latency_s,
                error=attempt.error,
                answer=_render_answer(attempt.answer),
            ),
            next_attempt_s=next_s,
            delivered=attempt.delivered,
        )
        if not attempt.delivered:
            _LOG.info(
                "webhook not delivered",
                extra={
                    "delivery": delivery.id,
                    "attempt": delivery.attempt,
                    "status": attempt.status,
                    "reason": attempt.error,
                    "next_s": next_s,
                    "fenced": not kept,
                },
            )


def _render_answer(answer: bytes) -> str:
    """Return the first 2 kB as text that every database takes."""
    return answer[:_KEPT_ANSWER_BYTES].decode(errors="replace").replace("\0", "\ufffd")


def _origin_of(delivery: DueDelivery) -> str:
    """Return scheme, host and port: what shares its places."""
    parts = urlsplit(delivery.url)
    return f"{parts.scheme}://{parts.netloc}"
