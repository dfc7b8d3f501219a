"""The command line: what it prints, what it asks the service, which code it ends with."""

import io
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from scorekeep import cli, transport
from scorekeep.cli import main
from tests.scorekeep.scripted import JOB_ID, Script, job, problem, scores

DATA = save({"hidden_states": torch.zeros(1, 2)})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries take no time, tables are wide, and no setting is left over."""
    monkeypatch.setattr(transport, "_FIRST_BACK_OFF_S", 0.0)
    monkeypatch.setenv("COLUMNS", "160")
    for name in [name for name in os.environ if name.startswith("SCOREKEEP_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def url(script: Script, monkeypatch: pytest.MonkeyPatch) -> str:
    """The scripted service is the one that the settings name."""
    monkeypatch.setenv("SCOREKEEP_PUBLIC_URL", script.url)
    return script.url


def test_score_prints_a_table(script: Script, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One row per item, one column per label, the job's id."""
    script.answer(job(), status=202)
    script.answer(job("succeeded"))
    script.answer(scores([[0.25, 0.75], [1.0, 0.0]]))

    code = main(["score", "--model", "sentiment", "--softmax", "[bold]good", "bad " * 40])

    printed = capsys.readouterr().out
    assert code == 0
    assert script.calls[0].json == {
        "items": ["[bold]good", "bad " * 40],
        "model": "sentiment",
        "apply_softmax": True,
    }
    assert "negative" in printed
    assert "0.250000" in printed
    assert "[bold]good" in printed
    assert "…" in printed
    assert f"job {JOB_ID}, 7 tokens" in printed


def test_score_sends_every_option(
    script: Script, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each option is the request's field of that name; the file is the service's, byte by byte."""
    script.answer(job(), status=202)
    script.answer(job("succeeded"))
    script.answer(scores([[0.5]], labels=[" yes"]))
    script.answer(DATA)
    file = tmp_path / "hidden.safetensors"

    code = main(
        [
            *("score", "--url", url, "--json", "--query", "q", "--label", " yes"),
            *(
                "--instruction",
                "rate it",
                "--label-token-id",
                "7",
                "--activation",
                "none",
                "--truncation",
                "item",
            ),
            *("--webhook", "https://x.example/", "--hidden-states", str(file), "a"),
        ]
    )

    assert code == 0
    assert script.calls[0].json == {
        "items": ["a"],
        "query": "q",
        "instruction": "rate it",
        "labels": [" yes"],
        "label_token_ids": [7],
        "activation": "none",
        "truncation": "item",
        "webhook": "https://x.example/",
        "return_pooled_hidden_states": True,
    }
    assert file.read_bytes() == DATA
    assert json.loads(capsys.readouterr().out)["scores"] == [[0.5]]


def test_items_come_from_standard_input(
    script: Script, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dash reads one a line; --no-wait prints the job at once."""
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    script.answer(job(), status=202)

    code = main(["score", "--no-wait", "zero", "-"])

    assert code == 0
    assert script.calls[0].json["items"] == ["zero", "one", "two"]
    assert JOB_ID in capsys.readouterr().out


def test_some_items_without_scores_are_code_3(
    script: Script, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table says why, and a shell can tell."""
    script.answer(job(), status=202)
    script.answer(job("partial"))
    errors = [{"index": 1, "code": "input_too_long", "message": "9 tokens, limit 8"}]
    script.answer(scores([[0.5, 0.5], None], errors=errors))

    assert main(["score", "a", "b"]) == 3
    assert "input_too_long: 9 tokens, limit 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        (problem("unknown_model", 404, param="model"), 2, "unknown_model! (at model)"),
        (problem("no_capacity", 503), 4, "no_capacity!"),
        (problem("forward_failed", 500), 1, "forward_failed!"),
    ],
)
def test_errors_have_a_code_and_a_sentence(
    script: Script,
    url: str,
    capsys: pytest.CaptureFixture[str],
    answer: dict[str, Any],
    code: int,
    text: str,
) -> None:
    """The request is wrong, the service is away, or it failed."""
    for _ in range(5):
        script.answer(answer, status=answer["status"])

    assert main(["score", "a"]) == code
    assert f"scorekeep: {text}" in capsys.readouterr().err


def test_errors_as_json(script: Script, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json errors are JSON too, on standard error."""
    script.answer(problem("unknown_model", 404, param="model"), status=404)

    assert main(["score", "--json", "a"]) == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert error == {"code": "unknown_model", "message": "unknown_model!", "param": "model"}


def test_a_wait_that_takes_too_long_is_code_4(
    script: Script, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job goes on; the sentence has its id."""
    script.answer(job(), status=202)
    script.answer(job("running"))

    assert main(["score", "--timeout", "0", "a"]) == 4
    assert f"job {JOB_ID} is still running" in capsys.readouterr().err


def test_jobs_can_be_looked_at(
    script: Script, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """list, show, scores, wait: each prints what it fetched, as a table or as JSON."""
    script.answer({"data": [job("failed")]})
    assert main(["jobs", "list", "--state", "failed", "--model", "m", "--limit", "3"]) == 0
    assert script.calls[-1].query == {"state": "failed", "model": "m", "limit": "3"}
    script.answer({"data": [job()]})
    assert main(["jobs", "list", "--json"]) == 0
    lost = {"attempt": 1, "outcome": "lost", "worker": "wrk_1", "ended_at": "2026-11-30T00:00:00Z"}
    failed = {**lost, "attempt": 2, "outcome": "failed", "error": {"code": "x", "message": "y"}}
    error = {"code": "poisoned", "message": "three workers died"}
    script.answer(job("failed", error=error, history=[lost, failed]))
    assert main(["jobs", "show", JOB_ID]) == 0
    script.answer(job())
    assert main(["jobs", "show", "--json", JOB_ID]) == 0
    script.answer(scores([[0.5, 0.5]]))
    assert main(["jobs", "scores", JOB_ID]) == 0
    errors = [{"index": 0, "code": "x", "message": "y"}]
    script.answer(scores([None], errors=errors))
    assert main(["jobs", "scores", JOB_ID]) == 3
    script.answer(job("succeeded"))
    assert main(["jobs", "wait", JOB_ID]) == 0
    script.answer(job("partial"))
    assert main(["jobs", "wait", JOB_ID]) == 3

    printed = capsys.readouterr().out
    assert "poisoned: three workers died" in printed
    assert "lost at 2026-11-30T00:00:00Z by wrk_1" in printed
    assert "by wrk_1 (x: y)" in printed
    assert '"state": "queued"' in printed


def test_jobs_can_be_ended(script: Script, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Cancel prints the job, delete nothing; what has ended cannot be cancelled: code 1."""
    script.answer(job("cancelled"))
    assert main(["jobs", "cancel", JOB_ID]) == 0
    script.answer(b"", status=204)
    assert main(["jobs", "delete", JOB_ID]) == 0
    script.answer(problem("illegal_transition", 409), status=409)
    assert main(["jobs", "cancel", JOB_ID]) == 1
    script.answer(job("cancelled"))
    assert main(["jobs", "wait", JOB_ID]) == 1


def test_a_bad_setting_is_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is sent."""
    monkeypatch.setenv("SCOREKEEP_PORT", "http")

    assert main(["score", "a"]) == 2
    assert "SCOREKEEP_PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "module", "more", "variables"),
    [
        (["api", "--host", "::1", "--port", "1"], "api", [], {"HOST": "::1", "PORT": "1"}),
        (["worker", "--config", "/c"], "worker", [], {"CONFIG": "/c"}),
        (
            ["worker", "--model", "a", "--model", "b", "--deliveries-only"],
            "worker",
            ["--model", "a", "--model", "b", "--deliveries-only"],
            {},
        ),
        (["migrate", "--data", "/d"], "storage.migrating", [], {"DATA_DIR": "/d"}),
    ],
)
def test_one_process_takes_our_place(
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    module: str,
    more: list[str],
    variables: dict[str, str],
) -> None:
    """api, worker and migrate become that process, configured by its environment alone."""
    became: list[tuple[list[str], dict[str, str]]] = []

    def become(_path: str, command: list[str], environment: dict[str, str]) -> int:
        became.append((command, environment))
        return 0

    monkeypatch.setattr(os, "execve", become)

    main(words)

    ((command, environment),) = became
    assert command == [sys.executable, "-P", "-m", module, *more]
    given = {name: value for name, value in environment.items() if name.startswith("SCOREKEEP_")}
    assert given == {f"SCOREKEEP_{name}": value for name, value in variables.items()}


def test_up_and_demo_get_their_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is typed reaches them; without --cache the demo uses the user's cache folder."""
    asked: list[Any] = []

    def run_up(options: object, _environment: object, report: Any) -> None:
        asked.append(options)
        report("a line")

    monkeypatch.setattr(cli, "up", run_up)
    monkeypatch.setattr(cli, "run_demo", lambda _console, cache: asked.append(cache))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert main(["up", "--model", "a=b", "--port", "0"]) == 0
    assert main(["demo"]) == 0
    assert main(["demo", "--cache", str(tmp_path / "c")]) == 0

    assert (asked[0].models, asked[0].port) == (["a=b"], 0)
    assert asked[1:] == [tmp_path / "scorekeep" / "demo", tmp_path / "c"]
    assert capsys.readouterr().out == "a line\n"


def test_a_file_that_is_not_there_is_code_2(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence with its name, and no traceback."""
    missing = str(tmp_path / "corpus.jsonl")

    assert main(["bulk", "submit", missing, "--url", url]) == 2
    assert capsys.readouterr().err == f"scorekeep: {missing}: No such file or directory\n"


def test_another_fault_of_the_system_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what names a file is the user's."""

    def fail(*_arguments: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(cli, "run_demo", fail)

    with pytest.raises(OSError, match="Input/output"):
        main(["demo"])


def test_a_reader_that_stops_is_code_141() -> None:
    """As in ``scorekeep completion bash | head -1``: quietly."""
    command = [sys.executable, "-m", "scorekeep", "completion", "bash"]
    with subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as ended:
        assert ended.stdout is not None
        assert ended.stderr is not None
        ended.stdout.close()
        told = ended.stderr.read()

    assert (ended.wait(), told) == (128 + signal.SIGPIPE, b"")


def test_no_service_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """4, and how to start one."""
    assert main(["jobs", "list", "--url", "http://127.0.0.1:1"]) == 4
    assert "scorekeep up starts one" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The package's."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"scorekeep {version('scorekeep')}\n"


def test_an_interrupt_is_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """As shells expect."""

    def interrupt(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_demo", interrupt)

    assert main(["demo"]) == 128 + signal.SIGINT


@pytest.mark.parametrize(
    "words", [[], ["score", "--help"], ["up", "--help"], ["jobs", "--help"], ["demo", "--help"]]
)
def test_help_teaches(words: list[str]) -> None:
    """Every help has a description; without a command, the usage and code 2."""
    ended = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "scorekeep", *words], capture_output=True, text=True, check=False
    )

    assert ended.returncode == (0 if words else 2)
    assert "usage: scorekeep" in ended.stdout + ended.stderr


def test_the_command_line_never_loads_torch() -> None:
    """Nor numpy: the client and the supervisor stay light."""
    code = (
        "import sys, scorekeep, scorekeep.cli; heavy = {'torch', 'transformers', 'numpy'}; "
        "sys.exit(bool((heavy | {'sqlalchemy', 'redis'}) & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603
