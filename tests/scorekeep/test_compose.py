"""docker-compose.yml and Dockerfile: valid, and each process is started as it can be started."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from contract.config import load_settings
from scorekeep.cli import _RUNS
from scorekeep.parser import create_parser

ROOT = Path(__file__).parents[2]
PROCESSES = ("migrate", "api", "worker", "worker-gpu", "deliveries")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services as Compose reads them, with the defaults of their variables."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "docker-compose.yml").read_text())
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def test_the_file_follows_the_compose_specification() -> None:
    """Checked against the schema that check-jsonschema ships."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    ended = subprocess.run(  # noqa: S603
        [*command, "vendor.compose-spec", str(ROOT / "docker-compose.yml")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("name", PROCESSES)
def test_each_process_has_a_command_and_settings_that_exist(
    services: dict[str, Any], name: str
) -> None:
    """The command line parses it, and no variable is refused; it is locked down."""
    service = services[name]

    create_parser(_RUNS).parse_args(service["command"])
    settings = load_settings(service["environment"])

    assert settings.database.startswith("postgresql+asyncpg://")
    assert settings.config == service["configs"][0]["target"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]


def test_the_images_start_the_command_line() -> None:
    """Both targets run as a user that is not root."""
    text = (ROOT / "Dockerfile").read_text()

    assert text.count('ENTRYPOINT ["python", "-P", "-m", "scorekeep"]') == 2
    assert text.count("USER 10001") == 2


@pytest.mark.parametrize("name", [*PROCESSES, "redis", "postgres", "s3"])
def test_no_container_can_gain_rights(services: dict[str, Any], name: str) -> None:
    """No capability, none to be had; the stores beside S3 run as their own user, read-only."""
    service = services[name]

    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    if name in {"redis", "postgres"}:
        assert (service["user"], service["read_only"]) == (name, True)


def test_the_api_listens_to_others_only_with_keys(services: dict[str, Any]) -> None:
    """Nothing in the file says that keys are off."""
    assert load_settings(services["api"]["environment"]).requires_keys


def test_redis_keeps_and_never_evicts(services: dict[str, Any]) -> None:
    """Append-only, noeviction; the GPU is reserved in its profile alone."""
    assert "--appendonly yes --maxmemory-policy noeviction" in " ".join(
        services["redis"]["command"]
    )
    (device,) = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    assert "deploy" not in services["worker"]
    for name in ("redis", "postgres", "s3", "api"):
        assert services[name]["healthcheck"]["test"]
