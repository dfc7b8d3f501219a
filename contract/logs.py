"""Logging for every process: one line per event, data in ``extra``, never inputs or secrets."""

import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

__all__ = ["redact", "set_up_logging"]

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


#: Keys of ours, signing secrets, what a header of a client carries, passwords in addresses.
_SECRETS = re.compile(
    r"(sk_[0-9a-f]{16}_)[\w-]+"
    r"|(whsec_)[A-Za-z0-9+/=_-]+"
    r"|(\b(?:Bearer|Basic) )[A-Za-z0-9+/=._~-]+"
    r"|(://[^/@\s:\"]*:)[^@\s\"]+(?=@)"
    r"|(\b(?:password|secret_access_key|session_token|sas_token|api_key)=)[^&\s\"]+",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Return ``text`` without what has the form of a secret: the last net."""
    return _SECRETS.sub(lambda match: f"{next(filter(None, match.groups()))}…", text)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_extra_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return redact(msgspec.json.encode(line, enc_hook=str).decode())


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's own name
        extra = " ".join(f"{key}={value}" for key, value in _extra_of(record).items())
        return f"{super().formatMessage(record)} {extra}".rstrip()


def set_up_logging(*, level: str, style: str) -> None:
    """Send the root logger to standard error, as ``text`` or ``json`` lines.

    arq logs every job's arguments at INFO, aiohttp every request, aiosqlite every statement with
    its parameters: they are kept quiet.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if style == "json" else _TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # That a hint expired is no news: its job was claimed before.
    logging.getLogger("arq.worker").setLevel(logging.ERROR)
    for chatty in ("arq.jobs", "aiohttp.access", "httpx", "asyncio", "aiosqlite"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _extra_of(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
