"""The service beside its own engine, and what a client waits: with a real model, in one run.

``python -m benchmarks.service_speed`` measures, each as a table: a bulk against the engine alone on
the same texts, in turn; the latency of single requests that arrive at 10, 50 and 80 % of what the
service can do, whether or not earlier ones were answered; submits; the start and the memory of
``scorekeep up``. The model is the demo's MiniLM classifier, with one thread.
"""

import argparse
import asyncio
import itertools
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import redis
import torch

from benchmarks.bulk import Peak, pass_through
from benchmarks.bulk_model import list_sentences, time_engine, write_texts
from benchmarks.report import Report, add_options, say
from benchmarks.thousand_jobs import finish_all, make_texts, submit_all
from contract.models import ModelConfig
from contract.scores import ScoreRequest
from scorekeep.bulk import BulkClient
from scorekeep.demo_sources import MODELS, default_cache, prepare_models
from scorekeep.ray import Score
from tests.e2e.stack import Stack, wait_until_ready
from tests.services import free_port, start_postgres, start_redis
from worker.engine.loader import load_model

_SHARES = (0.1, 0.5, 0.8)
_CLIENTS = 16
_PERCENT = 100


@dataclass(frozen=True, slots=True)
class Scale:
    """How long a run takes."""

    rows: int
    rounds: int
    load_s: float
    submits: int
    starts: int


_SHORT = Scale(rows=600, rounds=2, load_s=8.0, submits=2000, starts=1)
_LONG = Scale(rows=5000, rounds=5, load_s=60.0, submits=20_000, starts=5)


async def _compare(model: Path, scale: Scale, redis_url: str, folder: Path) -> list[dict[str, Any]]:
    """The same texts through the engine in this process and through the service, in turn."""
    texts = list_sentences(scale.rows)
    path = folder / "rows.jsonl"
    write_texts(path, texts)
    score = await asyncio.to_thread(Score, "m", {"source": str(model)})
    await asyncio.to_thread(time_engine, score, texts[:256])  # warm
    engine: list[tuple[float, float]] = []
    service: list[tuple[float, dict[str, float]]] = []
    async with Stack(folder, redis_url, {"m": {"source": str(model)}}) as stack:
        worker = await stack.start_worker()
        await stack.wait_for("/readyz")
        peak = Peak({"api": stack.api_pid, "worker": worker.pid})
        async with BulkClient(stack.url) as bulks:
            for number in range(scale.rounds):
                _, total_s, cpu_s = await asyncio.to_thread(time_engine, score, texts)
                engine.append((total_s, cpu_s))
                told = {"cache": "off", "metadata": {"round": str(number)}}
                took = await pass_through(bulks, path, len(texts), peak, **told)
                assert took.bulk.counts.scored == len(texts)
                service.append((took.total_s, took.cpu_us))
    alone_s = statistics.median(total for total, _ in engine)
    served_s = statistics.median(total for total, _ in service)
    over = [
        _PERCENT * (mine / own - 1) for (mine, _), (own, _) in zip(service, engine, strict=True)
    ]
    cpu = {name: statistics.median(us[name] for _, us in service) for name in ("api", "worker")}
    engine_us = 1e6 * statistics.median(cpu_s for _, cpu_s in engine) / len(texts)
    rows: list[dict[str, Any]] = [
        {"what": "engine", "rows/s": len(texts) / alone_s, "CPU us a row": engine_us},
        {
            "what": "service",
            "rows/s": len(texts) / served_s,
            "CPU us a row": sum(cpu.values()),
            "over the engine %": statistics.median(over),
            "API us": cpu["api"],
            "worker over the engine us": cpu["worker"] - engine_us,
        },
    ]
    return rows


async def _measure_latency(
    model: Path, scale: Scale, redis_url: str, folder: Path
) -> list[dict[str, Any]]:
    """Requests at given shares of the capacity: each waits for its scores, none for another."""
    texts = itertools.cycle(list_sentences(2000))
    forwards_ms = await asyncio.to_thread(_time_forwards, model, [next(texts) for _ in range(100)])
    rows: list[dict[str, Any]] = [
        {"load %": "engine alone", "p50 ms": forwards_ms[49], "p99 ms": forwards_ms[98]}
    ]
    async with Stack(folder, redis_url, {"m": {"source": str(model)}}) as stack:
        await stack.start_worker()
        await stack.wait_for("/readyz")
        url = f"{stack.url}/v1/score"
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            capacity = await _find_capacity(http, url, lambda: next(texts), scale.load_s)
            say(f"capacity, {_CLIENTS} clients in a closed loop: {capacity:.1f} requests/s")
            for share in _SHARES:
                taken = await _send_openly(
                    http, url, lambda: next(texts), capacity * share, scale.load_s
                )
                cuts = statistics.quantiles(taken, n=_PERCENT)
                rows.append(
                    {
                        "load %": _PERCENT * share,
                        "requests/s": capacity * share,
                        "requests": len(taken),
                        "p50 ms": cuts[49],
                        "p99 ms": cuts[98],
                        "p50 over the forward": cuts[49] - forwards_ms[49],
                        "p99 over the forward": cuts[98] - forwards_ms[98],
                    }
                )
    return rows


def _time_forwards(model: Path, texts: list[str]) -> list[float]:
    """The percentiles of one text's forward, tokenised before."""
    scorer = load_model("m", ModelConfig(source=str(model)))
    prepared = [scorer.prepare(ScoreRequest(items=[text])).sequences for text in texts]
    taken: list[float] = []
    for sequences in prepared[:10] + prepared:
        began = time.perf_counter()
        scorer.forward(sequences)
        taken.append((time.perf_counter() - began) * 1000)
    return statistics.quantiles(taken[10:], n=_PERCENT)


async def _ask(http: aiohttp.ClientSession, url: str, text: str) -> None:
    async with http.post(url, json={"model": "m", "items": [text]}) as answer:
        await answer.read()
        assert answer.status == 200, answer.status


async def _find_capacity(
    http: aiohttp.ClientSession, url: str, text: Callable[[], str], seconds: float
) -> float:
    done = 0
    began = time.perf_counter()

    async def client() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            await _ask(http, url, text())
            done += 1

    await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    return done / (time.perf_counter() - began)


async def _send_openly(
    http: aiohttp.ClientSession, url: str, text: Callable[[], str], rate: float, seconds: float
) -> list[float]:
    """Send at random moments, ``rate`` a second on average; return milliseconds to each answer."""
    draw = random.Random(7)  # noqa: S311  # arrivals, the same in each run
    taken: list[float] = []

    async def ask(due_at: float) -> None:
        await _ask(http, url, text())
        taken.append((time.perf_counter() - due_at) * 1000)

    async with asyncio.TaskGroup() as group:
        due_at = began = time.perf_counter()
        while due_at - began < seconds or len(taken) < 2:
            due_at += draw.expovariate(rate)
            await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
            group.create_task(ask(due_at))
    return taken


async def _measure_submits(scale: Scale, redis_url: str, folder: Path) -> list[dict[str, Any]]:
    """Submits over many connections, without a worker."""
    models = {"m": {"source": "builtin:deterministic"}}
    settings = {"SCOREKEEP_QUEUE_TOKENS": str(10**9)}
    async with (
        Stack(folder, redis_url, models, settings=settings) as stack,
        aiohttp.ClientSession() as http,
    ):
        worker = await stack.start_worker()
        await stack.wait_for("/readyz")
        await stack.stop(worker)
        await submit_all(http, stack.url, make_texts(200))  # warm
        peak = Peak({"api": stack.api_pid})
        began = time.perf_counter()
        await submit_all(http, stack.url, make_texts(scale.submits))
        took_s = time.perf_counter() - began
        return [
            {
                "submits": scale.submits,
                "submits/s": scale.submits / took_s,
                "API CPU us": peak.spent_us(scale.submits)["api"],
            }
        ]


async def _measure_jobs(scale: Scale, redis_url: str, folder: Path) -> list[dict[str, Any]]:
    """Single jobs on PostgreSQL, submitted together, to the last result: what each process does."""
    models = {"m": {"source": "builtin:deterministic"}}
    texts = make_texts(scale.submits)
    with start_postgres(durable=True) as server:
        server.execute("CREATE DATABASE jobs")
        async with (
            Stack(folder, redis_url, models, server.url("jobs")) as stack,
            aiohttp.ClientSession() as http,
        ):
            worker = await stack.start_worker()
            await stack.wait_for("/readyz")
            await finish_all(http, stack.url, await submit_all(http, stack.url, texts[:200]))
            processes = {"api": stack.api_pid, "postgres": server.process.pid, "worker": worker.pid}
            peak, redis_s = Peak(processes), _read_redis_cpu(redis_url)
            began = time.perf_counter()
            ids = await submit_all(http, stack.url, texts)
            submitted_s = time.perf_counter() - began
            await finish_all(http, stack.url, ids)
            took_s = time.perf_counter() - began
            spent = peak.spent_us(len(ids))
            redis_us = 1e6 * (_read_redis_cpu(redis_url) - redis_s) / len(ids)
    return [
        {
            "jobs": len(ids),
            "submits/s": len(ids) / submitted_s,
            "jobs/s to the last result": len(ids) / took_s,
            "API us": spent["api"],
            "PostgreSQL us": spent["postgres"],
            "worker us": spent["worker"],
            "Redis us": redis_us,
        }
    ]


def _read_redis_cpu(url: str) -> float:
    with redis.Redis.from_url(url) as client:
        told: Any = client.info("cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])


async def _measure_start(scale: Scale) -> list[dict[str, Any]]:
    """``scorekeep up`` with both demo models, from the command to ready; memory when it is."""
    named = [
        word for name in MODELS for word in ("--model", f"{name}={default_cache() / '3' / name}")
    ]
    taken: list[float] = []
    memory: dict[str, float] = {}
    for _ in range(scale.starts + 1):  # the first one reads the files into the page cache
        port = free_port()
        with tempfile.TemporaryDirectory(prefix="scorekeep-start-") as data:
            began = time.perf_counter()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "scorekeep", "up", *named),
                *("--data", data, "--port", str(port)),
                stdout=asyncio.subprocess.DEVNULL,
            )
            try:
                async with aiohttp.ClientSession() as http:
                    await wait_until_ready(http, f"http://127.0.0.1:{port}")
                    while not await _serves_all(http, port):  # noqa: ASYNC110  # another's process
                        await asyncio.sleep(0.05)
                taken.append(time.perf_counter() - began)
                memory = _list_memory(process.pid)
            finally:
                process.send_signal(signal.SIGTERM)
                await process.wait()
    rows: list[dict[str, Any]] = [
        {"what": "start to ready, s", "value": statistics.median(taken[1:])},
        {"what": "the first one, s", "value": taken[0]},
    ]
    rows += [{"what": f"{name}, MiB", "value": mebibytes} for name, mebibytes in memory.items()]
    return rows


async def _serves_all(http: aiohttp.ClientSession, port: int) -> bool:
    async with http.get(f"http://127.0.0.1:{port}/readyz") as answer:
        models = (await answer.json())["models"]
    return all(models.get(name) == "ready" for name in MODELS)


def _list_memory(pid: int) -> dict[str, float]:
    """Resident memory by process, shared pages counted in each."""
    found: dict[str, float] = {}
    parent = psutil.Process(pid)
    for process in [parent, *parent.children(recursive=True)]:
        words = process.cmdline()
        kind = Path(words[0]).name if "python" not in words[0] else words[-1]
        name = "up" if process.pid == pid else kind
        found[name] = found.get(name, 0.0) + process.memory_info().rss / 2**20
    return found


async def _run(options: argparse.Namespace) -> None:
    scale = _LONG if options.long else _SHORT
    parts = options.only or list(_PARTS)
    report = Report("service_speed", options.results)
    model = default_cache() / "3" / "sentiment"
    with start_redis() as url:
        for part in parts:
            with tempfile.TemporaryDirectory(prefix="scorekeep-service-") as name:
                folder = Path(name)
                if part == "engine":
                    report.add("service over engine", await _compare(model, scale, url, folder))
                elif part == "latency":
                    found = await _measure_latency(model, scale, url, folder)
                    report.add("latency under load", found)
                elif part == "jobs":
                    report.add("single jobs", await _measure_jobs(scale, url, folder))
                elif part == "submits":
                    report.add("submits", await _measure_submits(scale, url, folder))
                else:
                    report.add("start and memory", await _measure_start(scale))


_PARTS = ("engine", "latency", "submits", "jobs", "start")


def main() -> None:
    """Prepare the models and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, _PARTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prepare_models(default_cache(), lambda *_: None)
    asyncio.run(_run(options))


if __name__ == "__main__":
    main()
