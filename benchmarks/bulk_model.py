"""Real rows with a real classifier as a bulk, beside the engine's own rate in the same run.

``python -m benchmarks.bulk_model --model ~/.cache/scorekeep/demo/3/sentiment`` takes sentences
out of the documentation of the installed packages, and scores them by turns: through the engine
alone, in this process; as a bulk, with one worker; through the engine again. One thread each.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow

from benchmarks.bulk import Peak, render_cpu, wait_for_end
from scorekeep.bulk import BulkClient
from scorekeep.ray import Score
from tests.e2e.stack import Stack
from tests.services import start_redis
from worker.engine.loader import set_up_threads

_BATCH = 1024
_SENTENCE = re.compile(r"[A-Z][^.!?<>{}|=\n]{20,300}[.!?]")


def list_sentences(count: int) -> list[str]:
    """Return distinct sentences of what the installed packages and their modules say."""
    found: dict[str, None] = {}
    for text in _texts():
        found.update(dict.fromkeys(_SENTENCE.findall(text)))
        if len(found) >= count:
            return list(found)[:count]
    message = f"there are only {len(found)} sentences"
    raise SystemExit(message)


def _texts() -> Iterator[str]:
    for package in importlib.metadata.distributions():
        yield package.read_text("METADATA") or ""
    for package in importlib.metadata.distributions():
        for file in package.files or []:
            if file.suffix in {".py", ".md", ".rst", ".txt"}:
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    yield Path(str(file.locate())).read_text()


def time_engine(score: Score, texts: list[str]) -> tuple[list[list[float]], float, float]:
    """Return the scores, and the seconds by the clock and of CPU that the engine took.

    With one thread, as the processes of a ``Stack`` have.
    """
    set_up_threads(1)
    started, before = time.perf_counter(), time.process_time()
    rows: list[dict[str, Any]] = []
    for start in range(0, len(texts), _BATCH):
        table = pyarrow.table({"item": texts[start : start + _BATCH]})
        rows += score(table).to_pylist()
    total_s, cpu_s = time.perf_counter() - started, time.process_time() - before
    return [row["scores"] for row in rows], total_s, cpu_s


def _time_engine(score: Score, texts: list[str]) -> list[list[float]]:
    scores, total_s, cpu_s = time_engine(score, texts)
    sys.stdout.write(
        f"engine alone: {len(texts) / total_s:.1f} rows/s, {1e6 * cpu_s / len(texts):.0f} us of "
        "CPU a row\n"
    )
    return scores


def write_texts(path: Path, texts: list[str]) -> None:
    """Write a file of a row for each text."""
    lines = [{"custom_id": f"r{n}", "item": each} for n, each in enumerate(texts)]
    path.write_bytes(msgspec.json.Encoder().encode_lines(lines))


async def _time_bulk(folder: Path, redis: str, model: Path, texts: list[str]) -> list[list[float]]:
    path, out = folder / "rows.jsonl", folder / "out.jsonl"
    await asyncio.to_thread(write_texts, path, texts)
    async with Stack(folder, redis, {"m": {"source": str(model)}}) as stack:
        worker = await stack.start_worker()
        await stack.wait_for("/readyz")
        async with BulkClient(stack.url) as bulks:
            peak = Peak({"api": stack.api_pid, "worker": worker.pid})
            started = time.perf_counter()
            bulk = await bulks.submit(path, {"model": "m", "cache": "off"})
            bulk, _ = await wait_for_end(bulks, bulk)
            total_s = time.perf_counter() - started
            sys.stdout.write(
                f"as a bulk, HTTP to durable results: {bulk.counts.scored / total_s:.1f} rows/s; "
                f"CPU a row: {render_cpu(peak.spent_us(len(texts)))}\n"
            )
            await bulks.write_results(bulk.id, out)
    raw = await asyncio.to_thread(out.read_bytes)
    return [msgspec.json.decode(line)["scores"][0] for line in raw.splitlines()]


def main() -> None:
    """Run everything and print figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument(
        "--model", type=Path, default=Path("~/.cache/scorekeep/demo/3/sentiment").expanduser()
    )
    options = parser.parse_args()
    texts = list_sentences(options.rows)
    characters = sum(map(len, texts)) / len(texts)
    sys.stdout.write(f"{len(texts)} sentences of {characters:.0f} characters on average\n")
    score = Score("m", {"source": str(options.model)})
    _time_engine(score, texts[:_BATCH])  # warm
    first = _time_engine(score, texts)
    with tempfile.TemporaryDirectory(prefix="scorekeep-model-") as folder, start_redis() as redis:
        bulk = asyncio.run(_time_bulk(Path(folder), redis, options.model, texts))
    _time_engine(score, texts[: options.rows // 5])  # the neighbours may have changed meanwhile
    largest = max(
        abs(x - y) for a, b in zip(first, bulk, strict=True) for x, y in zip(a, b, strict=True)
    )
    sys.stdout.write(f"largest difference of a logit between the two: {largest:.2g}\n")


if __name__ == "__main__":
    main()
