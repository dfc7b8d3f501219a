"""What ``pip install`` of a built wheel gives: all that runs here runs there."""

import asyncio
import os
import re
import site
import subprocess
import sys
import venv
from pathlib import Path

import aiohttp
import pytest

ROOT = Path(__file__).parent.parent
#: Whatever is not one of the three packages that a client needs.
HEAVY = "numpy torch rich sqlalchemy alembic redis arq obstore transformers prometheus_client"


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return what it printed."""
    done = subprocess.run(  # noqa: S603  # our own commands
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_home(folder: Path) -> Path:
    """Build the wheel, install it alone into a new environment that borrows its dependencies."""
    pip = (sys.executable, "-m", "pip")
    source = folder / "source"
    names = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in names:  # a build leaves files beside its sources
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source, cwd=folder)
    home = folder / "venv"
    venv.create(home, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    python = home / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    return home


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_installed_wheel_runs(tmp_path: Path) -> None:
    """``scorekeep up`` migrates, serves, scores; docs page and types are there; SIGTERM ends it."""
    home = await asyncio.to_thread(make_home, tmp_path)
    (away := tmp_path / "away").mkdir()
    environment = {name: value for name, value in os.environ.items() if "SCOREKEEP" not in name}
    environment.pop("PYTHONPATH", None)
    process = await asyncio.create_subprocess_exec(
        str(home / "bin" / "scorekeep"),
        *("up", "--model", "tiny=builtin:deterministic", "--port", "0", "--data", "data"),
        cwd=away,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    lines: list[str] = []
    async with asyncio.timeout(120):
        while not (found := re.search(r"is ready: (\S+)", lines[-1] if lines else "")):
            line = await process.stdout.readline()
            assert line, "".join(lines)
            lines.append(line.decode())

    async with aiohttp.ClientSession(found.group(1)) as http:
        async with http.post("/v1/score", json={"items": ["a"]}) as answer:
            scored = await answer.json()
        async with http.get("/docs/docs.js") as answer:
            page = answer.status
    process.terminate()
    async with asyncio.timeout(60):
        await process.communicate()

    typed = home.glob("lib/python*/site-packages/*/py.typed")
    assert {"contract", "scorekeep"} <= {each.parent.name for each in typed}
    assert len(scored["scores"]) == 1
    assert page == 200
    assert process.returncode == 0


def test_the_client_needs_three_packages() -> None:
    """``import scorekeep`` works without any of the others; the command line says what it needs."""
    block = f"import sys; sys.modules.update(dict.fromkeys('{HEAVY}'.split()))"

    run(sys.executable, "-c", f"{block}; from scorekeep import AsyncClient, Client", cwd=ROOT)
    done = subprocess.run(  # noqa: S603  # our own command
        [sys.executable, "-c", f"{block}; from scorekeep.__main__ import main; sys.exit(main())"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "scorekeep[cli]" in done.stderr
