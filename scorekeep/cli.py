"""The command line's entry: runs one command and turns errors into a sentence and an exit code."""

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console

from contract.errors import RequestError, ScoreError, SettingsError, UnavailableError
from scorekeep import bulk_commands, commands, doctoring, model_commands, webhook_commands
from scorekeep.completion import run_completion
from scorekeep.demo import run_demo
from scorekeep.demo_sources import default_cache
from scorekeep.key_parser import render_words
from scorekeep.launch import (
    API,
    BACKUP,
    KEYS,
    MIGRATE,
    RESTORE,
    WORKER,
    LaunchOptions,
    render_environment,
)
from scorekeep.parser import create_parser
from scorekeep.up import up

__all__ = ["main"]

_INTERRUPTED = 128 + signal.SIGINT
_CUT_OFF = 128 + signal.SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    options = create_parser(_RUNS).parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CUT_OFF
    except ScoreError as error:
        return _print_error(error, as_json=getattr(options, "json", False))
    except TimeoutError as error:
        return _print_error(UnavailableError(str(error)), as_json=getattr(options, "json", False))
    except OSError as error:
        if error.filename is None:
            raise
        wrong = SettingsError(f"{error.filename}: {error.strerror}")
        return _print_error(wrong, as_json=getattr(options, "json", False))
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _run_demo(options: argparse.Namespace) -> int:
    run_demo(Console(), (options.cache or default_cache()).absolute())
    return 0


def _run_up(options: argparse.Namespace) -> int:
    up(_launch_options(options, options.models), os.environ, _say)
    return 0


def _run_api(options: argparse.Namespace) -> int:
    return _become(API, _launch_options(options))


def _run_worker(options: argparse.Namespace) -> int:
    models = [word for name in options.models for word in ("--model", name)]
    only = ["--deliveries-only"] if options.deliveries_only else []
    return _become((*WORKER, *models, *only), _launch_options(options))


def _run_migrate(options: argparse.Namespace) -> int:
    return _become(MIGRATE, LaunchOptions(data=options.data))


def _run_completion(options: argparse.Namespace) -> int:
    return run_completion(options, lambda: create_parser(_RUNS))


def _run_backup(options: argparse.Namespace) -> int:
    return _become((*BACKUP, str(options.folder.absolute())), LaunchOptions(data=options.data))


def _run_restore(options: argparse.Namespace) -> int:
    return _become((*RESTORE, str(options.folder.absolute())), LaunchOptions(data=options.data))


def _run_keys(options: argparse.Namespace) -> int:
    return _become((*KEYS, *render_words(options)), LaunchOptions(data=options.data))


_RUNS = {
    "demo": _run_demo,
    "up": _run_up,
    "api": _run_api,
    "worker": _run_worker,
    "migrate": _run_migrate,
    "backup": _run_backup,
    "restore": _run_restore,
    "keys": _run_keys,
    "completion": _run_completion,
    **doctoring.RUNS,
    **model_commands.RUNS,
    **commands.RUNS,
    **webhook_commands.RUNS,
    **bulk_commands.RUNS,
}


def _launch_options(options: argparse.Namespace, models: Sequence[str] = ()) -> LaunchOptions:
    return LaunchOptions(options.data, options.config, models, options.host, options.port)


def _become(command: Sequence[str], options: LaunchOptions) -> int:
    """Replace this process by the command: signals and the exit code are then its own."""
    environment = render_environment(options, os.environ)
    return _exec(command, environment)


def _exec(command: Sequence[str], environment: Mapping[str, str]) -> int:
    os.execve(command[0], list(command), dict(environment))  # noqa: S606  # no shell meant


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _print_error(error: ScoreError, *, as_json: bool) -> int:
    if as_json:
        body = {"code": error.code, "message": error.message, "param": error.param}
        text = msgspec.json.encode({"error": body}).decode()
    else:
        where = f" (at {error.param})" if error.param else ""
        text = "\n".join([f"scorekeep: {error.message}{where}", *getattr(error, "__notes__", [])])
    sys.stderr.write(f"{text}\n")
    if isinstance(error, UnavailableError):
        return 4
    return 2 if isinstance(error, RequestError | SettingsError) else 1
