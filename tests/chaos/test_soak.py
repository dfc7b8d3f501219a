"""A short soak; ``make soak`` is the long one."""

from pathlib import Path

import pytest

from tests.chaos.soak import run_soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def test_nothing_grows(tmp_path: Path) -> None:
    """Memory and descriptors stay, and Redis is empty at rest."""
    soak = await run_soak(tmp_path, 8)

    print(soak.render())  # noqa: T201
    for name in ("api", "worker"):
        assert soak.end.memory_mb[name] < soak.start.memory_mb[name] * 1.3 + 20, soak.render()
        assert soak.end.descriptors[name] <= soak.start.descriptors[name] + 16, soak.render()
    assert soak.redis_keys == []
