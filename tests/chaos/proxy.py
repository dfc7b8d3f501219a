"""A TCP proxy that misbehaves on demand: latency, black hole, reset, refuse."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

__all__ = ["Proxy", "run_proxy"]


@dataclass
class Proxy:
    """Passes bytes on, late by ``latency_s``; ``silent`` swallows them, and connections stay."""

    target: tuple[str, int]
    port: int = 0
    latency_s: float = 0.0
    silent: bool = False
    refuse: bool = False
    accepted: int = 0
    frozen_before: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.accepted += 1
        number = self.accepted
        if self.refuse:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        self._writers |= {writer, far_writer}
        ways = (
            self._pass(number, reader, far_writer),
            self._pass(number, far_reader, writer),
        )
        try:
            await asyncio.gather(*ways)
        finally:
            self._writers -= {writer, far_writer}

    async def _pass(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if self.silent or number <= self.frozen_before:
                    continue
                if self.latency_s:
                    await asyncio.sleep(self.latency_s)
                writer.write(data)
                await writer.drain()
        writer.close()

    def freeze(self) -> None:
        """Make every connection that there is half-open; new ones work."""
        self.frozen_before = self.accepted

    def reset(self) -> None:
        """Cut every connection at once."""
        for writer in list(self._writers):
            writer.transport.abort()


@contextlib.asynccontextmanager
async def run_proxy(port: int) -> AsyncIterator[Proxy]:
    """Run a proxy in front of a loopback port."""
    proxy = Proxy(("127.0.0.1", port))
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.reset()
        await server.wait_closed()
