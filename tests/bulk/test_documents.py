"""The scripts of docs/bulk.md run as they are printed."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from contract.models import ModelConfig
from tests.bulk.bench import MODELS, Bulks

ROOT = Path(__file__).parents[2]


async def test_the_openai_script_runs(sqlite_bulks: Bulks, tmp_path: Path) -> None:
    """With another address and nothing else changed it prints every row."""
    text = await asyncio.to_thread((ROOT / "docs/bulk.md").read_text)
    scripts = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    script = next(each for each in scripts if "OpenAI(" in each)
    await sqlite_bulks.start_worker(sentiment=ModelConfig(source=MODELS["tiny"].source))

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script.replace("http://127.0.0.1:8000", sqlite_bulks.service.url),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
    )
    printed, _ = await asyncio.wait_for(process.communicate(), 25)

    lines = printed.decode().splitlines()
    assert process.returncode == 0
    assert "completed" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["r0", "r1", "r2"]
