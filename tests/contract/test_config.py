"""Settings come from the environment, all faults are named at once."""

from ipaddress import ip_network
from pathlib import Path

import pytest

from contract.config import Settings, load_settings
from contract.errors import SettingsError


def test_an_empty_environment_gives_the_defaults() -> None:
    """Nothing needs to be set; other programs' variables are not ours."""
    settings = load_settings({"PATH": "/bin", "SCORE": "1"})

    assert settings == Settings()
    assert settings.database == f"sqlite+aiosqlite:///{Path.cwd()}/.scorekeep/scorekeep.db"
    assert settings.blobs == f"file://{Path.cwd()}/.scorekeep/blobs"
    assert settings.allowed_networks == []


def test_variables_are_read_with_their_types() -> None:
    """Numbers, switches and lists are parsed from their text."""
    settings = load_settings(
        {
            "SCOREKEEP_PORT": "0",
            "SCOREKEEP_SWEEP_S": "0.5",
            "SCOREKEEP_WEBHOOK_ALLOW_HTTP": "1",
            "SCOREKEEP_WEBHOOK_ALLOWED_NETWORKS": "127.0.0.0/8, ::1/128",
            "SCOREKEEP_DATABASE_URL": "postgresql+asyncpg://x/y",
            "SCOREKEEP_BLOB_URL": "s3://bucket",
        }
    )

    assert (settings.port, settings.sweep_s, settings.webhook_allow_http) == (0, 0.5, True)
    assert settings.allowed_networks == [ip_network("127.0.0.0/8"), ip_network("::1/128")]
    assert (settings.database, settings.blobs) == ("postgresql+asyncpg://x/y", "s3://bucket")


@pytest.mark.parametrize(("word", "value"), [("off", False), ("", False), ("YES", True)])
def test_switches_understand_the_usual_words(word: str, *, value: bool) -> None:
    """1, true, yes, on and their opposites, in any case."""
    assert load_settings({"SCOREKEEP_WEBHOOK_ALLOW_HTTP": word}).webhook_allow_http is value


def test_every_bad_variable_is_named_at_once() -> None:
    """A user mends all of them in one go."""
    with pytest.raises(SettingsError) as caught:
        load_settings(
            {
                "SCOREKEEP_PORT": "http",
                "SCOREKEEP_LEASE": "3",
                "SCOREKEEP_WEBHOOK_ALLOW_HTTP": "perhaps",
                "SCOREKEEP_LOG_FORMAT": "xml",
                "SCOREKEEP_LOG_LEVEL": "LOUD",
                "SCOREKEEP_WEBHOOK_ALLOWED_NETWORKS": "10.0.0.1/8",
                "SCOREKEEP_HEARTBEAT_S": "20",
                "SCOREKEEP_MAX_ITEMS": "0",
            }
        )

    for name in (
        "PORT",
        "LEASE:",
        "ALLOW_HTTP",
        "LOG_FORMAT",
        "LOG_LEVEL",
        "ALLOWED_NETWORKS",
        "HEARTBEAT_S",
        "MAX_ITEMS",
    ):
        assert f"SCOREKEEP_{name}" in str(caught.value) or name in str(caught.value)


@pytest.mark.parametrize("raw", ["-5", "nan", "inf", "1e12"])
def test_a_retention_is_a_time(raw: str) -> None:
    """A negative one would delete every result at once."""
    with pytest.raises(SettingsError, match="RESULT_TTL_S"):
        load_settings({"SCOREKEEP_RESULT_TTL_S": raw})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument the process's own variables are read."""
    monkeypatch.setenv("SCOREKEEP_PORT", "1234")

    assert load_settings().port == 1234
