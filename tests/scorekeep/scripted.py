"""A service that answers what a test has written down, over real HTTP, from its own thread."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

JOB_ID = "job_0123456789abcdef0123456789abcdef"


@dataclass
class Call:
    """One request as it came."""

    method: str
    path: str
    query: dict[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


@dataclass
class Script:
    """Answers in the order in which they are given; the requests in the order they came."""

    url: str = ""
    calls: list[Call] = field(default_factory=list)
    answers: list[web.Response | None] = field(default_factory=list)

    def answer(
        self, body: Any = None, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Add an answer: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.answers.append(web.Response(status=status, body=data, headers=headers))

    def hang_up(self) -> None:
        """Add an answer that closes the connection without a word."""
        self.answers.append(None)


@contextmanager
def run_script() -> Iterator[Script]:
    """Serve a script on a free loopback port."""
    script, loop, started = Script(), asyncio.new_event_loop(), threading.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        script.calls.append(
            Call(
                request.method,
                request.path,
                dict(request.query),
                dict(request.headers),
                await request.read(),
            )
        )
        answer = script.answers.pop(0)
        if answer is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return answer

    async def serve() -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def run() -> None:
        runner = loop.run_until_complete(serve())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    try:
        yield script
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def job(state: str = "queued", **fields: Any) -> dict[str, Any]:
    """A job as the API shows it."""
    return {
        "id": JOB_ID,
        "object": "job",
        "state": state,
        "model": "sentiment",
        "priority": "normal",
        "counts": {"total": 2, "succeeded": 2 if state == "succeeded" else 0, "failed": 0},
        "attempt": 1,
        "created_at": "2026-11-30T00:00:00Z",
        **fields,
    }


def scores(rows: list[list[float] | None], **fields: Any) -> dict[str, Any]:
    """A result as the API shows it."""
    return {
        "job": JOB_ID,
        "object": "scores",
        "model": "sentiment",
        "labels": ["negative", "positive"],
        "scores": rows,
        "usage": {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0},
        **fields,
    }


def problem(code: str, status: int, **fields: Any) -> dict[str, Any]:
    """A problem document."""
    return {"type": "about:blank", "code": code, "status": status, "detail": f"{code}!", **fields}
