"""Hostile clients: what they send slowly, what they send wrong, and what they are told."""

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yarl

from api.bulk.reading import read_lines
from api.bulk.uris import open_uri
from api.connections import HeadWatch
from contract.config import Settings
from contract.errors import InvalidRequestError, MalformedRequestError
from storage.blobs import BlobStore
from storage.database import Database
from tests.api.conftest import make_settings
from tests.api.service import Service

JOB = b'{"model": "tiny", "items": ["a"]}'


@pytest.fixture
async def impatient(
    sqlite_url: str, sqlite_database: Database, blob_url: str, redis_url: str
) -> AsyncIterator[Service]:
    """A service that waits half a second for heads and bodies."""
    settings = make_settings(
        sqlite_url, blob_url, redis_url, header_timeout_s=0.5, body_timeout_s=0.5
    )
    service = Service(settings, sqlite_database)
    await service.start()
    yield service
    await service.stop()


async def _connect(service: Service) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = service.runner.addresses[0][:2]
    return await asyncio.open_connection(host, port)


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "])
async def test_a_head_that_does_not_come_ends_the_connection(
    impatient: Service, sent: bytes
) -> None:
    """Silent or trickling: closed after the time, however often something comes."""
    reader, writer = await _connect(impatient)
    writer.write(sent)

    async with asyncio.timeout(10):
        while not reader.at_eof():
            try:
                assert await asyncio.wait_for(reader.read(1), 0.1) == b""
            except TimeoutError:
                writer.write(sent and b"x")
            except ConnectionResetError:
                break
    writer.close()


async def test_a_connection_that_was_served_is_left_alone(impatient: Service) -> None:
    """Between requests the keep-alive timeout holds, not that of the first head."""
    reader, writer = await _connect(impatient)
    request = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    writer.write(request)
    first = await reader.readuntil(b'"ok"}')
    server = impatient.runner.server
    assert server is not None
    watch = HeadWatch(server, 0.0)
    watch._served = set(server.connections)

    assert watch.look() == 0

    writer.write(request)
    second = await reader.readuntil(b'"ok"}')
    writer.close()
    assert first.startswith(b"HTTP/1.1 200")
    assert second.startswith(b"HTTP/1.1 200")


async def test_a_body_that_trickles_is_given_up(impatient: Service) -> None:
    """408 after about the time; nothing was recorded, and others are served meanwhile."""
    reader, writer = await _connect(impatient)
    writer.write(
        b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100000\r\n\r\n"
    )
    started = asyncio.get_running_loop().time()
    answering = asyncio.create_task(reader.readuntil(b"\r\n"))

    while not answering.done():
        writer.write(b" ")
        await asyncio.wait({answering}, timeout=0.05)

    assert (await answering).startswith(b"HTTP/1.1 408")
    assert asyncio.get_running_loop().time() - started < 5
    assert (await impatient.get("/v1/jobs")).json["data"] == []
    writer.close()


async def test_an_upload_that_is_cut_off_leaves_nothing(impatient: Service) -> None:
    """Neither a row nor a byte: it was nobody's yet."""
    reader, writer = await _connect(impatient)
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9000000\r\n"
        b"Content-Type: multipart/form-data; boundary=x\r\n\r\n" + head + b"y" * 5_000_000
    )
    status = await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)

    assert status.startswith(b"HTTP/1.1 408")
    assert [blob async for blob in impatient.blobs.list("files")] == []
    assert (await impatient.get("/v1/files")).json["data"] == []
    writer.close()


async def test_answers_carry_security_headers(sqlite_service: Service) -> None:
    """On answers and on errors; the server's name tells no version."""
    for path in ("/healthz", "/v1/nothing", "/v1/jobs?state=x"):
        headers = (await sqlite_service.get(path)).headers

        assert headers["Server"] == "scorekeep"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in headers


async def test_heads_and_depths_have_limits(sqlite_service: Service) -> None:
    """A long header, many headers, deep JSON and a body that unpacks to more: refused."""
    deep = b'{"model": "tiny", "items": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    packed = gzip.compress(b'{"items": ["' + b" " * 40 * 1024 * 1024 + b'"]}')
    json_type = {"Content-Type": "application/json"}

    long = await sqlite_service.http.get(sqlite_service.url, headers={"X": "y" * 9000})
    many = await sqlite_service.http.get(
        sqlite_service.url, headers={f"X-{n}": "y" for n in range(200)}
    )
    nested = await sqlite_service.request("POST", "/v1/jobs", data=deep, headers=json_type)
    bomb = await sqlite_service.request(
        "POST", "/v1/jobs", data=packed, headers=json_type | {"Content-Encoding": "gzip"}
    )

    assert (long.status, many.status) == (400, 400)
    assert nested.status in {400, 422}
    assert bomb.status == 413


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs/..%2f..%2fetc%2fpasswd",
        "/v1/files/%2e%2e/content",
        "/v1/files/..%2f..%2fetc%2fpasswd/content",
        "/static/..%2f..%2fpyproject.toml",
        "/static/%2e%2e/%2e%2e/pyproject.toml",
        "/v1/bulks/x/hidden_states/..%2f..%2fx",
        "/v1/jobs/%00/compare/%00",
        "/v1/jobs/x%00/scores",
        "/v1/jobs/a/compare/%ff",
    ],
)
async def test_no_path_of_a_request_is_a_path_of_ours(service: Service, path: str) -> None:
    """What it names is looked for in SQL, by an id of ours; else there is nothing."""
    async with aiohttp.ClientSession() as http:
        url = yarl.URL(service.url + path, encoded=True)
        async with http.get(url) as answer:
            assert answer.status == 404, await answer.read()


@pytest.mark.parametrize(
    "uri",
    [
        "file:///etc/passwd",
        "file:///data/in/../../etc/passwd",
        "file:///data/in/%2e%2e/x",
        "file:///data/input/x",
        "s3://other/x",
        "http://169.254.169.254/latest",
        "file:///data/in/",
        "file:///data/in//x",
        "file:///data/in/x?endpoint=http://evil",
    ],
)
def test_an_input_uri_lies_under_what_is_allowed(uri: str, tmp_path: Path) -> None:
    """Anything else is refused before a store is opened."""
    settings = Settings(bulk_input_urls="file:///data/in", data_dir=str(tmp_path))

    with pytest.raises(InvalidRequestError):
        open_uri(uri, settings)


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b"])
async def test_a_blob_key_stays_in_its_store(blob_store: BlobStore, key: str) -> None:
    """Whoever might pass one on from a request: it is refused."""
    with pytest.raises(ValueError, match="relative path"):
        await blob_store.get(key)
    with pytest.raises(ValueError, match="relative path"):
        await blob_store.put(key, b"x")


async def test_a_gzip_of_nothing_but_empty_lines_is_refused() -> None:
    """A kilobyte could otherwise become a list of a million entries, and a megabyte of millions."""
    with pytest.raises(MalformedRequestError, match="empty lines"):
        await _read(gzip.compress(b"\n" * 1_000_000 + b"{}"))


async def test_a_gzip_that_unpacks_out_of_proportion_is_refused() -> None:
    """After the first 64 MiB it may be two hundred times its size."""
    line = json.dumps({"item": " " * 100_000}).encode() + b"\n"

    with pytest.raises(MalformedRequestError, match="200 times"):
        await _read(gzip.compress(line * 1200))
    assert await _read(gzip.compress(line * 100)) == 100


async def test_the_logs_hold_no_key(
    sqlite_guarded: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither of who was refused nor of a request that failed."""
    caplog.set_level(logging.DEBUG)
    key = f"sk_{'0' * 16}_{'s' * 43}"

    await sqlite_guarded.get("/v1/jobs", headers={"Authorization": f"Bearer {key}"})

    assert "s" * 43 not in caplog.text


async def _read(data: bytes) -> int:
    async def pieces() -> AsyncIterator[bytes]:
        yield data

    lines = 0
    async for block in read_lines(pieces(), max_line_bytes=1_000_000):
        lines += len(block)
    return lines
