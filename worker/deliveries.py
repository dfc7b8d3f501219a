"""Delivers events: claim, sign, POST, record, and again until the receiver took it.

Needs no model and no torch. A delivery is claimed and fenced like a job, so any number of
processes may deliver; the event's id is the same at every attempt. A receiver that is slow or down
takes up its own places only: never more than ``webhook_endpoint_concurrency`` of all processes, and
one while it fails.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from aiohttp import ClientSession

from contract.config import Settings
from contract.errors import StoreUnavailableError
from storage.database import Transaction
from storage.deliveries import (
    AttemptReport,
    Claimed,
    DeliveryAttempt,
    DueDelivery,
    claim_deliveries,
    record_attempts,
)
from worker.bodies import render_body
from worker.crashing import crash_here
from worker.stores import Stores
from worker.webhooks import HOPELESS_S, Attempt, choose_delay_s, choose_pause_s, post

__all__ = ["Deliverer"]

_LOG = logging.getLogger(__name__)
_KEPT_ANSWER_BYTES = 2048
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0
#: How soon to look again where another process was claiming from the same receiver.
_CONTENDED_S = 0.05


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
        self._stopping = False
        #: What is claimed and not yet recorded: a place is free after the record, so that the claim
        #: knows how the last attempt went.
        self._in_flight = 0
        self._contended = False
        self._reports: list[AttemptReport] = []
        self._backoff_s = _FIRST_BACKOFF_S
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
        async with asyncio.TaskGroup() as attempts:
            while not self._stopping or self._in_flight:
                self._wake.clear()
                for delivery in await self._turn():
                    attempts.create_task(self._deliver(delivery))
                await self._sleep()

    async def _sleep(self) -> None:
        with contextlib.suppress(TimeoutError):
            limit_s = self._settings.sweep_s
            async with asyncio.timeout(min(limit_s, _CONTENDED_S) if self._contended else limit_s):
                await self._wake.wait()

    async def _turn(self) -> list[DueDelivery]:
        """Record what came back and claim what is due, in one commit; the next turn repeats it."""
        reports, self._reports = self._reports, []
        in_flight = self._in_flight - len(reports)
        claimed = Claimed([])
        try:
            async with self._database.transaction() as tx:
                kept = await record_attempts(tx, reports, hopeless_s=HOPELESS_S)
                if not self._stopping:
                    claimed = await self._claim(tx, in_flight)
                if reports:
                    crash_here("before_record", self._settings.crash_at)
        except StoreUnavailableError as error:
            _LOG.warning("deliveries wait for the store", extra={"reason": error.message})
            self._reports += reports
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(self._backoff_s * 2, _LONGEST_BACKOFF_S)
            self._wake.set()
            return []
        self._backoff_s = _FIRST_BACKOFF_S
        if reports:
            crash_here("after_record", self._settings.crash_at)
        self._note(reports, kept)
        self._in_flight = in_flight + len(claimed.due)
        self._contended = claimed.contended
        return claimed.due

    async def _claim(self, tx: Transaction, in_flight: int) -> Claimed:
        free = self._settings.webhook_concurrency - in_flight
        if free <= 0:
            return Claimed([])
        return await claim_deliveries(
            tx,
            worker=self._worker,
            limit=free,
            lease_s=self._lease_s,
            places=self._settings.webhook_endpoint_concurrency,
        )

    async def _deliver(self, delivery: DueDelivery) -> None:
        try:
            attempt = await self._attempt(delivery)
        except Exception as error:  # noqa: BLE001  # recorded as any failure: the ladder bounds it
            _LOG.exception("delivery raised", extra={"delivery": delivery.id})
            attempt = Attempt(0.0, error=f"an error of ours: {type(error).__name__}")
        crash_here("after_event", self._settings.crash_at)
        self._reports.append(_report(delivery, attempt))
        self._wake.set()

    async def _attempt(self, delivery: DueDelivery) -> Attempt:
        body = await render_body(self._settings, self._blobs, delivery)
        crash_here("before_event", self._settings.crash_at)
        return await post(
            self._session,
            self._settings,
            url=delivery.url,
            event_id=delivery.event_id,
            body=body,
            secrets=delivery.secrets,
        )

    def _note(self, reports: Sequence[AttemptReport], kept: set[str]) -> None:
        self.attempts += len(reports)
        self.delivered += sum(report.delivered for report in reports)
        for report in reports:
            if not report.delivered:
                _LOG.info(
                    "webhook not delivered",
                    extra={
                        "delivery": report.delivery.id,
                        "attempt": report.delivery.attempt,
                        "status": report.attempt.status,
                        "reason": report.attempt.error,
                        "next_s": report.next_attempt_s,
                        "fenced": report.delivery.id not in kept,
                    },
                )


def _report(delivery: DueDelivery, attempt: Attempt) -> AttemptReport:
    next_s = None
    if not attempt.delivered and not attempt.final:
        next_s = choose_delay_s(delivery.failures + 1, attempt.retry_after_s)
    return AttemptReport(
        delivery=delivery,
        attempt=DeliveryAttempt(
            status=attempt.status,
            latency_s=attempt.latency_s,
            error=attempt.error,
            answer=_render_answer(attempt.answer),
        ),
        delivered=attempt.delivered,
        next_attempt_s=next_s,
        reason=attempt.error if attempt.final else "every attempt failed",
        is_gone=attempt.is_gone,
        pause_s=choose_pause_s(delivery.receiver_failures + 1, attempt),
    )


def _render_answer(answer: bytes) -> str:
    """Return the first 2 kB as text."""
    return answer[:_KEPT_ANSWER_BYTES].decode(errors="replace")
