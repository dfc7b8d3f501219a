"""``scorekeep doctor``, ``models`` and ``completion``: what they say, and their exit codes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from contract.config import Settings
from contract.findings import Finding
from scorekeep import doctoring
from scorekeep.cli import main
from scorekeep.completion import SHELLS
from storage import checkup
from storage.backup import restore_backup, take_backup
from storage.migrating import migrate
from tests.scorekeep.scripted import Script

BASH = shutil.which("bash") or "bash"
BUILTIN = '[models.tiny]\nsource = "builtin:deterministic"\n'


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting is left over, no file is found by chance, nothing listens."""
    monkeypatch.setenv("COLUMNS", "2000")  # nothing is wrapped
    for name in [name for name in os.environ if name.startswith("SCOREKEEP_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCOREKEEP_PORT", "1")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A migrated data folder with its blobs."""
    folder = tmp_path / "data"
    (folder / "blobs").mkdir(parents=True)
    migrate(f"sqlite+aiosqlite:///{folder}/scorekeep.db")
    return folder


def test_all_is_well(
    data: Path, capsys: pytest.CaptureFixture[str], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part answers, the stores agree: 0."""
    Path("scorekeep.toml").write_text(BUILTIN)
    monkeypatch.setenv("SCOREKEEP_REDIS_URL", redis_url)

    code = main(["doctor", "--data", str(data), "--json"])

    told = json.loads(capsys.readouterr().out)
    parts = {each["part"]: each for each in told["findings"]}
    assert code == 0, told
    assert {"python", "api", "worker", "model tiny", "sql", "schema", "blobs", "redis"} <= set(
        parts
    )
    assert all(each["ok"] for each in told["findings"])
    assert told["consistency"]["rows without bytes"] == "0"


def test_what_is_wrong_comes_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No schema, no Redis, no checkpoint: each is named, with advice; 1."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "scorekeep.db").touch()
    (tmp_path / "checkpoint").mkdir()
    Path("scorekeep.toml").write_text(
        '[models.a]\nsource = "checkpoint"\n[models.b]\nsource = "/nowhere"\n'
        '[models.c]\nsource = "org/name"\n'
    )
    monkeypatch.setenv("SCOREKEEP_REDIS_URL", "redis://127.0.0.1:1/0")

    code = main(["doctor", "--data", str(tmp_path / "empty")])

    told = capsys.readouterr().out
    assert code == 1
    assert "scorekeep migrate" in told
    assert "SCOREKEEP_REDIS_URL" in told
    assert "holds no config.json" in told
    assert "/nowhere is no folder here" in told
    assert "taken for a hub id" in told


def test_a_check_that_dies_without_a_word(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code is said then."""
    monkeypatch.setattr(doctoring, "CHECKUP", (sys.executable, "-c", "import os; os._exit(9)"))

    code = main(["doctor", "--data", str(data), "--json"])

    (sql,) = [e for e in json.loads(capsys.readouterr().out)["findings"] if e["part"] == "sql"]
    assert (code, sql["detail"]) == (1, "the check ended with code 9")


def test_the_checkup_ends_without_the_interpreters_end(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is written by then; code 0. The interpreter's end aborted one of five."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setenv("SCOREKEEP_DATA_DIR", str(data))

    checkup.main()

    found = {each["part"]: each["ok"] for each in json.loads(capsys.readouterr().out)}
    assert ended == [0]
    assert found["sql"]
    assert found["blobs"]


def test_no_database_is_made(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is none yet that is said, and a backup can be restored there afterwards."""
    fresh = tmp_path / "fresh"
    fresh.mkdir()

    code = main(["doctor", "--data", str(fresh), "--json"])

    told = json.loads(capsys.readouterr().out)
    (sql,) = [each for each in told["findings"] if each["part"] == "sql"]
    assert (code, sql["ok"]) == (1, False)
    assert sql["detail"].endswith("no database yet")
    assert "scorekeep migrate" in sql["advice"]
    assert list(fresh.glob("scorekeep.db*")) == []
    take_backup(Settings(data_dir=str(data)), tmp_path / "out")
    assert restore_backup(Settings(data_dir=str(fresh)), tmp_path / "out").jobs == 0


def test_a_database_that_is_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named without its password, and the stores are not compared."""
    monkeypatch.setenv("SCOREKEEP_DATABASE_URL", "postgresql+asyncpg://me:secret@127.0.0.1:1/x")

    code = main(["doctor", "--data", str(tmp_path), "--json"])

    printed = capsys.readouterr().out
    told = json.loads(printed)
    (sql,) = [each for each in told["findings"] if each["part"] == "sql"]
    assert code == 1
    assert not sql["ok"]
    assert "secret" not in printed
    assert told["consistency"] == {}


def test_a_service_says_why_it_is_not_ready(
    data: Path,
    script: Script,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its reasons are printed."""
    reasons = [{"part": "queue", "code": "queue_unavailable", "detail": "no Redis"}]
    script.answer({"ready": False, "reasons": reasons}, status=503)
    monkeypatch.setenv("SCOREKEEP_PUBLIC_URL", script.url)

    code = main(["doctor", "--data", str(data)])

    assert code == 1
    assert "not ready: queue: no Redis" in capsys.readouterr().out


def test_stores_that_hang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that does not come back is ended, and that is a finding like others."""
    endless = (sys.executable, "-c", "import signal; signal.pause()")
    monkeypatch.setattr(doctoring, "CHECKUP", endless)
    monkeypatch.setattr(doctoring, "_TIMEOUT_S", 0.1)

    code = main(["doctor", "--data", str(tmp_path), "--json"])

    told = json.loads(capsys.readouterr().out)
    (stores,) = [each for each in told["findings"] if each["part"] == "stores"]
    assert (code, stores["ok"], told["consistency"]) == (1, False, {})
    assert "within 0.1 s" in stores["detail"]


def check_versions(monkeypatch: pytest.MonkeyPatch, **held: str | None) -> dict[str, Finding]:
    """Return the findings about packages where those of ``held`` are the only ones amiss."""
    monkeypatch.setattr(doctoring, "_version", lambda name: held.get(name, "1.0"))
    return {each.part: each for each in doctoring._check_versions()}


def test_versions_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing extras and a redis client that arq does not know are wrong."""
    found = check_versions(monkeypatch, redis="8.0.0", arq=None, torch=None)

    assert {part for part, each in found.items() if not each.ok} == {
        "api", "worker", "redis client",
    }  # fmt: skip
    assert "scorekeep[api]" in found["api"].advice
    assert "scorekeep[worker]" in found["worker"].advice


def test_a_machine_that_only_serves_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no torch; what is missing is told all the same."""
    found = check_versions(monkeypatch, torch=None, transformers=None)

    assert all(each.ok for each in found.values())
    assert "missing: torch, transformers" in found["worker"].detail


def test_models_are_listed(
    script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """State, reason and what each can do."""
    monkeypatch.setenv("SCOREKEEP_PUBLIC_URL", script.url)
    description = {
        "name": "a",
        "path": "classification",
        "architecture": "Bert",
        "labels": [f"l{n}" for n in range(9)],
        "hidden_size": 4,
        "max_tokens": 64,
        "dtype": "float32",
        "device": "cpu",
    }
    body = {
        "data": [
            {"id": "a", "object": "model", "state": "ready", "description": description},
            {"id": "b", "object": "model", "state": "failed", "reason": "no head"},
            {"id": "c", "object": "model", "state": "loading"},
        ]
    }
    script.answer(body)
    script.answer(body)

    codes = [main(["models", "list"]), main(["models", "list", "--json"])]

    told = capsys.readouterr().out
    assert codes == [0, 0]
    assert "Bert in float32 on cpu. l0, l1, l2, l3, l4, l5…" in told
    assert "no head" in told


def test_a_checkpoint_is_checked(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What it can do, or why it cannot be served; nothing is kept."""
    good = main(["models", "check", "builtin:deterministic", "--path", "causal"])
    shown = capfd.readouterr().out
    as_json = main(["models", "check", "builtin:deterministic", "--json"])
    parsed = json.loads(capfd.readouterr().out)
    (tmp_path / "bad").mkdir()
    bad = main(["models", "check", "bad", "--name", "mine"])
    said = capfd.readouterr().err

    assert (good, as_json, bad) == (0, 0, 1)
    assert "label tokens" in shown
    assert parsed["labels"] == ["negative", "positive"]
    assert "mine" in said
    assert "config.json" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["jo"], {"jobs"}),
        (["jobs", ""], {"list", "show", "cancel"}),
        (["jobs", "list", "--sta"], {"--state"}),
        (["models", "check", "--temp"], {"--template"}),
    ],
)
def test_bash_completes(
    words: list[str], expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands, their actions and options, in a real shell."""
    main(["completion", "bash"])
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    typed = " ".join(f'"{word}"' for word in ["scorekeep", *words])
    program = (
        f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _scorekeep; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )

    done = subprocess.run(  # noqa: S603  # the script is ours
        [BASH, "-c", program], capture_output=True, text=True, check=True
    )

    assert expected <= set(done.stdout.split())


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It names every command."""
    code = main(["completion", shell])

    told = capsys.readouterr().out
    assert code == 0
    for command in ("up", "score", "jobs", "models", "bulk", "doctor"):
        assert command in told
