"""``scorekeep doctor``: is everything there that a service needs, and does what it keeps agree?

What needs SQL, Redis or blobs is done by child processes, whose modules ``launch`` names.
"""

import argparse
import asyncio
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from contract.config import Settings, load_settings
from contract.errors import ScoreError, SettingsError
from contract.findings import Finding
from contract.models import parse_models
from scorekeep.launch import CHECKUP, DOCTOR, LaunchOptions, find_registry, render_environment
from scorekeep.redis_server import find_redis
from scorekeep.up import render_address

__all__ = ["RUNS"]

_TIMEOUT_S = 60.0
#: What each extra brings, by the packages that show it.
_EXTRAS = {
    "api": ("sqlalchemy", "alembic", "arq", "redis", "obstore", "asyncpg", "aiosqlite"),
    "worker": ("torch", "transformers", "numpy"),
}


def run_doctor(options: argparse.Namespace) -> int:
    """Look at everything, say what to do; 1 where something is wrong."""
    environment = render_environment(LaunchOptions(data=options.data), os.environ)
    settings = load_settings(environment)
    findings = [*_check_versions(), *_check_models(settings)]
    stores = _check_stores(environment)
    findings += [*stores, asyncio.run(_check_service(settings))]
    agree: dict[str, str] = {}
    code = 0 if all(finding.ok for finding in findings) else 1
    if all(finding.ok for finding in stores if finding.part != "redis"):
        flags = [f"--{name}" for name in ("repair", "deep") if getattr(options, name)]
        disagrees, agree = _compare(environment, flags)
        code = max(code, disagrees)
    if options.json:
        text = msgspec.json.encode({"findings": findings, "consistency": agree})
        sys.stdout.write(f"{msgspec.json.format(text, indent=2).decode()}\n")
    else:
        _print(findings, agree)
    return code


RUNS: dict[str, Callable[[argparse.Namespace], int]] = {"doctor": run_doctor}


def _check_versions() -> list[Finding]:
    findings = [
        Finding(
            part="python",
            ok=sys.version_info >= (3, 11),
            detail=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
            advice="Scorekeep needs Python 3.11 or newer",
        )
    ]
    api = _check_extra("api")
    worker = _check_extra("worker")
    if api.ok and not worker.ok:  # a machine that only serves the API
        detail = f"{worker.detail}; needed only where a worker runs"
        worker = msgspec.structs.replace(worker, ok=True, detail=detail)
    findings += [api, worker]
    redis = _version("redis")
    if redis is not None and int(redis.partition(".")[0]) > 5:
        advice = "pip install 'redis[hiredis]>=5.2,<6'; arq does not work with newer ones"
        findings.append(Finding(part="redis client", ok=False, detail=redis, advice=advice))
    return findings


def _check_extra(extra: str) -> Finding:
    found = {name: _version(name) for name in _EXTRAS[extra]}
    missing = [name for name, held in found.items() if held is None]
    detail = ", ".join(f"{name} {held}" for name, held in found.items() if held)
    if missing:
        detail = f"missing: {', '.join(missing)}"
    advice = f"pip install 'scorekeep[{extra}]'"
    return Finding(part=extra, ok=not missing, detail=detail, advice=advice)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _check_models(settings: Settings) -> list[Finding]:
    try:
        models = parse_models(find_registry(LaunchOptions(), settings))
    except SettingsError as error:
        kept = Path(settings.data_dir) / "models.toml"
        if not settings.config and kept.exists():
            models = parse_models(kept)
        else:
            advice = "without one, workers serve nothing; scorekeep up takes --model too"
            return [Finding(part="models", ok=True, detail=error.message, advice=advice)]
    return [_check_source(name, config.source) for name, config in models.items()]


def _check_source(name: str, source: str) -> Finding:
    part, advice = f"model {name}", f"scorekeep models check {source}"
    if source.startswith("builtin:"):
        return Finding(part=part, ok=True, detail=f"{source}, for tests: it knows no text")
    folder = Path(source)
    if not folder.exists():
        local = source.startswith(("/", ".", "~"))
        detail = f"{source} is no folder here" + ("" if local else "; taken for a hub id")
        return Finding(part=part, ok=not local, detail=detail, advice=advice)
    there = (folder / "config.json").exists()
    detail = f"{source}" if there else f"{source} holds no config.json"
    return Finding(part=part, ok=there, detail=detail, advice=advice)


def _check_stores(environment: Mapping[str, str]) -> list[Finding]:
    """Ask a child, which may import SQL and Redis; a Redis that nobody named is ``up``'s own."""
    try:
        done = subprocess.run(  # noqa: S603  # our own module
            CHECKUP, env=dict(environment), capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        late = f"no answer about SQL, blobs and Redis within {_TIMEOUT_S:g} s"
        advice = "see whether the database, the blob store and this machine's disk answer"
        return [Finding(part="stores", ok=False, detail=late, advice=advice)]
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        detail = lines[-1] if lines else f"the check ended with code {done.returncode}"
        advice = "pip install 'scorekeep[api]'"
        return [Finding(part="sql", ok=False, detail=detail, advice=advice)]
    findings = msgspec.json.decode(done.stdout, type=list[Finding])
    if "SCOREKEEP_REDIS_URL" in environment:
        return findings
    return [each for each in findings if each.part != "redis"] + [_check_own_redis()]


def _check_own_redis() -> Finding:
    try:
        found = find_redis()
    except ScoreError as error:
        advice = "pip install 'scorekeep[embedded]', or set SCOREKEEP_REDIS_URL"
        return Finding(part="redis", ok=False, detail=error.message, advice=advice)
    detail = f"scorekeep up starts {found}; SCOREKEEP_REDIS_URL names another"
    return Finding(part="redis", ok=True, detail=detail)


async def _check_service(settings: Settings) -> Finding:
    address = settings.public_url or render_address(settings)
    timeout = aiohttp.ClientTimeout(total=5)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{address}/readyz") as answer,
        ):
            told = msgspec.json.decode(await answer.read(), type=_Readiness)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
        advice = "scorekeep up starts one"
        return Finding(part="service", ok=True, detail=f"none at {address}", advice=advice)
    reasons = "; ".join(f"{each.part}: {each.detail}" for each in told.reasons)
    ready = "ready" if told.ready else "not ready"
    detail = f"{address} is {ready}" + (f": {reasons}" if reasons else "")
    return Finding(part="service", ok=told.ready, detail=detail, advice="see the reasons")


class _Reason(msgspec.Struct, frozen=True):
    part: str
    detail: str


class _Readiness(msgspec.Struct, frozen=True):
    ready: bool
    reasons: list[_Reason] = []


def _compare(environment: Mapping[str, str], flags: Sequence[str]) -> tuple[int, dict[str, str]]:
    """Let the stores be compared with one another; return the exit code and the counts."""
    done = subprocess.run(  # noqa: S603  # our own module
        [*DOCTOR, *flags], env=dict(environment), stdout=subprocess.PIPE, text=True, check=False
    )
    lines = [line.partition(":") for line in done.stdout.splitlines()]
    return done.returncode, {name: value.strip() for name, _, value in lines}


def _print(findings: Sequence[Finding], agree: Mapping[str, str]) -> None:
    table = Table(box=None, show_header=False)
    for finding in findings:
        mark = Text("ok", "green") if finding.ok else Text("WRONG", "red")
        advice = finding.advice if not finding.ok else ""
        table.add_row(mark, finding.part, Text(finding.detail), Text(advice, "bold"))
    console = Console()
    console.print(table)
    for name, value in agree.items():
        console.print(f"{name}: {value}", highlight=False)
