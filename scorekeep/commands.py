"""The commands that talk to a running service: ``score`` and ``jobs``."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from contract.config import load_settings
from contract.jobs import JobState
from contract.scores import AttemptEnd, Job, Scores
from scorekeep.blocking import Client
from scorekeep.client import check_scored
from scorekeep.options import JobOptions
from scorekeep.score_parser import read_parameters
from scorekeep.up import render_address

__all__ = ["RUNS"]

_SOME_FAILED = 3
_JOB_COLUMNS = ("state", "model", "items", "created")


def run_score(options: argparse.Namespace) -> int:
    """Submit the items; wait for the scores and print them."""
    items = _read_items(options.items)
    with _client(options) as client:
        job = client.submit(items, **_job_options(options))
        if options.no_wait:
            _print_jobs([job], options)
            return 0
        job = client.wait(job, timeout_s=options.timeout)
        check_scored(job)
        scores = client.scores(job)
        if options.hidden_states is not None:
            _write(options.hidden_states, client.hidden_states_file(job))
    _print_scores(scores, items, options)
    return _SOME_FAILED if scores.errors else 0


def run_list(options: argparse.Namespace) -> int:
    """Print the newest jobs."""
    state = None if options.state is None else JobState(options.state)
    with _client(options) as client:
        page = client.list(state=state, model=options.model, limit=options.limit)
    _print_jobs(page.jobs, options)
    return 0


def run_show(options: argparse.Namespace) -> int:
    """Print one job."""
    with _client(options) as client:
        _print_job(client.get(options.id), options)
    return 0


def run_scores(options: argparse.Namespace) -> int:
    """Print the scores of a job."""
    with _client(options) as client:
        scores = client.scores(options.id)
    _print_scores(scores, [], options)
    return _SOME_FAILED if scores.errors else 0


def run_wait(options: argparse.Namespace) -> int:
    """Wait for the end of a job; fail as it failed."""
    with _client(options) as client:
        job = client.wait(options.id)
    _print_job(job, options)
    check_scored(job)
    return _SOME_FAILED if job.state is JobState.PARTIAL else 0


def run_cancel(options: argparse.Namespace) -> int:
    """Cancel a job."""
    with _client(options) as client:
        _print_job(client.cancel(options.id), options)
    return 0


def run_retry(options: argparse.Namespace) -> int:
    """Score what has no score."""
    with _client(options) as client:
        _print_job(client.retry(options.id), options)
    return 0


def run_delete(options: argparse.Namespace) -> int:
    """Delete a job."""
    with _client(options) as client:
        client.delete(options.id)
    return 0


RUNS: dict[str, Callable[[argparse.Namespace], int]] = {
    "score": run_score,
    "jobs list": run_list,
    "jobs show": run_show,
    "jobs scores": run_scores,
    "jobs wait": run_wait,
    "jobs cancel": run_cancel,
    "jobs retry": run_retry,
    "jobs delete": run_delete,
}


@contextmanager
def _client(options: argparse.Namespace) -> Iterator[Client]:
    settings = load_settings()
    url = options.url or settings.public_url or render_address(settings)
    with Client(url) as client:
        yield client


def _read_items(words: Sequence[str]) -> list[str]:
    items: list[str] = []
    for word in words:
        items += sys.stdin.read().splitlines() if word == "-" else [word]
    return items


def _job_options(options: argparse.Namespace) -> JobOptions:
    """Only what was given: what is left out has the service's defaults."""
    chosen = read_parameters(options)
    if options.model is not None:
        chosen["model"] = options.model
    if options.query is not None:
        chosen["query"] = options.query
    if options.hidden_states is not None:
        chosen["return_pooled_hidden_states"] = True
    if options.webhook is not None:
        chosen["webhook"] = options.webhook
    return chosen


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _print_json(value: Any) -> None:  # noqa: ANN401  # whatever msgspec encodes
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    sys.stdout.write(f"{text}\n")


def _print_jobs(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    if options.json:
        _print_json(jobs)
        return
    whole = [Column(name, no_wrap=True) for name in _JOB_COLUMNS]
    table = Table(Column("id", no_wrap=True, min_width=36), *whole, box=None, pad_edge=False)
    for job in jobs:
        created = f"{job.created_at[5:16].replace('T', ' ')}Z"  # a terminal has 80 columns
        table.add_row(job.id, job.state, Text(job.model), str(job.counts.total), created)
    Console().print(table)


def _print_job(job: Job, options: argparse.Namespace) -> None:
    if options.json:
        _print_json(job)
        return
    table = Table(box=None, show_header=False)
    counts = f"{job.counts.succeeded} of {job.counts.total} scored, {job.counts.failed} failed"
    rows = {
        "id": job.id,
        "state": str(job.state),
        "model": job.model,
        "items": counts,
        "attempt": str(job.attempt),
        "created": job.created_at,
        "finished": job.finished_at,
        "error": None if job.error is None else f"{job.error.code}: {job.error.message}",
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, Text(value))
    for ended in job.history:
        table.add_row(f"attempt {ended.attempt}", Text(_describe_attempt(ended)))
    Console().print(table)


def _describe_attempt(ended: AttemptEnd) -> str:
    why = "" if ended.error is None else f" ({ended.error.code}: {ended.error.message})"
    return f"{ended.outcome} at {ended.ended_at} by {ended.worker}{why}"


def _print_scores(scores: Scores, items: Sequence[str], options: argparse.Namespace) -> None:
    if options.json:
        _print_json(scores)
        return
    table = Table("#", "item", box=None)
    for label in scores.labels:
        table.add_column(Text(str(label)))
    faults = {error.index: f"{error.code}: {error.message}" for error in scores.errors}
    for index, row in enumerate(scores.scores):
        item = Text(items[index]) if index < len(items) else Text("")
        item.truncate(60, overflow="ellipsis")
        cells = [f"{value:.6f}" for value in row] if row is not None else [Text(faults[index])]
        table.add_row(str(index), item, *cells)
    console = Console()
    console.print(table)
    console.print(f"job {scores.job}, {scores.usage.prompt_tokens} tokens", highlight=False)
