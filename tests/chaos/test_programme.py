"""A short run of the fault programme; ``make chaos`` is the long one."""

from pathlib import Path

import pytest

from tests.chaos.programme import Plan, run_programme

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SHORT = Plan(
    jobs=400,
    tiny_jobs=0,
    worker_kills=5,
    dispatcher_kills=1,
    postgres_restarts=1,
    redis_kills=1,
    stalls=1,
    workers=2,
    dispatchers=1,
    timeout_s=90,
    measures=False,
)


async def test_nothing_is_lost_and_nothing_is_doubled(tmp_path: Path) -> None:
    """400 jobs under nine faults: each ends once, rightly, by an attempt that the ledger has."""
    report = await run_programme(SHORT, tmp_path)

    print(report.render())  # noqa: T201
    assert report.is_good(SHORT), report.render()
    assert report.faults == {
        "worker kill -9": 5,
        "dispatcher kill -9": 1,
        "PostgreSQL immediate restart": 1,
        "Redis kill -9": 1,
        "SIGSTOP beyond the lease": 1,
    }
    assert report.second_attempts > 0
