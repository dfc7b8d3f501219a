"""Keeps the device fed: claims a batch while one is on the device and the last is being written.

SQL is the queue. Hints only wake the pump earlier; without any it sweeps every ``sweep_s``.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence

from contract.errors import ModelUnavailableError, StoreUnavailableError
from contract.jobs import LANES
from contract.models import ModelState
from storage import workers
from storage.claims import AGED_EVERY, Claim, ClaimedJob, claim_jobs, next_tenant
from storage.statements import render_hint
from worker.crashing import crash_here
from worker.engine.seam import Scorer
from worker.serving import Serving
from worker.steps import Steps
from worker.tasks import Tasks

__all__ = ["Pump"]

_LOG = logging.getLogger(__name__)
#: Batches claimed and not yet through the model: one on the device, one ready behind it.
_AHEAD = 2
#: A place of its own for what somebody waits for, while bulk fills the others.
_URGENT = 1
#: A job in whose hands so many workers died is claimed alone, and nothing after it until it ended.
_ALONE = 2
#: Batches being written at a time; more would only pile up in memory.
_WRITES = 4
#: A claim takes what the device works off in about so long, from one batch up to so many: a claim
#: and a commit cost some 10 ms, which a batch of a small model, or on a GPU, is over in.
_CLAIM_S = 0.25
_CLAIM_BATCHES = 8
_REMEMBERED = 10_000
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0


class _Place:
    """The right to have one batch ahead of the device, given back once."""

    def __init__(self, pump: "Pump", *, urgent: bool) -> None:
        self.urgent = urgent
        self._pump = pump
        self._held = True

    def free(self, *, wake: bool = True) -> None:
        """Let the pump claim another batch; the second time nothing happens."""
        if self._held:
            self._held = False
            self._pump.free_place(urgent=self.urgent)
            if wake:
                self._pump.wake()


class Pump:
    """Claims, and runs each claimed batch as a task of its own. Belongs to the event loop."""

    def __init__(self, tasks: Tasks, serving: Serving, *, worker: str) -> None:
        self._tasks = tasks
        self._serving = serving
        self._worker = worker
        self._settings = tasks.settings
        self._wake = asyncio.Event()
        self._stopping = False
        self._ahead = 0
        self._urgent = 0
        self._writes = asyncio.Semaphore(_WRITES)
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._claimed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._swept_at = 0.0
        self._after_tenant = ""
        self._claims = 0
        #: Estimated tokens of all jobs that were claimed: how fast the queue empties.
        self.tokens_claimed = 0
        self._backoff_s = _FIRST_BACKOFF_S

    def wake(self) -> None:
        """Look for work now."""
        self._wake.set()

    def stop(self) -> None:
        """Claim no more; the batch in flight ends, the rest is given back."""
        self._stopping = True
        self._tasks.batcher.close()
        self._wake.set()

    def free_place(self, *, urgent: bool) -> None:
        """Count one batch less ahead of the device."""
        if urgent:
            self._urgent -= 1
        else:
            self._ahead -= 1

    async def take_hint(self, job_id: str) -> None:
        """Act on a hint: nothing if the job was claimed here, else wait for the next claim.

        The wait leaves further hints to other workers while this one is full.
        """
        if job_id in self._recent or self._stopping:
            return
        claimed = self._claimed
        self._wake.set()
        await asyncio.wait([claimed], timeout=self._settings.sweep_s)

    async def run(self) -> None:
        """Pump until ``stop``; returns when every claimed batch is written or given back."""
        async with asyncio.TaskGroup() as group:
            while not self._stopping:
                self._wake.clear()
                place = self._take_place()
                jobs = await self._claim(place) if place is not None else []
                if place is not None and jobs:
                    batch = group.create_task(self._run_batch(place, jobs))
                    group.create_task(self._forget_hints(jobs))
                    if max(job.crash_count for job in jobs) >= _ALONE:
                        await asyncio.wait([batch])  # who is held beside it would be charged too
                    continue
                if place is not None:
                    place.free(wake=False)
                await self._fail_unserved()
                await self._sleep()

    def _take_place(self) -> _Place | None:
        if self._ahead < _AHEAD:
            self._ahead += 1
            return _Place(self, urgent=False)
        if self._urgent < _URGENT:
            self._urgent += 1
            return _Place(self, urgent=True)
        return None

    async def _sleep(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.sweep_s):
                await self._wake.wait()

    async def _claim(self, place: _Place) -> list[ClaimedJob]:
        models = list(self._serving.ready)
        if not models:
            return []
        since = time.monotonic()
        self._claims += 1  # not by chance: two aged claims in a row would hold up what is new
        try:
            async with self._tasks.stores.database.transaction() as tx:
                jobs = await claim_jobs(
                    tx,
                    worker=self._worker,
                    models=models,
                    max_jobs=self._settings.claim_jobs,
                    max_tokens=self._claim_tokens(place),
                    lease_s=self._settings.lease_s,
                    last_lane=LANES[0] if place.urgent else LANES[-1],
                    after_tenant=self._after_tenant,
                    aged_first=self._claims % AGED_EVERY == 0,
                    max_running_tokens=self._settings.tenant_running_tokens,
                )
        except StoreUnavailableError as error:  # the next sweep tries again
            _LOG.warning("nothing claimed", extra={"reason": error.message})
            return []
        except Exception:  # noqa: BLE001  # the edge of a claim: batches in flight must go on
            await self._back_off("claiming raised")
            return []
        self._backoff_s = _FIRST_BACKOFF_S
        if jobs:
            crash_here("after_claim", self._settings.crash_at)
        self._after_tenant = next_tenant(self._after_tenant, jobs)
        self.tokens_claimed += sum(job.estimated_tokens for job in jobs)
        self._tasks.leases.hold(jobs, since=since)
        self._remember(jobs)
        return jobs

    def _claim_tokens(self, place: _Place) -> int:
        """Return how many tokens to claim. What is urgent shares no commit with more than a batch.

        A claim of many batches delays nobody: the batcher puts what is urgent before the next one.
        """
        batch = self._settings.batch_tokens
        batcher = self._tasks.batcher
        if place.urgent or not batcher.forward_s:
            return batch
        in_time = int(_CLAIM_S * batcher.forward_tokens / batcher.forward_s)
        return max(batch, min(in_time, _CLAIM_BATCHES * batch))

    async def _forget_hints(self, jobs: Sequence[ClaimedJob]) -> None:
        """Take the claimed jobs' hints out of Redis at once: arq's own way costs 0.5 ms each."""
        hints = [render_hint(job.id, job.attempt, job.model) for job in jobs]
        await self._tasks.stores.queue.forget(hints)

    def _remember(self, jobs: Sequence[ClaimedJob]) -> None:
        for job in jobs:
            self._recent[job.id] = None
        while len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        self._claimed.set_result(None)
        self._claimed = asyncio.get_running_loop().create_future()

    async def _run_batch(self, place: _Place, jobs: Sequence[ClaimedJob]) -> None:
        try:
            scorer = self._serving.ready.get(jobs[0].model)
            if scorer is None:  # it failed its canary since the claim
                await self._tasks.release(jobs)
            else:
                await self._run_steps(place, scorer, jobs)
        except (StoreUnavailableError, OSError) as error:  # the leases end, the jobs run again
            _LOG.error("batch lost: the store is away", extra={"reason": str(error)})
        except Exception as error:  # noqa: BLE001  # the batch runner: its jobs end with an error
            _LOG.exception("batch raised", extra={"jobs": len(jobs)})
            await self._fail(jobs, error)
        finally:
            self._tasks.leases.drop([Claim(job.id, job.attempt) for job in jobs])
            place.free()

    async def _run_steps(self, place: _Place, scorer: Scorer, jobs: Sequence[ClaimedJob]) -> None:
        steps = Steps(jobs)
        try:
            with steps.step("prepare"):
                works = await self._tasks.prepare(scorer, jobs)
            with steps.step("forward"):
                await self._tasks.score(scorer, works)
            async with self._writes:
                place.free()
                with steps.step("store"):
                    await self._tasks.store(await self._tasks.conclude(scorer, works))
        finally:
            steps.end(slow_s=self._settings.slow_job_s)

    async def _fail(self, jobs: Sequence[ClaimedJob], error: Exception) -> None:
        try:
            await self._tasks.fail(jobs, error)
        except Exception:  # noqa: BLE001  # the leases end, and after max_crashes the jobs end as poisoned
            _LOG.exception("batch not failed", extra={"jobs": len(jobs)})

    async def _fail_unserved(self) -> None:
        """End the jobs of models that failed to load here and that no other worker serves."""
        if not self._serving.failed or time.monotonic() - self._swept_at < self._settings.sweep_s:
            return
        self._swept_at = time.monotonic()
        try:
            for name, reason in self._serving.failed.items():
                while jobs := await self._claim_unserved(name):
                    message = f"the model {name} cannot be served: {reason}"
                    await self._tasks.fail(jobs, ModelUnavailableError(message))
        except (StoreUnavailableError, OSError) as error:
            _LOG.warning("jobs of failed models wait", extra={"reason": str(error)})
        except Exception:  # noqa: BLE001  # as above: the next sweep tries again
            await self._back_off("ending jobs of failed models raised")

    async def _back_off(self, what: str) -> None:
        """Log the exception that is being handled and wait, longer each time, while hints wait."""
        _LOG.exception(what, extra={"again_in_s": self._backoff_s})
        await asyncio.sleep(self._backoff_s)
        self._backoff_s = min(self._backoff_s * 2, _LONGEST_BACKOFF_S)

    async def _claim_unserved(self, name: str) -> list[ClaimedJob]:
        since = time.monotonic()
        async with self._tasks.stores.database.transaction() as tx:
            rows = await workers.list_workers(tx, alive_within_s=self._settings.lease_s)
            statuses = [s for row in rows if row.id != self._worker for s in row.models]
            if any(s.name == name and s.state is not ModelState.FAILED for s in statuses):
                return []
            jobs = await claim_jobs(
                tx,
                worker=self._worker,
                models=[name],
                max_jobs=self._settings.claim_jobs,
                max_tokens=self._settings.batch_tokens,
                lease_s=self._settings.lease_s,
            )
        self._tasks.leases.hold(jobs, since=since)
        return jobs
