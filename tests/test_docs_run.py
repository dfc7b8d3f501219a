"""Every command and every program in the documentation runs, against a live ``scorekeep up``.

A block that cannot is preceded by ``<!-- not run: WHY -->``. Of output that is shown after a
program, the number of lines and each one's first word are compared; JSON that is shown has the
fields that the service's own has.
"""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.services import free_port

ROOT = Path(__file__).parent.parent
#: Its programs are receivers, which have a test of their own.
RECEIVERS = "docs/webhooks.md"
#: Documents whose blocks run here.
DOCUMENTS = (
    "README.md",
    "docs/quickstart.md",
    "docs/how_to.md",
    "docs/compatible.md",
    "docs/command_line.md",
    "docs/http_api.md",
    "docs/bulk.md",
    "docs/operations.md",
    RECEIVERS,
)
BASH = shutil.which("bash") or "bash"
_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL
)
#: An address that nobody listens at stands for the reader's own.
_OUTSIDE, _NOBODY = "https://example.org/hook", "http://127.0.0.1:9/hook"
#: ``whe_…`` is the last such id that was printed.
_ID = re.compile(r"\b([a-z]{3})_[0-9a-f]{32}\b")
_ANY_ID = re.compile(r"\b([a-z]{3})_…")
_ADDRESS = re.compile(r"(?:localhost|127\.0\.0\.1):8000")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``why`` says why it does not run."""

    kind: str
    text: str
    why: str | None


@dataclass(frozen=True)
class Home:
    """A service, and a shell's surroundings in which ``scorekeep`` is a command."""

    url: str
    folder: Path
    environment: dict[str, str]


def read_blocks(name: str) -> list[Block]:
    """Return the blocks of a document."""
    text = (ROOT / name).read_text()
    return [Block(found["kind"], found["text"], found["why"]) for found in _BLOCK.finditer(text)]


def commands_of(text: str) -> str:
    """Return what is typed in a console block: lines after ``$``, with their continuations."""
    lines, typed = [], False
    for line in text.splitlines():
        if line.startswith("$ "):
            lines.append(line.removeprefix("$ "))
            typed = True
        elif typed:
            lines.append(line)
        typed = typed and line.endswith("\\")
    return "\n".join(lines)


def fill_in(commands: str, ids: dict[str, str]) -> str:
    """Put the id that was printed last in the place of each ``abc_…``."""
    return _ANY_ID.sub(lambda found: ids[found[1]], commands)


def first_words(text: str) -> list[str]:
    """Return the first word of each line."""
    return [line.split()[0] for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """``scorekeep up`` on the registry that how_to.md prints."""
    folder = tmp_path_factory.mktemp("docs")
    (registry,) = [each.text for each in read_blocks("docs/how_to.md") if each.kind == "toml"]
    (folder / "scorekeep.toml").write_text(registry)
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "scorekeep"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -m scorekeep "$@"\n')
    wrapper.chmod(0o755)
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if "SCOREKEEP" not in name} | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SCOREKEEP_PORT": str(port),
        "COLUMNS": "200",
        "SCOREKEEP_WEBHOOK_ALLOW_HTTP": "1",
        "SCOREKEEP_WEBHOOK_ALLOWED_NETWORKS": "127.0.0.0/8",
    }
    with (folder / "up.log").open("w+") as log:
        process = subprocess.Popen(  # noqa: S603  # our own command
            [str(wrapper), "up"], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log
        )
        assert process.stdout is not None
        lines: list[str] = []
        while "is ready" not in "".join(lines[-1:]):
            line = process.stdout.readline().decode()
            assert line, "".join(lines) + (folder / "up.log").read_text()
            lines.append(line)
        try:
            yield Home(f"http://127.0.0.1:{port}", folder, environment)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_runs(name: str, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, as a reader would: programs share their names, commands their folder."""
    monkeypatch.chdir(home.folder)
    names: dict[str, Any] = {"__name__": name}
    ids: dict[str, str] = {}

    blocks = read_blocks(name)
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.why is not None or block.kind not in {"console", "python"}:
            continue
        if name == RECEIVERS and block.kind == "python":
            continue
        text = _ADDRESS.sub(home.url.removeprefix("http://"), block.text)
        text = text.replace("Client()", f'Client("{home.url}")').replace(".venv/bin/", "")
        text = text.replace(_OUTSIDE, _NOBODY)
        if block.kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(text, name, "exec"), names)  # noqa: S102  # what users paste
            if after is not None and after.kind == "text":
                assert first_words(printed.getvalue()) == first_words(after.text)
            continue
        done = subprocess.run(  # noqa: S603  # what users type
            [BASH, "-euo", "pipefail", "-c", fill_in(commands_of(text), ids)],
            cwd=home.folder,
            env=home.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, text + done.stdout + done.stderr
        ids |= {found[1]: found[0] for found in _ID.finditer(done.stdout)}
    for opened in {"client", "classifier"} & names.keys():
        names[opened].__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_scores_that_are_shown(home: Home) -> None:
    """docs/http_api.md shows the answer with all its fields, and no others."""
    (text,) = [each.text for each in read_blocks("docs/http_api.md") if each.kind == "json"]
    body = json.dumps({"model": "sentiment", "items": ["good", "x" * 9000]}).encode()
    request = urllib.request.Request(  # noqa: S310  # our own service
        f"{home.url}/v1/jobs",
        body,
        {"Content-Type": "application/json", "Prefer": "wait=30"},
    )

    with urllib.request.urlopen(request) as answered:  # noqa: S310  # our own service
        job = json.load(answered)
    with urllib.request.urlopen(f"{home.url}/v1/jobs/{job['id']}/scores") as answered:  # noqa: S310
        answer = json.load(answered)

    shown = json.loads(text)
    assert shown.keys() == answer.keys()
    assert shown["usage"].keys() == answer["usage"].keys()
    assert shown["errors"][0].keys() == answer["errors"][0].keys()
    assert [len(each) for each in shown["tokens"]] == [len(each) for each in answer["tokens"]]
    assert shown["labels"] == answer["labels"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_does_not_run_says_why(name: str) -> None:
    """Each block is of a known kind; most of them run."""
    blocks = read_blocks(name)
    runs = [each for each in blocks if each.why is None and each.kind in {"console", "python"}]

    assert {each.kind for each in blocks} <= {"console", "python", "toml", "json", "text"}
    assert len(runs) >= len(blocks) / 3
