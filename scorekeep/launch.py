"""From a command line's options to the environment and the arguments of the service's processes.

The only place that knows their modules, ``api``, ``worker`` and ``storage.migrating``, and that
they are configured by their environment alone.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.config import Settings, load_settings
from contract.errors import SettingsError
from contract.models import parse_models

__all__ = [
    "API",
    "BACKUP",
    "DOCTOR",
    "KEYS",
    "MIGRATE",
    "RESTORE",
    "WORKER",
    "LaunchOptions",
    "find_registry",
    "render_environment",
]

#: ``-P`` keeps the working directory, where a user may have an ``api`` folder, off the path.
_PYTHON = (sys.executable, "-P", "-m")
API = (*_PYTHON, "api")
WORKER = (*_PYTHON, "worker")
MIGRATE = (*_PYTHON, "storage.migrating")
DOCTOR = (*_PYTHON, "storage.doctor")
BACKUP = (*_PYTHON, "storage.backup", "take")
RESTORE = (*_PYTHON, "storage.backup", "restore")
KEYS = (*_PYTHON, "storage.key_commands")

_DEFAULT_REGISTRY = Path("scorekeep.toml")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What a command line says; None leaves it to the environment and the defaults."""

    data: Path | None = None
    config: Path | None = None
    models: Sequence[str] = ()
    host: str | None = None
    port: int | None = None


def render_environment(options: LaunchOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for children: the given one, and the options that were given.

    Raises ``SettingsError`` for what the children would refuse.
    """
    given = {
        "SCOREKEEP_DATA_DIR": options.data and str(options.data.absolute()),
        "SCOREKEEP_CONFIG": options.config and str(options.config.absolute()),
        "SCOREKEEP_HOST": options.host,
        "SCOREKEEP_PORT": None if options.port is None else str(options.port),
    }
    merged = {**environment, **{name: value for name, value in given.items() if value}}
    load_settings(merged)
    return merged


def find_registry(options: LaunchOptions, settings: Settings) -> Path:
    """Return the registry file: from ``--model``, ``--config``, the environment, or right here.

    Models given as NAME=SOURCE are written into a file in the data folder. Raises
    ``SettingsError`` where there is none, or where it is wrong.
    """
    if options.models and options.config:
        message = "give either --config or --model, not both"
        raise SettingsError(message)
    if options.models:
        path = Path(settings.data_dir).absolute() / "models.toml"
        path.write_text(_render_registry(options.models))
    elif settings.config:
        path = Path(settings.config).absolute()
    elif _DEFAULT_REGISTRY.exists():
        path = _DEFAULT_REGISTRY.absolute()
    else:
        message = (
            "no model to serve: give --model NAME=SOURCE, or --config FILE, or write a "
            "scorekeep.toml here (see scorekeep.toml.example); scorekeep demo brings its own"
        )
        raise SettingsError(message)
    parse_models(path)
    return path


def _render_registry(models: Sequence[str]) -> str:
    tables = [_parse_model(model) for model in models]
    names = [name for name, _ in tables]
    for name in names:
        if names.count(name) > 1:
            message = f"--model {name} is given twice"
            raise SettingsError(message)
    # a JSON string is a TOML string
    return "".join(
        f"[models.{json.dumps(name)}]\nsource = {json.dumps(source)}\n" for name, source in tables
    )


def _parse_model(model: str) -> tuple[str, str]:
    name, equals, source = model.partition("=")
    if not equals or not source or not _NAME.fullmatch(name):
        message = f"--model {model}: write NAME=SOURCE, where SOURCE is a folder or a hub id"
        raise SettingsError(message)
    folder = Path(source).expanduser()
    return name, str(folder.absolute()) if folder.exists() else source
