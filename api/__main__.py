"""``python -m api``: the API process, with settings from the environment."""

import sys
from pathlib import Path

from api.main import run
from contract.config import load_settings
from contract.errors import ScoreError, SettingsError
from contract.logs import redact, set_up_logging
from contract.models import parse_models
from contract.tracing import set_up_tracing, shut_down_tracing


def main() -> int:
    """Read settings and registry, serve; a wrong setting is one line and exit code 2."""
    try:
        settings = load_settings()
        models = parse_models(Path(settings.config)) if settings.config else {}
    except SettingsError as error:
        print(redact(f"scorekeep api: {error}"), file=sys.stderr)
        return 2
    set_up_logging(level=settings.log_level, style=settings.log_format)
    set_up_tracing("scorekeep-api")
    try:
        run(settings, models)
    except ScoreError as error:
        print(redact(f"scorekeep api: {error}"), file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    finally:
        shut_down_tracing()
    return 0


if __name__ == "__main__":
    sys.exit(main())
