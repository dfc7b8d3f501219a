"""A log line carries its data as fields."""

import json
import logging

import pytest

from contract.logs import redact, set_up_logging


def test_json_lines_hold_the_extra_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """A line is one JSON object with time, level, logger, message and what was given in extra."""
    set_up_logging(level="INFO", style="json")

    logging.getLogger("here").info("claimed", extra={"jobs": 3, "worker": "w"})

    line = json.loads(capsys.readouterr().err)
    assert line["time"].endswith("+00:00")
    assert {key: line[key] for key in ("level", "logger", "message", "jobs", "worker")} == {
        "level": "INFO",
        "logger": "here",
        "message": "claimed",
        "jobs": 3,
        "worker": "w",
    }


def test_exceptions_are_one_json_field(capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback does not break the one-line-one-event rule."""
    set_up_logging(level="INFO", style="json")

    try:
        int("wrong")
    except ValueError:
        logging.getLogger("here").exception("failed")

    assert "ValueError: invalid" in json.loads(capsys.readouterr().err)["exception"]


def test_text_lines_end_in_the_extra_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """The same data, for a person; arq's own chatter is left out."""
    set_up_logging(level="INFO", style="text")

    logging.getLogger("here").info("claimed", extra={"jobs": 3})
    logging.getLogger("arq.worker").info("job arguments")

    printed = capsys.readouterr().err
    assert printed.rstrip().endswith("here: claimed jobs=3")
    assert "arguments" not in printed


@pytest.mark.parametrize(
    "secret",
    [
        "sk_0123456789abcdef_" + "S" * 43,
        "whsec_" + "S" * 32,
        "Authorization: Bearer SSSSSSSS",
        "postgresql+asyncpg://user:SSSSSSSS@host/name",
        "redis://:SSSSSSSS@host:6379/0",
        "s3://bucket?access_key_id=x&secret_access_key=SSSSSSSS&region=y",
    ],
)
def test_what_has_the_form_of_a_secret_is_cut_out(secret: str) -> None:
    """Whoever logs one by mistake; what stands around it stays."""
    cleaned = redact(f"before {secret} after")

    assert "SSSS" not in cleaned
    assert cleaned.startswith("before ")
    assert cleaned.endswith(" after")


@pytest.mark.parametrize("style", ["text", "json"])
def test_lines_are_cleaned_in_both_styles(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the message, in the data beside it, and in tracebacks."""
    set_up_logging(level="INFO", style=style)
    key = "sk_0123456789abcdef_" + "S" * 43
    try:
        int(key)
    except ValueError:
        logging.getLogger("x").exception("lost %s", key, extra={"url": f"redis://:{'S' * 9}@h/0"})

    assert "SSSS" not in capsys.readouterr().err
