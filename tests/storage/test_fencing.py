"""The promise of at most one effect per job, against arbitrary interleavings, on both databases.

The last test is the check of the check: with the fence weakened in either of the two ways that
were seen in practice, the same property must fail.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from contract.errors import IllegalTransitionError
from contract.jobs import RETRYABLE, TERMINAL, JobState
from storage import statements
from storage.claims import ClaimedJob, claim_jobs, release_jobs, renew_leases, retry_later
from storage.database import Database
from storage.events import list_events
from storage.jobs import add_jobs, get_job
from storage.outcomes import cancel_job, complete_jobs, retry_job
from storage.sweeps import reap_jobs
from tests.services import run_apart
from tests.storage.factories import new_job, outcome, run_sql

_STEPS = st.lists(
    st.sampled_from(
        ["claim", "lapse", "complete", "fail", "cancel", "release", "retry", "renew", "again"]
    ),
    min_size=3,
    max_size=14,
)
_RUN = settings(
    max_examples=25,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
#: A worker stalls past its lease, another takes the job, the first comes back.
_STALL = ["claim", "lapse", "claim", "complete", "complete"]


@dataclass
class _Story:
    """One job, and every claim that was ever given for it, stale ones included."""

    database: Database
    job_id: str = ""
    claims: list[ClaimedJob] = field(default_factory=list)
    winner: int | None = None
    generation: int = 0

    async def play(self, steps: list[str]) -> None:
        """Run ``steps``; every holder of a claim, stale ones first, tries what a holder can."""
        async with self.database.transaction() as tx:
            (row,) = await add_jobs(tx, [new_job()])
        self.job_id = row.id
        for step in steps:
            await getattr(self, step)()
            await self._check()
        await run_sql(self.database, "DELETE FROM jobs")

    async def claim(self) -> None:
        async with self.database.transaction() as tx:
            limits: dict[str, Any] = {"max_jobs": 8, "max_tokens": 1000, "lease_s": 30.0}
            self.claims += await claim_jobs(tx, worker="w", models=["m"], **limits)

    async def lapse(self) -> None:
        await run_sql(self.database, "UPDATE jobs SET lease_until_at = 1 WHERE state = 'running'")
        async with self.database.transaction() as tx:
            await reap_jobs(tx, max_crashes=100, limit=10)

    async def complete(self) -> None:
        await self._end(JobState.SUCCEEDED)

    async def fail(self) -> None:
        await self._end(JobState.FAILED)

    async def again(self) -> None:
        """The client retries: legal where an end left items without a score, a new generation."""
        async with self.database.transaction() as tx:
            before = await get_job(tx, "t", self.job_id)
            if before.state not in RETRYABLE:
                with pytest.raises(IllegalTransitionError):
                    await retry_job(tx, "t", self.job_id)
                return
            row = await retry_job(tx, "t", self.job_id)
        assert (row.state, row.generation) == (JobState.QUEUED, before.generation + 1)
        self.generation, self.winner = row.generation, None

    async def _end(self, state: JobState) -> None:
        for held in self.claims:
            result = str(held.attempt).encode()
            async with self.database.transaction() as tx:
                if await complete_jobs(tx, [outcome(held, state=state, result=result)]):
                    assert self.winner is None, "two claims ended one job"
                    assert held.attempt == self.claims[-1].attempt, "a stale claim ended the job"
                    self.winner = held.attempt

    async def cancel(self) -> None:
        async with self.database.transaction() as tx:
            if (await get_job(tx, "t", self.job_id)).state not in TERMINAL:
                await cancel_job(tx, "t", self.job_id)

    async def release(self) -> None:
        await self._give_back(delay_s=None)

    async def retry(self) -> None:
        await self._give_back(delay_s=0.0)

    async def renew(self) -> None:
        for held in self.claims:
            async with self.database.transaction() as tx:
                renewal = await renew_leases(tx, worker="w", claims=[held.claim], lease_s=30)
                row = await get_job(tx, "t", self.job_id)
            holds = row.state is JobState.RUNNING and row.attempt == held.attempt
            assert (renewal.lost == set()) == holds, "a lost claim was renewed"

    async def _give_back(self, delay_s: float | None) -> None:
        for held in self.claims:
            async with self.database.transaction() as tx:
                before = await get_job(tx, "t", self.job_id)
                if delay_s is None:
                    given = await release_jobs(tx, [held.claim])
                else:
                    given = await retry_later(tx, [held.claim], None, delay_s)
            holds = before.state is JobState.RUNNING and before.attempt == held.attempt
            assert bool(given) == holds, "a lost claim was given back"

    async def _check(self) -> None:
        async with self.database.snapshot() as tx:
            row = await get_job(tx, "t", self.job_id)
            events = await list_events(tx, self.job_id)
        ended = self.generation + (row.state in TERMINAL)
        assert len(events) == ended, "not one event per ended generation"
        assert row.generation == self.generation, "a generation that nobody asked for"
        assert row.attempt == len(self.claims), "a claim without a number of its own"
        if row.result is not None and self.winner is not None:
            assert row.result == str(self.winner).encode(), "another's result"


def _play(url: str, steps: list[str]) -> None:
    async def play() -> None:
        database = Database(url)
        try:
            await _Story(database).play(steps)
        finally:
            await database.close()

    run_apart(play())


@pytest.mark.slow
def test_a_job_ends_once_and_by_its_holder(database_url: str) -> None:
    """Whatever claims, lapses, late completions, cancels and returns come in which order."""

    @_RUN
    @given(_STEPS)
    def check(steps: list[str]) -> None:
        _play(database_url, steps)

    check()
    _play(database_url, _STALL)


@pytest.mark.parametrize(
    "weakened", ["j.state = 'running'", "j.attempt = c.attempt"], ids=["state-only", "attempt-only"]
)
def test_the_property_notices_a_weakened_fence(
    database_url: str, weakened: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarded by the state alone or by the attempt alone, the property fails."""
    monkeypatch.setattr(statements, "FENCE", weakened)

    with pytest.raises(Exception, match=r"ended|one event|UNIQUE|unique"):
        _play(database_url, _STALL)


async def test_two_completions_at_once_have_one_winner(database: Database) -> None:
    """Two connections complete the same claim at the same moment."""
    async with database.transaction() as tx:
        await add_jobs(tx, [new_job() for _ in range(20)])
        held = await claim_jobs(
            tx, worker="w", models=["m"], max_jobs=20, max_tokens=1000, lease_s=30.0
        )

    async def finish(jobs: list[ClaimedJob]) -> set[str]:
        async with database.transaction() as tx:
            return await complete_jobs(tx, [outcome(job) for job in jobs])

    first, second = await asyncio.gather(finish(held), finish(held[::-1]))

    assert not first & second
    assert first | second == {job.id for job in held}
