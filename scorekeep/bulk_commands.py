"""The commands about bulks: ``bulk submit|watch|results|…`` and ``rescore``, with their options."""

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from contract.bulks import Bulk, BulkState, CacheUse
from contract.config import load_settings
from contract.webhooks import BULK_EVENTS
from scorekeep.bulk import BulkClient, count_done
from scorekeep.score_parser import fill_parameters, read_parameters
from scorekeep.up import render_address

__all__ = ["RUNS", "fill_bulk", "fill_rescore"]

_SOME_FAILED = 3
_FAILED = 1
_Act = Callable[[BulkClient, argparse.Namespace], Coroutine[Any, Any, int]]


async def _submit(bulks: BulkClient, options: argparse.Namespace) -> int:
    bulk = await bulks.submit(options.file, _bulk_options(options))
    return await _follow(bulks, bulk, options)


async def _rescore(bulks: BulkClient, options: argparse.Namespace) -> int:
    source = {"jobs": options.jobs} if options.bulk is None else {"bulk": options.bulk}
    request = {
        "source": source,
        "model": options.model,
        "return_pooled_hidden_states": True if options.hidden_states else None,
        "cache": options.cache,
        **_parameters(options),
    }
    given = {name: value for name, value in request.items() if value is not None}
    given |= _webhook(options)
    return await _follow(bulks, await bulks.rescore(given), options)


async def _list(bulks: BulkClient, options: argparse.Namespace) -> int:
    found = await bulks.list(limit=options.limit)
    if options.json:
        _print_json(found)
        return 0
    for bulk in found:
        _print_bulk(bulk, options)
    return 0


async def _show(bulks: BulkClient, options: argparse.Namespace) -> int:
    _print_bulk(await bulks.get(options.id), options)
    return 0


async def _watch(bulks: BulkClient, options: argparse.Namespace) -> int:
    return _print_end(await _show_progress(bulks, options.id), options)


async def _results(bulks: BulkClient, options: argparse.Namespace) -> int:
    bulk = await bulks.get(options.id)
    with _progress() as progress:
        task = progress.add_task("results", total=bulk.counts.lines)
        last = await bulks.write_results(
            options.id, options.output, lambda line: progress.update(task, completed=line)
        )
    Console(stderr=True).print(f"{last} of {bulk.counts.lines} lines in {options.output}")
    return 0


async def _hidden_states(bulks: BulkClient, options: argparse.Namespace) -> int:
    with _progress() as progress:
        task = progress.add_task("bytes", total=None)
        await bulks.write_hidden_states(
            options.id,
            options.output,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    return 0


async def _act(bulks: BulkClient, options: argparse.Namespace) -> int:
    _print_bulk(await bulks.act(options.id, options.action), options)
    return 0


async def _follow(bulks: BulkClient, bulk: Bulk, options: argparse.Namespace) -> int:
    if not options.watch:
        _print_bulk(bulk, options)
        return 0
    return _print_end(await _show_progress(bulks, bulk.id), options)


async def _show_progress(bulks: BulkClient, bulk_id: str) -> Bulk:
    with _progress() as progress:
        task = progress.add_task("validating", total=None)
        async for bulk in bulks.watch(bulk_id):
            done, total = count_done(bulk)
            progress.update(task, description=bulk.state.value, completed=done, total=total or None)
    return bulk


def _runner(act: _Act) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        settings = load_settings()
        url = options.url or settings.public_url or render_address(settings)

        async def main() -> int:
            async with BulkClient(url) as bulks:
                return await act(bulks, options)

        return asyncio.run(main())

    return run


RUNS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "rescore": _runner(_rescore),
    "bulk submit": _runner(_submit),
    "bulk list": _runner(_list),
    "bulk show": _runner(_show),
    "bulk watch": _runner(_watch),
    "bulk results": _runner(_results),
    "bulk hidden-states": _runner(_hidden_states),
    "bulk cancel": _runner(_act),
    "bulk pause": _runner(_act),
    "bulk resume": _runner(_act),
    "bulk retry": _runner(_act),
}


def fill_bulk(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``scorekeep bulk``."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
        action.set_defaults(run=RUNS[f"bulk {name}"], action=name)
        _add_service(action)
        return action

    submit = add("submit", "submit a file of JSONL, JSONL.gz, Parquet or CSV; twice is one bulk")
    submit.add_argument("file", type=Path, metavar="FILE")
    submit.add_argument("--model", help="which model (default: what the lines say)")
    submit.add_argument("--item", metavar="COLUMN", help="the column of the item (default: item)")
    submit.add_argument("--query", metavar="COLUMN", help="the column of the query")
    submit.add_argument("--id", metavar="COLUMN", help="the column of the id")
    submit.add_argument("--skip-invalid", action="store_true", help="run the good lines anyway")
    _add_running(submit)
    listing = add("list", "show bulks, newest first")
    listing.add_argument("--limit", type=int, default=20, help="how many (default: 20)")
    add("show", "show a bulk and its refused lines").add_argument("id", metavar="BULK")
    add("watch", "show the progress of a bulk until it ends").add_argument("id", metavar="BULK")
    results = add("results", "write results as JSONL; goes on where the file ends")
    results.add_argument("id", metavar="BULK")
    results.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    hidden = add("hidden-states", "fetch the hidden states as safetensors files with an index")
    hidden.add_argument("id", metavar="BULK")
    hidden.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    for name, text in (
        ("cancel", "stop a bulk; what was scored is kept"),
        ("pause", "keep workers from a bulk"),
        ("resume", "give a paused bulk back to the workers"),
        ("retry", "run what has no score again"),
    ):
        add(name, text).add_argument("id", metavar="BULK")


def fill_rescore(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``scorekeep rescore``."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("bulk", nargs="?", metavar="BULK", help="the bulk to score again")
    what.add_argument("--job", dest="jobs", action="append", metavar="JOB", help="or these jobs")
    parser.add_argument("--model", help="with this model (default: the same)")
    _add_running(parser)
    _add_service(parser)


def _add_running(parser: argparse.ArgumentParser) -> None:
    fill_parameters(parser)
    parser.add_argument("--hidden-states", action="store_true", help="keep the hidden states")
    parser.add_argument("--cache", choices=[str(each) for each in CacheUse], default="read")
    parser.add_argument("--watch", action="store_true", help="show the progress until the end")
    parser.add_argument("--webhook", metavar="URL", help="call this at its end, and on its way")
    parser.add_argument(
        "--webhook-event",
        dest="events",
        action="append",
        choices=[str(kind) for kind in BULK_EVENTS],
        help="only this type; may be repeated (default: all)",
    )


def _add_service(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", help="the service (default: SCOREKEEP_PUBLIC_URL, else host and port)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _bulk_options(options: argparse.Namespace) -> dict[str, Any]:
    columns = {"item": options.item, "query": options.query, "id": options.id}
    columns = {name: column for name, column in columns.items() if column is not None}
    if columns and "item" not in columns:
        columns["item"] = "item"
    return {
        "model": options.model,
        "columns": columns,
        "parameters": _parameters(options),
        "hidden_states": options.hidden_states,
        "on_invalid": "skip" if options.skip_invalid else "fail",
        "cache": options.cache,
        **_webhook(options),
    }


def _webhook(options: argparse.Namespace) -> dict[str, Any]:
    named = {"webhook": options.webhook, "webhook_events": options.events}
    return {name: value for name, value in named.items() if value is not None}


def _parameters(options: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = msgspec.to_builtins(read_parameters(options))
    return given


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


def _print_end(bulk: Bulk, options: argparse.Namespace) -> int:
    _print_bulk(bulk, options)
    if bulk.state is not BulkState.COMPLETED:
        return _FAILED
    return _SOME_FAILED if bulk.counts.failed or bulk.counts.lines_failed else 0


def _print_json(value: Any) -> None:  # noqa: ANN401  # whatever msgspec encodes
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    sys.stdout.write(f"{text}\n")


def _print_bulk(bulk: Bulk, options: argparse.Namespace) -> None:
    if options.json:
        _print_json(bulk)
        return
    counts = bulk.counts
    rate = "" if bulk.items_per_s is None else f", {bulk.items_per_s:.0f} items/s"
    sys.stdout.write(
        f"{bulk.id} {bulk.state.value}: {counts.lines_completed} of {counts.lines} lines, "
        f"{counts.scored} items scored, {counts.from_cache} of them from the cache, "
        f"{counts.failed} failed{rate}\n"
    )
    for error in bulk.errors:
        where = "" if error.line is None else f"line {error.line}: "
        sys.stdout.write(f"  {where}{error.code}: {error.message}\n")
