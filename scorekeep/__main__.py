"""``python -m scorekeep``: the command line."""

import sys

from scorekeep.cli import main

if __name__ == "__main__":
    sys.exit(main())
