"""schemathesis with every check on, against the real processes: no answer that is not described."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.e2e.stack import Stack
from worker.engine.deterministic import SOURCE

#: A request that fits its schema may still ask for what cannot be done: 422 says so.
CONFIG = """
[checks]
positive_data_acceptance.expected-statuses = [
  "2xx", "400", "401", "403", "404", "406", "409", "410", "413", "416", "422", "5xx",
]
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_schemathesis_finds_nothing(redis_url: str, tmp_path: Path) -> None:
    """Bad input of every kind, and operations after one another: no 500, nothing undescribed."""
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    models = {"tiny": {"source": SOURCE}, "judge": {"source": SOURCE, "path": "causal"}}
    async with Stack(tmp_path, redis_url, models) as stack:
        await stack.start_worker()
        await stack.wait_for("/readyz")
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "schemathesis"),
            "--config-file",
            str(config),
            "run",
            f"{stack.url}/openapi.json",
            "--checks=all",
            "--phases=examples,fuzzing,stateful",
            "--exclude-path=/v1/overview/events",  # it never ends
            "--max-examples=2",
            "--seed=1",
            cwd=tmp_path,  # it keeps a cache beside itself
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()

    text = output.decode()
    assert process.returncode == 0, text
