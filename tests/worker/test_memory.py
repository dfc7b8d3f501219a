"""The memory that a worker reports of itself and of its device."""

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from worker.memory import measure_memory


def test_resident_memory_is_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """It agrees with another reader of the same system; without torch there is no device."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    measured = measure_memory()

    assert measured.memory_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert measured.device_memory_bytes is None
    assert measured.device_memory_total_bytes is None


@pytest.mark.parametrize("text", [None, "", "12", "a b"])
def test_a_system_that_does_not_say_is_none(tmp_path: Path, text: str | None) -> None:
    """No /proc, or another form of it, is no error."""
    path = tmp_path / "statm"
    if text is not None:
        path.write_text(text)

    assert measure_memory(path).memory_bytes is None


@pytest.mark.parametrize(("ready", "expected"), [(True, (30, 100)), (False, (None, None))])
def test_a_device_in_use_is_measured(
    monkeypatch: pytest.MonkeyPatch, *, ready: bool, expected: tuple[int | None, int | None]
) -> None:
    """Used is all that is not free; a GPU that this process has not begun to use is left alone."""
    cuda = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: ready, mem_get_info=lambda: (70, 100)
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    measured = measure_memory()

    assert (measured.device_memory_bytes, measured.device_memory_total_bytes) == expected
