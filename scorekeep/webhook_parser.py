"""What can be typed after ``scorekeep webhooks`` and ``scorekeep listen``."""

import argparse
from collections.abc import Callable, Mapping

from contract.webhooks import SUBSCRIBABLE

__all__ = ["fill_listen", "fill_webhooks"]

_Run = Callable[[argparse.Namespace], int]
_Add = Callable[[argparse.ArgumentParser], None]


def fill_webhooks(
    parser: argparse.ArgumentParser, runs: Mapping[str, _Run], add_service: _Add
) -> None:
    """Add the actions of ``scorekeep webhooks``; ``add_service`` adds what all of them take."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
        action.set_defaults(run=runs[f"webhooks {name}"])
        add_service(action)
        return action

    def add_one(name: str, text: str) -> argparse.ArgumentParser:
        action = add(name, text)
        action.add_argument("id", metavar="ENDPOINT")
        return action

    add("list", "show the registered endpoints")
    create = add("create", "register an endpoint, and print its secret once")
    create.add_argument("target", metavar="URL")
    _add_fields(create)
    add_one("show", "show one endpoint")
    update = add_one("update", "change an endpoint")
    update.add_argument("--target", metavar="URL", help="where it is from now on")
    update.add_argument("--all-events", action="store_true", help="send it every event")
    _add_fields(update)
    rotate = add_one(
        "rotate", "replace a secret, and print the new one once; the old one holds 24 h"
    )
    rotate.epilog = "ENDPOINT default is the secret for the URLs of jobs"
    disable = add_one("disable", "send nothing more to an endpoint")
    disable.add_argument("--reason", help="kept with it")
    add_one("enable", "send to an endpoint again")
    add_one("delete", "remove an endpoint")
    add_one("test", "send a test event to an endpoint")
    log = add("log", "show deliveries with their attempts, newest first")
    log.add_argument("id", metavar="ID", help="an endpoint, a job, a bulk or one delivery")
    log.add_argument("--state", choices=["pending", "delivered", "dead"])
    log.add_argument("--limit", type=int, default=20, help="how many (default: 20)")
    _fill_redeliver(
        add("redeliver", "send one delivery again, or what was not delivered in a time")
    )


def fill_listen(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``scorekeep listen``."""
    parser.add_argument("--forward", metavar="URL", help="pass events on, as they came")
    parser.add_argument("--port", type=int, default=0, help="listen here (default: a free port)")
    parser.add_argument(
        "--secret",
        dest="secrets",
        action="append",
        metavar="whsec_...",
        help="verify with this secret; may be repeated (default: the service's, for URLs of jobs)",
    )
    parser.add_argument(
        "--no-register",
        action="store_true",
        help="register no endpoint: take only what jobs send here by their webhook",
    )
    _add_events(parser)


def _add_fields(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--description", help="yours, up to 512 characters")
    _add_events(parser)


def _add_events(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--event",
        dest="events",
        action="append",
        choices=[str(kind) for kind in SUBSCRIBABLE],
        help="only this type; may be repeated (default: all)",
    )


def _fill_redeliver(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", metavar="DELIVERY")
    parser.add_argument("--since", metavar="MOMENT", help="RFC 3339, such as 2026-11-30T09:00:00Z")
    parser.add_argument("--until", metavar="MOMENT", help="before this (default: now)")
    parser.add_argument("--endpoint", metavar="ENDPOINT", help="only its deliveries")
    parser.add_argument("--state", choices=["dead", "delivered", "any"], default="dead")
