"""What can be typed after ``scorekeep keys``, and the words that ``storage.key_commands`` takes."""

import argparse
from collections.abc import Callable

__all__ = ["fill_keys", "render_words"]


def fill_keys(
    parser: argparse.ArgumentParser, add_data: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Add the actions of ``scorekeep keys``; they work on the database, not over HTTP."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
        action.set_defaults(action=name, run=parser.get_default("run"))
        add_data(action)
        action.add_argument("--json", action="store_true", help="print JSON")
        return action

    create = add("create", "make a key for a tenant, and print it, this once")
    create.add_argument("--tenant", required=True, metavar="NAME", help="whose key it is")
    create.add_argument(
        "--scope", metavar="WORDS", help="submit, read, admin, with commas (default: submit,read)"
    )
    create.add_argument("--expires-in-s", type=float, metavar="N", help="valid for so long")
    listing = add("list", "show keys; the secrets are not kept")
    listing.add_argument("--tenant", metavar="NAME", help="only of this tenant")
    add("revoke", "end a key now").add_argument("id", metavar="KEY", help="its id")
    rotate = add("rotate", "make a key in place of another, which is valid for a while yet")
    rotate.add_argument("id", metavar="KEY", help="the id of the old one")
    rotate.add_argument("--overlap-s", type=float, metavar="N", help="how long (default: 86400)")
    limits = add("limits", "show and set what a tenant may have, beside the settings")
    limits.add_argument("--tenant", required=True, metavar="NAME")
    limits.add_argument(
        "--set", action="append", metavar="LIMIT=N", help="such as queued_jobs=1000; repeat it"
    )
    limits.add_argument("--reset", action="store_true", help="first forget what was set")


def render_words(options: argparse.Namespace) -> list[str]:
    """Return what was typed, for ``storage.key_commands``."""
    words = [options.action]
    if getattr(options, "id", None):
        words.append(options.id)
    for name in ("tenant", "scope", "expires_in_s", "overlap_s"):
        value = getattr(options, name, None)
        if value is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    words += [f"--set={pair}" for pair in getattr(options, "set", None) or []]
    words += [f"--{name}" for name in ("reset", "json") if getattr(options, name, False)]
    return words
