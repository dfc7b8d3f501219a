"""``scorekeep models``: what is served, and what a checkpoint could do before it is."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from contract.config import load_settings
from contract.findings import Finding
from contract.models import ModelConfig, ModelDescription, ModelStatus, ScoringPath
from scorekeep.blocking import Client
from scorekeep.launch import CHECKING
from scorekeep.up import render_address

__all__ = ["RUNS", "fill_models"]

_CHECK_EPILOG = """examples:
  scorekeep models check path/to/checkpoint
  scorekeep models check Qwen/Qwen3-Reranker-0.6B --template qwen3-reranker

the checkpoint is loaded, as a worker would; nothing is served and nothing is kept"""


def run_list(options: argparse.Namespace) -> int:
    """Print what is served."""
    settings = load_settings()
    with Client(options.url or settings.public_url or render_address(settings)) as client:
        models = client.models()
    if options.json:
        _print_json(models)
        return 0
    table = Table("model", "state", "what", box=None)
    for model in models:
        table.add_row(Text(model.name), model.state, Text(_tell(model)))
    Console().print(table)
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Load a checkpoint in a child process and print what it can do; 1 where it cannot serve."""
    folder = Path(options.source).expanduser()
    entry = ModelConfig(
        source=str(folder.absolute()) if folder.exists() else options.source,
        path=None if options.path is None else ScoringPath(options.path),
        template=options.template,
        dtype=options.dtype,
        device=options.device,
    )
    command = [*CHECKING, options.name, msgspec.json.encode(entry).decode()]
    done = subprocess.run(  # noqa: S603  # our own module
        command, env=dict(os.environ), stdout=subprocess.PIPE, check=False
    )
    try:
        found = msgspec.json.decode(done.stdout, type=dict[str, object])
    except msgspec.DecodeError:
        sys.stderr.write("scorekeep: the check broke off; its log says why\n")
        return 1
    if options.json:
        _print_json(found)
    elif "detail" in found:
        sys.stderr.write(f"scorekeep: {msgspec.convert(found, Finding).detail}\n")
    else:
        _print_description(msgspec.convert(found, ModelDescription))
    return done.returncode


RUNS: dict[str, Callable[[argparse.Namespace], int]] = {
    "models list": run_list,
    "models check": run_check,
}


def fill_models(
    parser: argparse.ArgumentParser,
    runs: Mapping[str, Callable[[argparse.Namespace], int]],
    add_service: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Add the actions of ``scorekeep models``."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show what is served, and why not where it is not")
    listing.set_defaults(run=runs["models list"])
    add_service(listing)
    text = "load a checkpoint and say what it can do, or why it cannot be served"
    check = actions.add_parser("check", help=text, description=f"{text.capitalize()}.")
    check.epilog = _CHECK_EPILOG
    check.formatter_class = argparse.RawDescriptionHelpFormatter
    check.set_defaults(run=runs["models check"])
    check.add_argument("source", metavar="SOURCE", help="a folder or a hub id")
    check.add_argument("--name", default="model", help="what to call it")
    check.add_argument("--path", choices=[str(path) for path in ScoringPath])
    check.add_argument("--template", help="a preset, a text with {query} and {item}, or none")
    check.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    check.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _tell(model: ModelStatus) -> str:
    if model.reason is not None:
        return model.reason
    if model.description is None:
        return ""
    told = model.description
    labels = ", ".join(told.labels[:6]) + ("…" if len(told.labels) > 6 else "")
    return f"{told.path}, {told.architecture} in {told.dtype} on {told.device}. {labels}"


def _print_description(told: ModelDescription) -> None:
    table = Table(box=None, show_header=False)
    rows: Sequence[tuple[str, object]] = (
        ("architecture", told.architecture),
        ("scores by", "label tokens" if told.path is ScoringPath.CAUSAL else "a head"),
        ("labels", ", ".join(told.labels) or "those of the request"),
        ("takes", "query and item as a pair" if told.pair else "query and item as one text"),
        ("tokens at most", told.max_tokens),
        ("dtype, device", f"{told.dtype}, {told.device}"),
        ("attention", told.attention),
        ("head, pooling", f"{told.head}, {told.pooling}"),
        ("activation", told.default_activation or "none"),
        ("hidden states", f"{told.hidden_size} wide: {told.hidden_states}"),
    )
    for name, value in rows:
        table.add_row(name, Text(str(value)))
    for what, reason in told.refusals.items():
        table.add_row("cannot", Text(f"{what}: {reason}"))
    Console().print(table)


def _print_json(value: object) -> None:
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    sys.stdout.write(f"{text}\n")
