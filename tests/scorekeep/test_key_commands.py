"""``scorekeep keys``: what is typed, what is printed, and that the key opens the service."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.config import Settings, load_settings
from contract.errors import SettingsError
from scorekeep.cli import _RUNS
from scorekeep.key_parser import render_words
from scorekeep.launch import KEYS
from scorekeep.parser import create_parser
from storage.key_commands import main


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Type words after ``scorekeep keys``; return the exit code and what was printed."""
    monkeypatch.setenv("SCOREKEEP_DATA_DIR", str(tmp_path / "data"))

    def run(*words: str) -> tuple[int, str]:
        options = create_parser(_RUNS).parse_args(["keys", *words])
        code = main(render_words(options))
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_a_key_is_printed_once(run: Any) -> None:
    """Four members as JSON; the list has its prefix and its state, and never the key."""
    code, printed = run("create", "--tenant", "acme", "--json")
    made = json.loads(printed)
    _, listed = run("list", "--json")
    (row,) = json.loads(listed)

    assert code == 0
    assert set(made) == {"id", "key", "tenant", "scopes"}
    assert (made["tenant"], made["scopes"]) == ("acme", ["submit", "read"])
    assert made["key"] not in listed
    assert (row["id"], row["state"], row["last_used_at"]) == (made["id"], "valid", None)
    assert made["key"].startswith(row["prefix"])


def test_keys_are_rotated_and_revoked(run: Any) -> None:
    """The new one has the old one's scopes; the old one ends after the overlap."""
    made = json.loads(run("create", "--tenant", "a", "--scope", "admin", "--json")[1])
    rotated = json.loads(run("rotate", made["id"], "--overlap-s", "0", "--json")[1])
    revoked = json.loads(run("revoke", rotated["id"], "--json")[1])
    rows = json.loads(run("list", "--tenant", "a", "--json")[1])

    assert rotated["scopes"] == ["admin"]
    assert rotated["key"] != made["key"]
    assert revoked["state"] == "revoked"
    assert [row["state"] for row in rows] == ["expired", "revoked"]
    assert json.loads(run("list", "--tenant", "b", "--json")[1]) == []


def test_limits_of_a_tenant_are_set_and_reset(run: Any) -> None:
    """What is set stays until it is reset."""
    run("limits", "--tenant", "a", "--set", "queued_jobs=5", "--json")
    both = json.loads(run("limits", "--tenant", "a", "--set", "items=7", "--json")[1])
    reset = json.loads(run("limits", "--tenant", "a", "--reset", "--json")[1])

    assert both == {"tenant": "a", "queued_jobs": 5, "items": 7}
    assert reset == {"tenant": "a"}


def test_people_get_a_line_each(run: Any) -> None:
    """The key, and that it is not shown again."""
    code, printed = run("create", "--tenant", "acme", "--expires-in-s", "60")

    assert code == 0
    assert "tenant=acme" in printed
    assert printed.endswith("it is not shown again\n")
    assert "state=valid" in run("list")[1]
    assert run("list", "--tenant", "nobody")[1] == "there are no keys\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["create", "--tenant", "a b"], 2, "--tenant"),
        (["create", "--tenant", "a", "--scope", "root"], 2, "root"),
        (["create", "--tenant", "a", "--expires-in-s", "-1"], 2, "--expires-in-s"),
        (["create", "--tenant", "a", "--expires-in-s", "nan"], 2, "--expires-in-s"),
        (["rotate", "key_1"], 1, "key_1"),
        (["rotate", "key_1", "--overlap-s", "-1"], 2, "--overlap-s"),
        (["revoke", "key_1"], 1, "key_1"),
        (["limits", "--tenant", "a", "--set", "x=1"], 2, "x=1"),
    ],
)
def test_what_cannot_be_done_is_said(run: Any, words: list[str], code: int, said: str) -> None:
    """With the exit code of its kind, and nothing on the way."""
    found, printed = run(*words)

    assert found == code
    assert printed.startswith("scorekeep keys: ")
    assert said in printed


def test_the_command_line_reaches_the_database(tmp_path: Path) -> None:
    """``scorekeep keys create --data DIR`` as typed, in processes of its own."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    command = [sys.executable, "-m", "scorekeep", "keys", "create", "--tenant", "a", "--json"]
    done = subprocess.run(  # noqa: S603
        [*command, "--data", str(tmp_path / "d")],
        env=environment,
        capture_output=True,
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )

    assert json.loads(done.stdout)["key"].startswith("sk_")
    assert (tmp_path / "d" / "scorekeep.db").exists()
    assert KEYS[-1] == "storage.key_commands"


@pytest.mark.parametrize(
    ("auth", "host", "required"),
    [
        ("", "127.0.0.1", False),
        ("", "::1", False),
        ("", "localhost", False),
        ("", "0.0.0.0", True),  # noqa: S104
        ("", "example.org", True),
        ("off", "0.0.0.0", False),  # noqa: S104
        ("required", "127.0.0.1", True),
    ],
)
def test_keys_are_required_where_others_reach_us(auth: str, host: str, required: bool) -> None:
    """Off on loopback, required elsewhere, unless told."""
    assert Settings(auth=auth, host=host).requires_keys is required


def test_a_wrong_word_for_auth_is_refused() -> None:
    """It must not mean off."""
    with pytest.raises(SettingsError, match="SCOREKEEP_AUTH"):
        load_settings({"SCOREKEEP_AUTH": "of"})
