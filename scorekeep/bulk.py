"""The client for bulks: submit a file once, watch it, fetch results and hidden states in parts.

Everything may be interrupted and run again: the same file with the same options is the same
bulk, and downloads go on where they stopped.
"""

import asyncio
import csv
import hashlib
import io
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

import aiohttp
import msgspec

from contract.bulks import ENDED_BULKS, Bulk
from contract.errors import ScoreError, UnavailableError
from scorekeep.hidden import INDEX_FILE, Index
from scorekeep.transport import Transport, create_error, render_authorization

__all__ = ["BulkClient", "count_done"]

_PIECE_BYTES = 1024 * 1024
_POLL_S = 1.0
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)
_FIRST_BACKOFF_S = 0.5
_TRIES = 6


class _Bulks(msgspec.Struct):
    data: list[Bulk]


class _Description(msgspec.Struct):
    fingerprint: str = ""


class _Model(msgspec.Struct):
    id: str
    description: _Description | None = None

    @property
    def fingerprint(self) -> str:
        return "" if self.description is None else self.description.fingerprint


class _Models(msgspec.Struct):
    data: list[_Model]


class _File(msgspec.Struct):
    id: str


class _Line(msgspec.Struct):
    line: int


class BulkClient:
    """Bulks of one service. Use it as ``async with BulkClient(url) as bulks``."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        self._transport = Transport(base_url, api_key=api_key, timeout_s=60, max_retries=6)
        headers = render_authorization(api_key)
        self._url = base_url.rstrip("/")
        self._session = aiohttp.ClientSession(headers=headers, timeout=_TIMEOUT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._transport.close()

    async def submit(self, path: Path, options: Mapping[str, Any]) -> Bulk:
        """Submit a file; ``options`` are fields of ``POST /v1/bulks``.

        The same file with the same options gives the same bulk, whoever submits it, from anywhere.
        """
        key = await asyncio.to_thread(_key_of, path, options)
        answer = await self._transport.send("GET", "/v1/bulks", query={"key": key})
        if found := msgspec.json.decode(answer.body, type=_Bulks).data:
            return found[0]
        file_id = await self._upload(path)
        return await self._post("/v1/bulks", {**options, "input_file_id": file_id}, key=key)

    async def rescore(self, request: Mapping[str, Any]) -> Bulk:
        """Score again; ``request`` is the body of ``POST /v1/rescore``.

        Twice is the same bulk, as long as the models are the same: another checkpoint behind an old
        name is another one.
        """
        answer = await self._transport.send("GET", "/v1/models")
        served = msgspec.json.decode(answer.body, type=_Models).data
        told = [dict(request), sorted((model.id, model.fingerprint) for model in served)]
        digest = hashlib.sha256(msgspec.json.encode(told, order="sorted"))
        return await self._post("/v1/rescore", request, key=f"rescore-{digest.hexdigest()}")

    async def get(self, bulk_id: str) -> Bulk:
        """Return a bulk with its live counts."""
        answer = await self._transport.send("GET", f"/v1/bulks/{bulk_id}")
        return msgspec.json.decode(answer.body, type=Bulk)

    async def list(self, *, limit: int = 20) -> Sequence[Bulk]:
        """Return bulks, newest first."""
        answer = await self._transport.send("GET", "/v1/bulks", query={"limit": str(limit)})
        return msgspec.json.decode(answer.body, type=_Bulks).data

    async def act(self, bulk_id: str, action: str) -> Bulk:
        """Cancel, pause, resume or retry a bulk.

        Raises ``UnavailableError`` where no answer came: it may have been done, ``get`` tells.
        """
        return await self._post(f"/v1/bulks/{bulk_id}/{action}", {})

    async def watch(self, bulk_id: str) -> AsyncIterator[Bulk]:
        """Yield the bulk every second; the last one has ended."""
        while True:
            bulk = await self.get(bulk_id)
            yield bulk
            if bulk.state in ENDED_BULKS:
                return
            await asyncio.sleep(_POLL_S)

    async def write_results(
        self, bulk_id: str, path: Path, on_lines: Callable[[int], None] = lambda _: None
    ) -> int:
        """Append to ``path`` the results that it lacks, as far as there are; return the last line.

        A line that an interruption cut is fetched again.
        """
        last = await asyncio.to_thread(_trim, path)

        async def append() -> None:
            nonlocal last
            url = f"{self._url}/v1/bulks/{bulk_id}/results?after={last}"
            with path.open("ab") as file:
                async with self._session.get(url) as response:
                    await _check(response)
                    async for line in _lines(response):
                        file.write(line)
                        last = msgspec.json.decode(line, type=_Line).line
                        on_lines(last)

        await _try_again(append)
        return last

    async def write_hidden_states(
        self, bulk_id: str, folder: Path, on_bytes: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        """Fetch the whole set into ``folder``; ``HiddenStates(folder)`` reads it.

        Files that are there are not fetched again, a part of one goes on by a range. The index
        comes last: where it is, the set is whole.
        """
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        base = f"/v1/bulks/{bulk_id}/hidden_states"
        raw = (await self._transport.send("GET", base)).body
        index = msgspec.json.decode(raw, type=Index)
        done = 0
        for shard in index.shards:
            done = await self._fetch(
                f"{base}/{shard.file}",
                folder / shard.file,
                done,
                lambda count: on_bytes(count, index.metadata.total_size),
            )
        await self._fetch(f"{base}/{index.ids}", folder / index.ids, 0, lambda _: None)
        (folder / INDEX_FILE).write_bytes(raw)

    async def _fetch(
        self, path: str, target: Path, before: int, on_bytes: Callable[[int], None]
    ) -> int:
        """Fetch one file, again where the connection breaks; return the bytes so far in all."""
        partial = target.with_name(f"{target.name}.part")
        if size := _size_of(target):
            return before + size
        await _try_again(lambda: self._fetch_rest(path, partial, before, on_bytes))
        partial.replace(target)
        return before + _size_of(target)

    async def _fetch_rest(
        self, path: str, partial: Path, before: int, on_bytes: Callable[[int], None]
    ) -> None:
        begin = _size_of(partial)
        headers = {"Range": f"bytes={begin}-"} if begin else {}
        async with self._session.get(self._url + path, headers=headers) as response:
            if response.status == 416:  # nothing is left
                return
            await _check(response)
            begin = begin if response.status == 206 else 0
            with partial.open("r+b" if begin else "wb") as file:
                file.seek(begin)
                async for data in response.content.iter_chunked(_PIECE_BYTES):
                    file.write(data)
                    begin += len(data)
                    on_bytes(before + begin)

    async def _upload(self, path: Path) -> str:
        with _open_input(path) as file:
            form = aiohttp.FormData(quote_fields=False)
            form.add_field("purpose", "batch")
            form.add_field("file", file, filename=path.name)
            try:
                async with self._session.post(f"{self._url}/v1/files", data=form) as response:
                    await _check(response)
                    return msgspec.json.decode(await response.read(), type=_File).id
            except aiohttp.ClientError as error:
                message = f"the upload broke off: {error}"
                raise UnavailableError(message) from error

    async def _post(self, path: str, body: Mapping[str, Any], *, key: str = "") -> Bulk:
        headers = {"Idempotency-Key": f'"{key}"'} if key else {}
        answer = await self._transport.send(
            "POST", path, body=msgspec.json.encode(dict(body)), headers=headers
        )
        return msgspec.json.decode(answer.body, type=Bulk)


async def _try_again(download: Callable[[], Awaitable[None]]) -> None:
    """Download, and again where the connection breaks: each time from where it broke."""
    for attempt in range(_TRIES):
        try:
            await download()
        except aiohttp.ClientError as error:
            if attempt + 1 == _TRIES:
                message = f"the download broke off: {error}"
                raise UnavailableError(message) from error
            await asyncio.sleep(_FIRST_BACKOFF_S * 2**attempt)
        else:
            return


def _key_of(path: Path, options: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(msgspec.json.encode(dict(options), order="sorted"))
    with path.open("rb") as file:
        while data := file.read(_PIECE_BYTES):
            digest.update(data)
    return f"bulk-{digest.hexdigest()}"


@contextmanager
def _open_input(path: Path) -> Iterator[IO[bytes]]:
    """Open what is sent: the file itself, or a CSV's rows as JSONL."""
    if path.suffix.lower() != ".csv":
        with path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as made, path.open(newline="", encoding="utf-8") as text:
        for row in csv.DictReader(text):
            made.write(msgspec.json.encode(row) + b"\n")
        made.seek(0)
        yield made


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _trim(path: Path) -> int:
    """Cut a half line off the end; return the number of the last whole one."""
    if not path.exists():
        return 0
    last = b""
    with path.open("r+b") as file:
        size = 0
        for line in file:
            if line.endswith(b"\n"):
                size += len(line)
                last = line
        file.truncate(size)
    return msgspec.json.decode(last, type=_Line).line if last else 0


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield whole lines of any length."""
    rest = b""
    async for data in response.content.iter_chunked(_PIECE_BYTES):
        stream = io.BytesIO(rest + data)
        rest = b""
        for line in stream:
            if line.endswith(b"\n"):
                yield line
            else:
                rest = line


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    raw = await response.read()
    try:
        found = msgspec.json.decode(raw)
        fault = found.get("error", found)
        message = fault.get("detail") or fault.get("message") or f"{response.status}"
        error = create_error(str(fault.get("code", "")), message, status=response.status)
    except (msgspec.MsgspecError, AttributeError):
        error = ScoreError(f"the service said {response.status}")
    raise error


def count_done(bulk: Bulk) -> tuple[int, int]:
    """Return how many lines have ended, and how many there are."""
    counts = bulk.counts
    return counts.lines_completed + counts.lines_failed + counts.lines_cancelled, counts.lines
