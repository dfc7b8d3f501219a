"""The process itself: what it imports, how it starts and stops."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp

from tests.services import free_port

ROOT = Path(__file__).parents[2]
FORBIDDEN = ("torch", "transformers", "numpy", "worker")


def test_the_api_loads_no_model_code() -> None:
    """Importing everything of the API brings neither torch, transformers nor numpy."""
    code = (
        "import sys, pkgutil, importlib, api\n"
        "for module in pkgutil.walk_packages(api.__path__, 'api.'):\n"
        "    importlib.import_module(module.name)\n"
        f"print([name for name in {FORBIDDEN!r} if name in sys.modules])"
    )

    done = subprocess.run(  # noqa: S603  # our own code
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"


async def test_the_process_serves_and_stops(
    sqlite_url: str, blob_url: str, redis_url: str, tmp_path: Path
) -> None:
    """It listens where told, stops on SIGTERM with exit code 0, and answers who waits."""
    registry = tmp_path / "scorekeep.toml"
    registry.write_text('[models.tiny]\nsource = "x"\n')
    port = free_port()
    environment = {
        **os.environ,
        "SCOREKEEP_DATABASE_URL": sqlite_url,
        "SCOREKEEP_BLOB_URL": blob_url,
        "SCOREKEEP_REDIS_URL": redis_url,
        "SCOREKEEP_PORT": str(port),
        "SCOREKEEP_CONFIG": str(registry),
        "SCOREKEEP_LOG_FORMAT": "json",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "api", cwd=ROOT, env=environment, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    line = await process.stderr.readline()
    assert b"api is listening" in line

    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        body = {"model": "tiny", "items": ["a"]}
        async with session.post("/v1/jobs", json=body) as submitted:
            location = submitted.headers["Location"]
        polling = asyncio.create_task(session.get(f"{location}?wait=20"))
        await asyncio.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        polled = await polling

        assert submitted.status == 202
        assert polled.status == 200
        polled.release()
    assert await process.wait() == 0


def test_wrong_settings_are_one_line() -> None:
    """A wrong variable is named, with exit code 2 and no traceback."""
    environment = {**os.environ, "SCOREKEEP_PORT": "nonsense"}

    done = subprocess.run(
        [sys.executable, "-m", "api"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "SCOREKEEP_PORT" in done.stderr
