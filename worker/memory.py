"""How much memory this process and its device use: the only place that asks."""

import os
import sys
from pathlib import Path

from storage.workers import Memory

__all__ = ["measure_memory"]

_STATM = Path("/proc/self/statm")


def measure_memory(statm: Path = _STATM) -> Memory:
    """Return what the system says now; any thread, microseconds.

    A device's memory is all that is used on it, by whichever process: that is what runs out.
    """
    used, total = _measure_device()
    return Memory(
        memory_bytes=_measure_process(statm),
        device_memory_bytes=used,
        device_memory_total_bytes=total,
    )


def _measure_process(statm: Path) -> int | None:
    """Return the resident bytes; None where the system has no /proc."""
    try:
        pages = int(statm.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _measure_device() -> tuple[int | None, int | None]:
    """Return used and total bytes of the GPU; a process that has not loaded torch has none."""
    torch = sys.modules.get("torch")  # not imported: that takes seconds, and means no GPU is used
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None, None
    free, total = torch.cuda.mem_get_info()
    return int(total - free), int(total)
