"""A model in float32 for a moment: what the reference of its canary is computed with.

The only place that changes a loaded model's precision, and it changes it back.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from worker.engine.foreign import Model

__all__ = ["free_bytes", "held_in_float32"]

_LOWER = (torch.bfloat16, torch.float16)
#: of the memory that is free, what a reference may take for a moment
_SHARE = 0.5
_CGROUP = Path("/sys/fs/cgroup")


@contextmanager
def held_in_float32(model: Model) -> Iterator[bool]:
    """Hold ``model``'s parameters in float32 within the ``with``; yield whether they are.

    They are not where some are quantised or offloaded, or where the copy would take more than
    half of the memory that is free. The parameters' own tensors come back at the end.
    """
    lower = [parameter for parameter in model.parameters() if parameter.dtype in _LOWER]
    if not _is_plain(model) or not _fits(lower):
        yield False
        return
    kept = [parameter.data for parameter in lower]
    try:
        with torch.inference_mode(mode=False), torch.no_grad():
            for parameter in lower:
                parameter.data = parameter.data.float()
        yield True
    finally:
        for parameter, data in zip(lower, kept, strict=False):
            parameter.data = data


def _is_plain(model: Model) -> bool:
    known = (*_LOWER, torch.float32, torch.float64)
    return all(
        parameter.dtype in known and parameter.device.type != "meta"
        for parameter in model.parameters()
    )


def _fits(parameters: list[torch.nn.Parameter]) -> bool:
    needed: dict[torch.device, int] = {}
    for parameter in parameters:
        needed[parameter.device] = needed.get(parameter.device, 0) + 4 * parameter.numel()
    return all(size <= _SHARE * free_bytes(device) for device, size in needed.items())


def free_bytes(device: torch.device) -> int:
    """Return how much memory is free for what lives on ``device``."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min(_free_of_machine(), _free_of_group())


def _free_of_machine() -> int:
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo")))
    return int(found[1]) * 1024 if found else 0


def _free_of_group() -> int:
    """A container's limit less what it uses; without a limit, as much as one likes."""
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if not (limit.isdigit() and used.isdigit()):
        return 1 << 62
    return int(limit) - int(used)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not Linux: nothing is known
        return ""
