"""Uploads that are refused or broken off: they leave neither a row nor a byte."""

import asyncio
import io
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.api.service import Service
from tests.storage.factories import run_sql

_PART_BYTES = 4 * 1024 * 1024 + 1
_HEAD = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'


def stored_bytes(service: Service) -> int:
    """Return how many bytes the blob store's folder holds."""
    folder = Path(service.settings.blob_url.removeprefix("file://"))
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def rows(service: Service) -> list[Any]:
    """Return what is recorded of files."""
    return list(await run_sql(service.database, "SELECT id FROM files"))


@pytest.mark.parametrize(
    ("later", "param"),
    [
        ([("purpose", "evil")], "purpose"),
        ([], "purpose"),
        ([("purpose", "batch"), ("expires_after[seconds]", "soon")], "expires_after"),
        ([("purpose", "x" * 5000)], "purpose"),
        ([("purpose", "batch"), ("file", "again")], "file"),
    ],
)
async def test_what_is_refused_after_the_bytes_keeps_none(
    sqlite_service: Service, later: list[tuple[str, str]], param: str
) -> None:
    """Whatever comes after the file and is wrong: the bytes before it go: nobody counts them."""
    form = aiohttp.FormData()
    form.add_field("file", io.BytesIO(b"x" * _PART_BYTES), filename="f")
    for name, value in later:
        form.add_field(name, value)

    answer = await sqlite_service.request("POST", "/v1/files", data=form)

    assert (answer.status, answer.json["error"]["param"]) == (422, param)
    assert await rows(sqlite_service) == []
    assert stored_bytes(sqlite_service) == 0


async def test_a_client_that_leaves_after_the_file_leaves_no_byte(sqlite_service: Service) -> None:
    """The file is whole, the next field never comes: the bytes go as soon as the client did."""
    host, port = sqlite_service.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9000000\r\n"
        b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"
    )
    second = b'\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nba'
    writer.write(_HEAD + b"x" * _PART_BYTES + second)
    await writer.drain()
    async with asyncio.timeout(10):
        while True:
            if stored_bytes(sqlite_service):
                break
            await asyncio.sleep(0.01)
    writer.close()

    async with asyncio.timeout(10):
        while True:
            if not await rows(sqlite_service):
                break
            await asyncio.sleep(0.01)

    assert stored_bytes(sqlite_service) == 0
