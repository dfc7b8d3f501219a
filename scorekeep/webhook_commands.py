"""The commands ``scorekeep webhooks …`` and ``scorekeep listen``."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from contract.config import load_settings
from contract.endpoints import Delivery, Endpoint, EndpointUpdate
from contract.errors import InvalidRequestError
from scorekeep.client import AsyncClient
from scorekeep.listening import run_listen
from scorekeep.up import render_address
from scorekeep.webhooks import Webhooks

__all__ = ["RUNS"]

_Command = Callable[[Webhooks, argparse.Namespace], Awaitable[None]]


async def _list(webhooks: Webhooks, options: argparse.Namespace) -> None:
    _print_endpoints(await webhooks.list(), options)


async def _create(webhooks: Webhooks, options: argparse.Namespace) -> None:
    endpoint = await webhooks.create(
        options.target, events=options.events, description=options.description or ""
    )
    _print_with_secret(endpoint, options)


async def _show(webhooks: Webhooks, options: argparse.Namespace) -> None:
    _print_endpoints([await webhooks.get(options.id)], options)


async def _update(webhooks: Webhooks, options: argparse.Namespace) -> None:
    fields = {"url": options.target, "description": options.description, "events": options.events}
    given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    if options.all_events:
        given["events"] = None
    _print_endpoints([await webhooks.update(options.id, EndpointUpdate(**given))], options)


async def _rotate(webhooks: Webhooks, options: argparse.Namespace) -> None:
    if options.id != "default":
        _print_with_secret(await webhooks.rotate(options.id), options)
        return
    secrets = await webhooks.rotate_default()
    _print_json({"secrets": secrets}) if options.json else _say(f"secret  {secrets[0]}")


async def _disable(webhooks: Webhooks, options: argparse.Namespace) -> None:
    _print_endpoints([await webhooks.disable(options.id, reason=options.reason)], options)


async def _enable(webhooks: Webhooks, options: argparse.Namespace) -> None:
    _print_endpoints([await webhooks.enable(options.id)], options)


async def _delete(webhooks: Webhooks, options: argparse.Namespace) -> None:
    await webhooks.delete(options.id)


async def _test(webhooks: Webhooks, options: argparse.Namespace) -> None:
    sent = await webhooks.test(options.id)
    if options.json:
        _print_json(sent)
    else:
        _say(f"event {sent.event}, delivery {sent.delivery}")


async def _log(webhooks: Webhooks, options: argparse.Namespace) -> None:
    if options.id.startswith("dlv_"):
        _print_deliveries([await webhooks.delivery(options.id)], options)
        return
    where = {"job_": "job", "blk_": "bulk"}.get(options.id[:4], "endpoint")
    chosen = {where: options.id, "state": options.state, "limit": options.limit}
    _print_deliveries(await webhooks.deliveries(**chosen), options)


async def _redeliver(webhooks: Webhooks, options: argparse.Namespace) -> None:
    if (options.id is None) == (options.since is None):
        message = "name a delivery, or a time with --since"
        raise InvalidRequestError(message)
    if options.id is not None:
        _print_deliveries([await webhooks.redeliver(options.id)], options)
        return
    count = await webhooks.redeliver_range(
        options.since, until=options.until, endpoint=options.endpoint, state=options.state
    )
    _print_json({"count": count}) if options.json else _say(f"{count} sent again")


def _run_listen(options: argparse.Namespace) -> int:
    return run_listen(options, _service(options))


def _run(command: _Command) -> Callable[[argparse.Namespace], int]:
    async def run(options: argparse.Namespace) -> None:
        async with AsyncClient(_service(options)) as client:
            await command(client.webhooks, options)

    def blocking(options: argparse.Namespace) -> int:
        asyncio.run(run(options))
        return 0

    return blocking


_COMMANDS: Mapping[str, _Command] = {
    "list": _list,
    "create": _create,
    "show": _show,
    "update": _update,
    "rotate": _rotate,
    "disable": _disable,
    "enable": _enable,
    "delete": _delete,
    "test": _test,
    "log": _log,
    "redeliver": _redeliver,
}

RUNS: dict[str, Callable[[argparse.Namespace], int]] = {
    "listen": _run_listen,
    **{f"webhooks {name}": _run(command) for name, command in _COMMANDS.items()},
}


def _service(options: argparse.Namespace) -> str:
    settings = load_settings()
    url: str = options.url or settings.public_url or render_address(settings)
    return url


def _print_with_secret(endpoint: Endpoint, options: argparse.Namespace) -> None:
    _print_endpoints([endpoint], options)
    if not options.json:
        _say(f"secret  {endpoint.secret}\nit is not shown again")


def _print_endpoints(endpoints: Sequence[Endpoint], options: argparse.Namespace) -> None:
    if options.json:
        _print_json(endpoints)
        return
    table = Table("id", "state", "url", "events", "note", box=None)
    for endpoint in endpoints:
        since = endpoint.failing_since
        note = endpoint.disabled_reason or (f"failing since {since}" if since else "")
        events = "all" if endpoint.events is None else " ".join(endpoint.events)
        cells = (endpoint.id, endpoint.state, endpoint.url, events, note)
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    Console().print(table)


def _print_deliveries(deliveries: Sequence[Delivery], options: argparse.Namespace) -> None:
    if options.json:
        _print_json(deliveries)
        return
    table = Table("delivery", "event", "type", "state", "attempts", "last", box=None)
    for delivery in deliveries:
        statuses = " ".join(str(attempt.status or "-") for attempt in delivery.attempts)
        last = delivery.attempts[-1] if delivery.attempts else None
        seconds = "" if last is None else f"{last.latency_s:.3f} s"
        fault = delivery.reason or (None if last is None else last.error) or seconds
        cells = (delivery.id, delivery.event, delivery.type, delivery.state, statuses, fault)
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    Console().print(table)


def _print_json(value: Any) -> None:  # noqa: ANN401  # whatever msgspec encodes
    _say(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
