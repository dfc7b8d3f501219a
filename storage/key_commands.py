"""``python -m storage.key_commands``: keys and limits of tenants, made where the database is.

Not a route: who makes keys for any tenant has the database already. ``scorekeep keys`` runs this.
"""

import argparse
import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from contract.config import load_settings
from contract.errors import (
    InvalidRequestError,
    RequestError,
    ScoreError,
    SettingsError,
    UnavailableError,
)
from contract.keys import parse_scopes
from contract.limits import parse_limits
from contract.moments import render_moment
from storage import keys, limits
from storage.database import Database, Transaction
from storage.keys import KeyRow
from storage.migrating import migrate

__all__ = ["main"]

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LONGEST_S = 100 * 365 * 86400.0
_Command = Callable[[Transaction, argparse.Namespace], Awaitable[Any]]


async def _create(tx: Transaction, options: argparse.Namespace) -> dict[str, Any]:
    tenant, expires_in_s = _check_tenant(options.tenant), options.expires_in_s
    if expires_in_s is not None and not 0 < expires_in_s <= _LONGEST_S:
        message = "--expires-in-s is a number of seconds above zero"
        raise InvalidRequestError(message, param="expires_in_s")
    row, key = await keys.add_key(
        tx, tenant, parse_scopes(options.scope), expires_in_s=expires_in_s
    )
    return _render_new(row, key)


async def _rotate(tx: Transaction, options: argparse.Namespace) -> dict[str, Any]:
    if not 0 <= options.overlap_s <= _LONGEST_S:
        message = "--overlap-s is a number of seconds, at least zero"
        raise InvalidRequestError(message, param="overlap_s")
    row, key = await keys.rotate_key(tx, options.id, overlap_s=options.overlap_s)
    return _render_new(row, key)


async def _revoke(tx: Transaction, options: argparse.Namespace) -> dict[str, Any]:
    return _render(await keys.revoke_key(tx, options.id))


async def _list(tx: Transaction, options: argparse.Namespace) -> list[dict[str, Any]]:
    return [_render(row) for row in await keys.list_keys(tx, options.tenant)]


async def _limits(tx: Transaction, options: argparse.Namespace) -> dict[str, Any]:
    tenant = _check_tenant(options.tenant)
    known = await limits.read_limits(tx)
    if options.reset:
        known.pop(tenant, None)
    base = known.get(tenant, parse_limits([]))
    wanted = parse_limits(options.set).over(base)
    await limits.put_limits(tx, tenant, wanted)
    return {"tenant": tenant, **msgspec.to_builtins(wanted)}


_COMMANDS: Mapping[str, _Command] = {
    "create": _create,
    "list": _list,
    "revoke": _revoke,
    "rotate": _rotate,
    "limits": _limits,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command on the database that the settings name; return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        found = _run(options)
    except ScoreError as error:
        sys.stderr.write(f"scorekeep keys: {error.message}\n")
        if isinstance(error, UnavailableError):
            return 4
        return 2 if isinstance(error, RequestError | SettingsError) else 1
    text = msgspec.json.encode(found).decode() if options.json else _show(found)
    sys.stdout.write(f"{text}\n")
    return 0


def _run(options: argparse.Namespace) -> Any:  # noqa: ANN401  # what the command returns
    settings = load_settings()
    migrate(settings.database)

    async def run() -> Any:  # noqa: ANN401  # as above
        database = Database(settings.database)
        try:
            async with database.transaction() as tx:
                return await _COMMANDS[options.action](tx, options)
        finally:
            await database.close()

    return asyncio.run(run())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scorekeep keys", description=__doc__)
    parser.add_argument("action", choices=list(_COMMANDS))
    parser.add_argument("id", nargs="?", default="")
    parser.add_argument("--tenant")
    parser.add_argument("--scope", default="submit,read")
    parser.add_argument("--expires-in-s", type=float)
    parser.add_argument("--overlap-s", type=float, default=keys.OVERLAP_S)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--reset", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser


def _check_tenant(tenant: str | None) -> str:
    if tenant is None or not _TENANT.fullmatch(tenant):
        message = "--tenant is a name of letters, digits, dots, hyphens and underscores, up to 64"
        raise InvalidRequestError(message, param="tenant")
    return tenant


def _render_new(row: KeyRow, key: str) -> dict[str, Any]:
    return {"id": row.id, "key": key, "tenant": row.tenant, "scopes": row.scopes}


def _render(row: KeyRow) -> dict[str, Any]:
    state = "valid" if row.is_valid else "expired" if row.revoked_at is None else "revoked"
    moments = ("created_at", "expires_at", "revoked_at", "last_used_at")
    rendered = {name: getattr(row, name) for name in moments}
    return {
        "id": row.id,
        "tenant": row.tenant,
        "prefix": row.prefix,
        "scopes": row.scopes,
        "state": state,
        **{name: None if at is None else render_moment(at) for name, at in rendered.items()},
    }


def _show(found: Any) -> str:  # noqa: ANN401  # a dictionary, or several
    if isinstance(found, list):
        return "\n".join(_show_line(each) for each in found) if found else "there are no keys"
    if "key" in found:
        return f"{_show_line(found)}\nit is not shown again"
    return _show_line(found)


def _show_line(found: Mapping[str, Any]) -> str:
    words = [
        f"{name}={','.join(value) if isinstance(value, list) else value}"
        for name, value in found.items()
        if value is not None
    ]
    return "  ".join(words)


if __name__ == "__main__":
    sys.exit(main())
