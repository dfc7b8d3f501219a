"""A process that serves collects rarely, and never what it began with."""

import subprocess
import sys

_SCRIPT = """
import gc
from contract.garbage import settle_garbage

settle_garbage()
print(gc.get_threshold()[0], gc.get_freeze_count() > 1000, gc.isenabled())
"""


def test_a_serving_process_is_settled() -> None:
    """In a process of its own: the tests' own collector is left alone."""
    printed = subprocess.run(  # noqa: S603  # ours
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )

    assert printed.stdout.split() == ["20000", "True", "True"]
