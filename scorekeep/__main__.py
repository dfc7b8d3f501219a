"""``scorekeep``, and ``python -m scorekeep``: the command line, where its extra is installed."""

import sys

__all__ = ["main"]


def main() -> int:
    """Run one command; say what to install where the command line's own packages are missing."""
    try:
        from scorekeep.cli import main as run  # noqa: PLC0415  # needs more than the client does
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        sys.stderr.write("scorekeep: the command line needs one more package: ")
        sys.stderr.write("pip install 'scorekeep[cli]'\n")
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
