"""What measurements print and keep: tables, and the machine that they were taken on.

The only place that says where results lie: ``--results``, by default beside the demo's models.
"""

import argparse
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from scorekeep.demo_sources import default_cache

__all__ = ["Report", "add_options", "describe_machine", "say"]


class Report:
    """Tables of one benchmark, printed as they come and written to one JSON file."""

    def __init__(self, name: str, folder: Path) -> None:
        self._path = folder / f"{name}.json"
        self._content: dict[str, Any] = {"machine": describe_machine(), "tables": {}}

    def add(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print a table, one column per name, and keep it. Numbers are rounded in print alone."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[_render(row.get(name, "")) for name in columns] for row in rows]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        say(f"\n{title}")
        for line in (columns, *cells):
            say("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        self._content["tables"][title] = [dict(row) for row in rows]
        self._write()

    def _write(self) -> None:
        """After each table: what was measured before an interruption is there."""
        self._content["load_after"] = os.getloadavg()[0]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_bytes(msgspec.json.format(msgspec.json.encode(self._content), indent=1))
        say(f"written: {self._path}")


def add_options(parser: argparse.ArgumentParser, parts: Sequence[str]) -> None:
    """Add ``--results``, ``--long`` and, to choose among ``parts``, ``--only``."""
    parser.add_argument("--results", type=Path, default=default_cache().parent / "bench")
    parser.add_argument("--long", action="store_true", help="the figures that documents quote")
    parser.add_argument("--only", choices=parts, action="append", default=None)


def describe_machine() -> dict[str, Any]:
    """Return what the figures depend on, the load of the neighbours included."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith(("model name", "flags"))
    ]
    flags = set(names[1].split()) if len(names) > 1 else set()
    wide = sorted(flag for flag in flags if flag.startswith(("avx", "amx")))
    return {
        "processor": names[0] if names else platform.processor(),
        "vectors": wide,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "system": platform.platform(),
    }


def say(line: str) -> None:
    """Print a line now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _render(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
