"""Brings a database's schema up to date: Alembic, run from code. Harmless when run twice.

``python -m storage.migrating`` reads the settings from the environment.
"""

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy.engine import make_url

from contract.config import load_settings
from contract.logs import set_up_logging

__all__ = ["create_config", "migrate"]

_logger = logging.getLogger(__name__)
_MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"


def create_config(url: str) -> Config:
    """Return Alembic's configuration for ``url``: no ini file."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["url"] = url
    return config


def migrate(url: str) -> None:
    """Bring the schema at ``url`` to the newest version; a SQLite file's folder is made.

    Blocks, and starts a loop of its own: from a coroutine use ``asyncio.to_thread``. On
    PostgreSQL several may run at once: they take turns.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    command.upgrade(create_config(url), "head")


def main() -> None:
    """Migrate the database that the settings name."""
    settings = load_settings()
    set_up_logging(level=settings.log_level, style=settings.log_format)
    migrate(settings.database)
    _logger.info("database migrated")


if __name__ == "__main__":
    main()
