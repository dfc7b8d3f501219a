"""schemathesis with a stranger's key and the owner's ids: no 500, and not a byte of the owner's."""

import asyncio
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.stack import Stack
from tests.openapi.test_fuzzing import CONFIG
from worker.engine.deterministic import SOURCE

_SECRET = "the-owners-own"  # noqa: S105  # what must not be seen
_SCOPES = ["submit,read,admin", "submit", "read", "admin"]
_BODY = {"model": "tiny", "items": [_SECRET], "metadata": {"a": _SECRET}}
_HOOK = f"https://receiver.example/{_SECRET}"


@dataclass(frozen=True, slots=True)
class _Owner:
    """A tenant with something of every kind."""

    stack: Stack
    headers: dict[str, str]

    async def fill(self) -> dict[str, str]:
        """Add one of each; return the ids by the routes that take them."""
        job = await self.post("/v1/jobs", {**_BODY, "webhook": _HOOK})
        endpoint = await self.post("/v1/webhook_endpoints", {"url": _HOOK})
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", json.dumps({"items": [_SECRET]}).encode(), filename="a.jsonl")
        file = await self.ask("POST", "/v1/files", data=form)
        told = {"input_file_id": file["id"], "model": "tiny", "metadata": {"a": _SECRET}}
        bulk = await self.post("/v1/bulks", told)
        await self.ask("GET", f"/v1/jobs/{job['id']}?wait=60")
        deliveries = await self.ask("GET", f"/v1/jobs/{job['id']}/deliveries")
        return {
            "jobs": job["id"],
            "webhook_endpoints": endpoint["id"],
            "files": file["id"],
            "bulks": bulk["id"],
            "batches": bulk["id"],
            "deliveries": deliveries["data"][0]["id"],
        }

    async def post(self, path: str, body: object) -> Any:
        """POST JSON as the owner."""
        return await self.ask("POST", path, json=body)

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """Send a request as the owner, which succeeds."""
        status, _, body = await self.stack.request(method, path, headers=self.headers, **options)
        assert status in {200, 201, 202}, body
        return body


async def _run_words(stack: Stack, folder: Path, *words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=folder,  # schemathesis keeps a cache beside itself
        env=stack.environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def _make_key(stack: Stack, tenant: str, scopes: str) -> str:
    words = ("keys", "create", "--tenant", tenant, "--scope", scopes, "--json")
    code, printed = await _run_words(stack, stack.folder, sys.executable, "-m", "scorekeep", *words)
    assert code == 0, printed
    key: str = json.loads(printed)["key"]
    return key


def _write_config(folder: Path, ids: dict[str, str]) -> Path:
    """Have every id in a path be the owner's."""
    tables = [
        f'[[operations]]\ninclude-path-regex = "^/v1/{kind}/"\n'
        f'parameters = {{ "path.id" = "{each}", "path.a" = "{each}", "path.b" = "{each}" }}\n'
        for kind, each in ids.items()
    ]
    path = folder / "schemathesis.toml"
    path.write_text("\n".join([*tables, CONFIG]))
    return path


async def _fuzz(
    redis_url: str, folder: Path, scopes: str, *options: str
) -> tuple[Counter[int], list[dict[str, Any]]]:
    """Run schemathesis as a stranger; return the statuses, and what it was answered."""
    settings = {"SCOREKEEP_AUTH": "required"}
    async with Stack(folder, redis_url, {"tiny": {"source": SOURCE}}, settings=settings) as stack:
        await stack.start_worker()
        await stack.wait_for("/readyz")
        key = await _make_key(stack, "owner", "submit,read,admin")
        owner = _Owner(stack, {"Authorization": f"Bearer {key}"})
        ids = await owner.fill()
        code, printed = await _run_words(
            stack,
            folder,
            str(Path(sys.executable).parent / "schemathesis"),
            "--config-file",
            str(_write_config(folder, ids)),
            "run",
            f"{stack.url}/openapi.json",
            "--checks=all",
            "--exclude-path=/v1/overview/events",  # it never ends
            f"--header=Authorization: Bearer {await _make_key(stack, 'stranger', scopes)}",
            "--report-har-path=report.har",
            "--seed=1",
            *options,
        )
        assert code == 0, printed
        left = await owner.ask("GET", f"/v1/jobs/{ids['jobs']}")

    assert (left["state"], left["metadata"]) == ("succeeded", {"a": _SECRET})
    entries = json.loads((folder / "report.har").read_text())["log"]["entries"]
    return Counter(each["response"]["status"] for each in entries), entries


def _check(statuses: Counter[int], entries: list[dict[str, Any]], ids_seen: int) -> None:
    asked = [entry["request"]["url"] for entry in entries]
    assert sum("/v1/jobs/job_" in url for url in asked) >= ids_seen
    assert not [status for status in statuses if status >= 500 and status != 503]
    for entry in entries:
        assert _SECRET not in json.dumps(entry["response"]), entry["request"]["url"]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_stranger_finds_nothing(redis_url: str, tmp_path: Path) -> None:
    """Every route with a key that may do all, and ids of somebody else's."""
    options = ("--phases=examples,fuzzing", "--max-examples=1")

    statuses, entries = await _fuzz(redis_url, tmp_path, _SCOPES[0], *options)

    _check(statuses, entries, 10)
    assert statuses[404] >= 10
    assert statuses.keys() & {200, 202}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scopes", _SCOPES)
async def test_a_stranger_finds_nothing_for_long(
    redis_url: str, tmp_path: Path, scopes: str
) -> None:
    """The same with each scope alone, many more inputs, and operations after one another."""
    options = ("--phases=examples,coverage,fuzzing,stateful", "--max-examples=25")

    statuses, entries = await _fuzz(redis_url, tmp_path, scopes, *options)

    _check(statuses, entries, 100)
    sys.stdout.write(f"{scopes}: {len(entries)} inputs, answers {dict(sorted(statuses.items()))}\n")
