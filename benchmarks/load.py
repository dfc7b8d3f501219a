"""What one API process does under load, on loopback: submits, a crowd, trickling bodies, a flood.

``python -m benchmarks.load [--scale 0.1] [--only crowd] [--json FILE]`` starts an API (SQLite, keys
required) and, for the flood, a worker with the deterministic scorer. It prints a table and writes
the same as JSON. ``--scale`` multiplies the numbers of clients: 1 is 5 000 long polls and 1 000
streams, which need ``ulimit -n`` of 8 000.
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.load_crowd import hold_crowd
from benchmarks.load_flood import TOKENS_A_JOB, flood, trickle
from benchmarks.load_rate import measure_submits
from benchmarks.load_service import serving
from tests.services import start_redis

_PARTS = ("submits", "crowd", "trickle", "flood")
_STEP_S = 5.0
_SPARE_FILES = 1000


def _allow_files(scale: float) -> int:
    """Open as many files as may be, this process's children too; return how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    needed = int(6000 * scale) + _SPARE_FILES
    if most < needed:
        message = f"ulimit -Hn is {most}, and {needed} files are needed"
        raise SystemExit(message)
    return most


async def _run(scale: float, parts: set[str]) -> dict[str, Mapping[str, object]]:
    figures: dict[str, Mapping[str, object]] = {}

    def tell(part: str, told: Mapping[str, object]) -> None:
        figures[part] = told
        sys.stdout.write(_render(part, told))
        sys.stdout.flush()

    with start_redis() as redis_url:
        roomy = {"BODY_TIMEOUT_S": "5", "MAX_WAIT_S": "600", "QUEUE_TOKENS": str(10**12)}
        if "submits" in parts:
            async with serving(redis_url, **roomy) as service:
                tell("submits", await measure_submits(service, max(1.0, _STEP_S * scale)))
        if "crowd" in parts:
            async with serving(redis_url, **roomy) as service:
                tell("crowd", await hold_crowd(service, scale))
        if "trickle" in parts:
            async with serving(redis_url, **roomy) as service:
                tell("trickle", await trickle(service, max(1, int(200 * scale))))
        if "flood" in parts:
            capacity = max(50, int(1000 * scale))
            tokens = str(capacity * TOKENS_A_JOB)
            async with serving(redis_url, QUEUE_TOKENS=tokens) as service:
                tell("flood", await flood(service, capacity))
    return figures


def _render(part: str, figures: Mapping[str, object]) -> str:
    width = max(map(len, figures))
    lines = [f"  {name:<{width}}  {_spell(value)}\n" for name, value in figures.items()]
    return f"{part}\n{''.join(lines)}\n"


def _spell(value: object) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name}: {_spell(each)}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return " to ".join(map(str, value)) or "none"
    return str(value)


def main() -> None:
    """Read the scale and the parts, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", choices=_PARTS, action="append")
    parser.add_argument("--json", type=Path, default=Path("load.json"))
    options = parser.parse_args()
    files = _allow_files(options.scale)
    figures = asyncio.run(_run(options.scale, set(options.only or _PARTS)))
    machine = {
        "cpus": os.cpu_count(),
        "load": [round(each, 1) for each in os.getloadavg()],
        "python": platform.python_version(),
        "files": files,
        "scale": options.scale,
    }
    options.json.write_text(json.dumps({"machine": machine, **figures}, indent=2) + "\n")
    sys.stdout.write(f"written to {options.json}\n")


if __name__ == "__main__":
    main()
