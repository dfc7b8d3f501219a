"""A thousand one-item jobs submitted at once: jobs/s, and submit to stored result.

``python -m benchmarks.thousand_jobs SOURCE`` starts the whole service on one machine with the
model at SOURCE, submits, waits until every result is stored, then puts the same texts through the
same engine in this process: its forward time stands beside the service's.
"""

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
import time
from datetime import datetime

import aiohttp
import msgspec

from contract.models import ModelConfig
from contract.scores import Job, ScoreRequest
from tests.e2e.stack import wait_until_ready
from tests.services import free_port
from worker.engine.loader import load_model

CONNECTIONS = 64


def make_texts(count: int) -> list[str]:
    """Return distinct texts of 6 to 15 words."""
    words = [f"word{n}" for n in (3, 14, 15, 9, 26, 5, 35, 8, 97, 93, 23, 84, 62, 64, 33, 83)]
    return [" ".join(words[n % 7 : n % 7 + 6 + n % 9]) + f" {n}" for n in range(count)]


async def submit_all(http: aiohttp.ClientSession, url: str, texts: list[str]) -> list[str]:
    """Submit a job per text over ``CONNECTIONS`` connections; return their ids in order."""
    gate = asyncio.Semaphore(CONNECTIONS)

    async def submit(text: str) -> str:
        async with gate, http.post(f"{url}/v1/jobs", json={"items": [text]}) as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read(), type=Job).id

    return list(await asyncio.gather(*(submit(text) for text in texts)))


async def finish_all(http: aiohttp.ClientSession, url: str, ids: list[str]) -> list[Job]:
    """Return the jobs at their ends."""
    gate = asyncio.Semaphore(CONNECTIONS)

    async def finish(job_id: str) -> Job:
        async with gate:
            while True:
                async with http.get(f"{url}/v1/jobs/{job_id}", params={"wait": "30"}) as answer:
                    job = msgspec.json.decode(await answer.read(), type=Job)
                if job.finished_at is not None:
                    return job

    return list(await asyncio.gather(*(finish(job_id) for job_id in ids)))


def _latency_s(job: Job) -> float:
    if job.finished_at is None:
        raise RuntimeError(job.id)
    return (
        datetime.fromisoformat(job.finished_at) - datetime.fromisoformat(job.created_at)
    ).total_seconds()


async def _measure_service(source: str, texts: list[str]) -> tuple[float, float, list[Job]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="scorekeep-bench-") as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scorekeep", "up", "--model", f"m={source}"),
            *("--data", folder, "--port", str(port)),
        )
        try:
            async with aiohttp.ClientSession() as http:
                await wait_until_ready(http, url)
                await finish_all(http, url, await submit_all(http, url, texts[:32]))
                started = time.perf_counter()
                ids = await submit_all(http, url, texts)
                submitted_s = time.perf_counter() - started
                jobs = await finish_all(http, url, ids)
                return submitted_s, time.perf_counter() - started, jobs
        finally:
            process.send_signal(signal.SIGTERM)
            await process.wait()


def _measure_engine(source: str, texts: list[str]) -> float:
    scorer = load_model("m", ModelConfig(source=source))
    sequences = [
        sequence
        for text in texts
        for sequence in scorer.prepare(ScoreRequest(items=[text])).sequences
    ]
    sequences.sort(key=lambda sequence: sequence.cost_tokens)
    scorer.forward(sequences[:64])
    started = time.perf_counter()
    for start in range(0, len(sequences), 256):
        scorer.forward(sequences[start : start + 256])
    return time.perf_counter() - started


def main() -> None:
    """Run both measurements and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="a checkpoint folder")
    parser.add_argument("--jobs", type=int, default=1000)
    options = parser.parse_args()
    texts = make_texts(options.jobs)

    submitted_s, total_s, jobs = asyncio.run(_measure_service(options.source, texts))
    forward_s = _measure_engine(options.source, texts)

    latencies = statistics.quantiles(map(_latency_s, jobs), n=100)
    states = {job.state for job in jobs}
    sys.stdout.write(
        f"{len(jobs)} jobs, states {sorted(states)}: submitted in {submitted_s:.2f} s, "
        f"all stored after {total_s:.2f} s = {len(jobs) / total_s:.0f} jobs/s\n"
        f"submit to stored result: p50 {latencies[49]:.3f} s, p99 {latencies[98]:.3f} s\n"
        f"the engine alone, same texts in batches of 256: {forward_s:.2f} s\n"
    )


if __name__ == "__main__":
    main()
