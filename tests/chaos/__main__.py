"""``python -m tests.chaos``: the long fault programme; prints its table, 1 if a rule was broken."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.chaos.programme import Plan, run_programme


def main() -> int:
    """Run the programme."""
    standard = Plan()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--jobs", type=int, default=standard.jobs)
    parser.add_argument("--tiny-jobs", type=int, default=standard.tiny_jobs)
    parser.add_argument("--seed", type=int, default=standard.seed)
    options = parser.parse_args()
    plan = Plan(jobs=options.jobs, tiny_jobs=options.tiny_jobs, seed=options.seed, talks=True)
    with tempfile.TemporaryDirectory(prefix="scorekeep-chaos-") as folder:
        report = asyncio.run(run_programme(plan, Path(folder)))
    print(report.render())
    return 0 if report.is_good(plan) else 1


if __name__ == "__main__":
    sys.exit(main())
