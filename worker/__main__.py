"""``python -m worker [--model NAME …] [--deliveries-only]``: start one worker process."""

import argparse
import sys

from contract.config import load_settings
from contract.errors import SettingsError
from contract.logs import set_up_logging
from contract.tracing import set_up_tracing, shut_down_tracing
from worker.main import run


def main() -> int:
    """Read settings and arguments, run, return the exit code."""
    parser = argparse.ArgumentParser(prog="worker", description="Score jobs, deliver webhooks.")
    parser.add_argument("--model", action="append", metavar="NAME", help="serve only this model")
    parser.add_argument("--deliveries-only", action="store_true", help="deliver, load no model")
    arguments = parser.parse_args()
    try:
        settings = load_settings()
        set_up_logging(level=settings.log_level, style=settings.log_format)
        set_up_tracing("scorekeep-worker")
        try:
            return run(settings, arguments.model, deliveries_only=arguments.deliveries_only)
        finally:
            shut_down_tracing()
    except SettingsError as error:
        print(f"worker: {error.message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
