"""A short soak; ``make soak`` is the long one."""

from pathlib import Path

import pytest

from tests.chaos.soak import Sample, Soak, run_soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def test_nothing_grows(tmp_path: Path) -> None:
    """Memory, descriptors and lag stay, and Redis is empty at rest."""
    soak = await run_soak(tmp_path, 6)

    print(soak.render())  # noqa: T201
    assert soak.find_growth() == [], soak.render()
    assert soak.samples[-1].jobs == soak.jobs > 0
    assert set(soak.samples[-1].memory_mb) == {"api", "worker", "redis"}
    assert set(soak.samples[-1].lag_ms) <= {"api", "worker"}


def test_growth_is_found() -> None:
    """What the soak must find: memory, descriptors, lag that grow, and keys that are left."""

    def sample(memory_mb: float, descriptors: int, lag_ms: float) -> Sample:
        return Sample(0.0, 1, {"api": memory_mb}, {"api": descriptors}, {"api": lag_ms})

    soak = Soak(samples=[sample(100, 50, 5)] * 4 + [sample(150, 80, 200)] * 4, redis_keys=["k"])
    flat = Soak(samples=[sample(100, 50, 5), sample(110, 60, 9)])

    assert soak.find_growth() == [
        "Redis keys at rest: ['k']",
        "memory of api: 100 MB, then 150 MB",
        "descriptors of api: 50, then 80",
        "loop lag of api: 5 ms, then 200 ms",
    ]
    assert flat.find_growth() == []
