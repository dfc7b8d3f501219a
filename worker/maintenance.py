"""What somebody has to do now and then: each ``…_once`` does one bounded round and says how much.

Any number of processes may run these at the same time.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from contract.config import Settings
from contract.errors import StoreUnavailableError
from storage import claims, forgetting, idempotency, sweeps, workers
from storage.refs import BlobRef
from worker.stores import Stores

__all__ = ["Maintenance"]

_LOG = logging.getLogger(__name__)
_PAGE = 500
_DEAD_WORKER_S = 3600.0
#: A blob without a row may be one whose row is about to be written.
_ORPHAN_S = 3600.0
#: How long a deleted id answers 410 rather than 404, and events of bulks and tests are kept.
_TOMBSTONE_S = 30 * 86400.0
#: A row that has waited for this many sweeps is hinted once more, then left to the pump's sweep.
_HINT_SWEEPS = 5


@dataclass(frozen=True, slots=True)
class Maintenance:
    """The rounds. ``announced`` wakes deliveries when a round wrote terminal events."""

    settings: Settings
    stores: Stores
    announced: Callable[[], object] = lambda: None
    totals: Counter[str] = field(default_factory=Counter)

    async def run_once(self) -> dict[str, int]:
        """Do every round once; one that fails is logged and does not keep the others."""
        rounds: dict[str, Callable[[], Awaitable[int]]] = {
            "reaped": self.reap_once,
            "expired": self.expire_once,
            "collected": self.collect_once,
            "hinted": self.hint_once,
            "keys": self.drop_keys_once,
            "tombstones": self.purge_once,
            "workers": self.drop_workers_once,
        }
        tried = {name: await self._try(name, run) for name, run in rounds.items()}
        counts = {name: count for name, count in tried.items() if count is not None}
        done = {name: count for name, count in counts.items() if count}
        if done:
            _LOG.info("maintenance", extra=done)
        return counts

    async def reap_once(self) -> int:
        """Give jobs of expired leases back, or end those that keep killing workers."""
        async with self.stores.database.transaction() as tx:
            reaped = await sweeps.reap_jobs(tx, max_crashes=self.settings.max_crashes, limit=_PAGE)
        self.totals["leases_reaped"] += len(reaped.requeued + reaped.failed + reaped.cancelled)
        self.totals["jobs_poisoned"] += len(reaped.failed)
        await self._announce([*reaped.failed, *reaped.cancelled])
        if reaped.requeued:
            await self.stores.queue.forget(reaped.requeued)  # the dead worker's arq keys
            await self.stores.queue.hint(reaped.requeued)
        return len(reaped.requeued) + len(reaped.failed) + len(reaped.cancelled)

    async def expire_once(self) -> int:
        """End queued jobs whose deadline in the queue passed."""
        async with self.stores.database.transaction() as tx:
            expired = await sweeps.expire_jobs(tx, limit=_PAGE)
        self.totals["jobs_expired"] += len(expired)
        await self._announce(expired)
        return len(expired)

    async def collect_once(self) -> int:
        """Drop results whose retention passed: rows first, then their bytes."""
        async with self.stores.database.transaction() as tx:
            gone = await sweeps.collect_expired(tx, limit=_PAGE)
            gone += await sweeps.unforgotten_refs(tx, limit=_PAGE)
        forgotten = [await self._forget(ref) for ref in dict.fromkeys(gone)]
        self.totals["jobs_collected"] += sum(forgotten)
        return sum(forgotten)

    async def _forget(self, ref: BlobRef) -> bool:
        """Remove the bytes of one job; a damaged blob, for the doctor, does not keep the others."""
        try:
            await forgetting.forget(self.stores.database, self.stores.blobs, ref)
        except ValueError:
            _LOG.exception("blob not rewritten", extra={"job": ref.job_id, "blob": ref.key})
            return False
        return True

    async def purge_once(self) -> int:
        """Delete tombstones that nobody asks for any more, and events as old about no job."""
        purged = 0
        for purge in (sweeps.purge_tombstones, sweeps.purge_bulks, sweeps.purge_events):
            async with self.stores.database.transaction() as tx:
                purged += await purge(tx, older_than_s=_TOMBSTONE_S, limit=_PAGE)
        return purged

    async def hint_once(self) -> int:
        """Hint rows that have waited for long and were not yet hinted from here."""
        older_than_s = self.settings.sweep_s * _HINT_SWEEPS
        async with self.stores.database.transaction() as tx:
            hints = await claims.unhinted_jobs(tx, older_than_s=older_than_s, limit=_PAGE)
        if not hints or not await self.stores.queue.hint(hints):
            return 0
        async with self.stores.database.transaction() as tx:
            await claims.mark_hinted(tx, hints)
        return len(hints)

    async def drop_keys_once(self) -> int:
        """Forget idempotency keys of yesterday."""
        async with self.stores.database.transaction() as tx:
            return await idempotency.drop_expired_keys(tx, limit=_PAGE)

    async def drop_workers_once(self) -> int:
        """Forget workers that died long ago; until then their models are known as loading."""
        async with self.stores.database.transaction() as tx:
            return await workers.drop_dead_workers(tx, older_than_s=_DEAD_WORKER_S)

    async def try_sweep_blobs(self) -> int | None:
        """Do ``sweep_blobs_once``; None if it failed, which is logged."""
        return await self._try("orphans", self.sweep_blobs_once)

    async def sweep_blobs_once(self) -> int:
        """Delete blobs that no row knows and temporary files of writers that died; lists all."""
        older_than_s = max(_ORPHAN_S, 10 * self.settings.lease_s)
        orphans = await forgetting.drop_orphans(
            self.stores.database, self.stores.blobs, older_than_s=older_than_s
        )
        orphans += await self.stores.blobs.drop_temporary(older_than_s=older_than_s)
        self.totals["orphan_blobs_dropped"] += orphans
        return orphans

    async def _try(self, name: str, run: Callable[[], Awaitable[int]]) -> int | None:
        """Run a round: whatever it raises, the process goes on and tries at the next one."""
        try:
            return await run()
        except (StoreUnavailableError, OSError) as error:
            _LOG.warning("maintenance waits", extra={"round": name, "reason": str(error)})
        except Exception:  # noqa: BLE001  # the edge of a round: one statement must not end us
            _LOG.exception("maintenance raised", extra={"round": name})
        return None

    async def _announce(self, ids: list[str]) -> None:
        if ids:
            await self.stores.queue.publish_finished(ids)
            self.announced()
