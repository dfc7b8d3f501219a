"""The application on SQLite."""

from tests.api.conftest import sqlite_service

__all__ = ["sqlite_service"]
