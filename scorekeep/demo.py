"""``scorekeep demo``: the whole service once, on real models and sentences; says what it did."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from contract.config import PREFIX, load_settings
from contract.errors import ScoreError
from contract.models import ModelState
from contract.scores import Job, Scores
from contract.webhooks import Event, verify
from scorekeep.client import AsyncClient, check_scored
from scorekeep.demo_sentences import SHOWN
from scorekeep.demo_sources import prepare_models
from scorekeep.launch import LaunchOptions, find_registry, render_environment
from scorekeep.options import JobOptions
from scorekeep.redis_server import find_free_port
from scorekeep.up import Machine

__all__ = ["PROMPT", "run_demo"]

#: Two examples: without any, a model of this size does not separate the labels.
PROMPT = (
    "Review: I loved every minute of it.\nSentiment: positive\n\n"
    "Review: A complete waste of money.\nSentiment: negative\n\n"
    "Review: "
)
_LABELS = [" positive", " negative"]
_WEBHOOK_TIMEOUT_S = 30.0
_JOB_TIMEOUT_S = 300.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Received:
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one path made of the sentences."""

    job: Job
    scores: Scores
    positive: list[float]
    hidden: str
    seconds: float


def run_demo(console: Console, cache: Path) -> None:
    """Prepare the models, serve them, score with both, print the account.

    Raises ``ScoreError`` where anything is not as it must be.
    """
    began = time.monotonic()
    models = _prepare(console, cache)
    prepared_s = time.monotonic() - began
    with tempfile.TemporaryDirectory(prefix="scorekeep-demo-") as name:
        asyncio.run(_serve(console, Path(name), models))
    total_s = time.monotonic() - began
    console.print(f"Done in {total_s:.1f} s, of which preparing the models {prepared_s:.1f} s.")


def _prepare(console: Console, cache: Path) -> dict[str, Path]:
    console.print(f"Preparing the models in {cache} (once: about 180 MB to fetch)")
    columns = (TextColumn("  {task.description:<38}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars: dict[str, TaskID] = {}

        def advance(step: str, done: int, total: int) -> None:
            if step not in bars:
                bars[step] = progress.add_task(step)
            progress.update(bars[step], completed=done, total=total)

        models = prepare_models(cache, advance)
    facts = msgspec.json.decode((models["sentiment"] / "demo.json").read_bytes())
    console.print(
        f"  sentiment: MiniLM with a linear head fitted on {facts['trained_on']} sentences of "
        f"{facts['sentences']}; accuracy on {facts['held_out']} held out: {facts['accuracy']:.3f}"
    )
    console.print("  judge: SmolLM2-135M-Instruct, a causal language model")
    return models


async def _serve(console: Console, folder: Path, models: Mapping[str, Path]) -> None:
    options = LaunchOptions(
        data=folder,
        models=[f"{name}={path}" for name, path in models.items()],
        host="127.0.0.1",
        port=find_free_port(),
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment = render_environment(
        options,
        {
            **clean,
            "SCOREKEEP_WEBHOOK_ALLOW_HTTP": "1",
            "SCOREKEEP_WEBHOOK_ALLOWED_NETWORKS": "127.0.0.0/8",
        },
    )
    environment["SCOREKEEP_CONFIG"] = str(find_registry(options, load_settings(environment)))
    log = folder / "log.txt"
    with log.open("wb") as output:
        machine = Machine(
            environment, lambda line: console.print(line, highlight=False), output=output.fileno()
        )
        began = time.monotonic()
        try:
            await machine.start()
            console.print(f"Started on this machine in {time.monotonic() - began:.1f} s")
            await _score(console, machine.address)
        except ScoreError:
            console.print(log.read_text(errors="replace")[-4000:], markup=False, highlight=False)
            raise
        finally:
            await machine.stop()


async def _score(console: Console, address: str) -> None:
    texts = [text for text, _ in SHOWN]
    began = time.monotonic()
    async with _receiver() as (url, received), AsyncClient(address) as client:
        await _wait_for_models(client)
        console.print(f"All models loaded {time.monotonic() - began:.1f} s later\n")
        classifier = await _score_path(client, url, texts, model="sentiment")
        prompts = [f"{text}\nSentiment:" for text in texts]
        judge = await _score_path(client, url, prompts, model="judge")
        console.print(_render_table(classifier, judge))
        for name, outcome in (("sentiment", classifier), ("judge", judge)):
            console.print(_render_outcome(name, outcome), highlight=False)
        secret = await client.webhook_secret()
        for _ in range(2):
            got = await asyncio.wait_for(received.get(), timeout=_WEBHOOK_TIMEOUT_S)
            event = verify(got.body, got.headers, secret)
            console.print(_render_event(event, got), highlight=False)


async def _wait_for_models(client: AsyncClient) -> None:
    async with asyncio.timeout(_JOB_TIMEOUT_S):
        while any(  # noqa: ASYNC110  # another process
            model.state is ModelState.LOADING for model in await client.models()
        ):
            await asyncio.sleep(_POLL_S)


async def _score_path(client: AsyncClient, url: str, items: list[str], *, model: str) -> _Outcome:
    began = time.monotonic()
    options = JobOptions(
        model=model, apply_softmax=True, return_pooled_hidden_states=True, webhook=url
    )
    if model == "judge":
        options["query"], options["labels"] = PROMPT, _LABELS
    job = await client.wait(await client.submit(items, **options), timeout_s=_JOB_TIMEOUT_S)
    check_scored(job)
    scores = await client.scores(job)
    seconds = time.monotonic() - began
    hidden = await client.hidden_states(job)
    column = [str(label).strip() for label in scores.labels].index("positive")
    positive = [row[column] for row in scores.scores if row is not None]
    if len(positive) != len(items):
        message = f"{len(items) - len(positive)} of {len(items)} items have no score: {scores}"
        raise ScoreError(message)
    return _Outcome(job, scores, positive, f"{hidden.shape} {hidden.dtype}", seconds)


@asynccontextmanager
async def _receiver() -> AsyncIterator[tuple[str, "asyncio.Queue[_Received]"]]:
    """Listen on loopback for webhooks; yield the URL and what arrives."""
    received: asyncio.Queue[_Received] = asyncio.Queue()

    async def take(request: web.Request) -> web.Response:
        received.put_nowait(_Received(dict(request.headers), await request.read()))
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/hook", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}/hook", received
    finally:
        await runner.cleanup()


def _render_table(classifier: _Outcome, judge: _Outcome) -> Table:
    table = Table(title="How positive is it? (probability)", title_justify="left")
    table.add_column("sentence")
    table.add_column("truth")
    table.add_column("sentiment", justify="right")
    table.add_column("judge", justify="right")
    for index, (text, label) in enumerate(SHOWN):
        truth = "positive" if label else "negative"
        cells = (
            _render_probability(outcome.positive[index], label) for outcome in (classifier, judge)
        )
        table.add_row(text, truth, *cells)
    return table


def _render_probability(value: float, label: int) -> str:
    colour = "green" if (value > 0.5) == bool(label) else "red"
    return f"[{colour}]{value:.3f}[/]"


def _render_outcome(name: str, outcome: _Outcome) -> str:
    right = sum(
        (value > 0.5) == bool(label)
        for value, (_, label) in zip(outcome.positive, SHOWN, strict=True)
    )
    usage = outcome.scores.usage
    return (
        f"{name}: {right} of {len(SHOWN)} as a person would say; job {outcome.job.id} "
        f"{outcome.job.state} in {outcome.seconds:.2f} s, {usage.prompt_tokens} tokens; "
        f"hidden states {outcome.hidden}"
    )


def _render_event(event: Event, got: _Received) -> str:
    event_id = {name.lower(): value for name, value in got.headers.items()}["webhook-id"]
    return f"webhook {event.type} received, signature verified (webhook-id {event_id})"
