"""A gate before the service: under a folder of its own, and only with the key."""

import contextlib
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

__all__ = ["KEY", "PREFIX", "guarding"]

KEY = "sk_test_0123456789"
PREFIX = "/team/scores"
_PASSED = ("Content-Type", "Content-Security-Policy", "ETag", "Cache-Control", "Location")


@contextlib.asynccontextmanager
async def guarding(url: str) -> AsyncIterator[str]:
    """Yield the address of a gate to ``url``: the page is free, its data wants the key."""

    async def pass_on(request: web.Request) -> web.StreamResponse:
        path = request.path_qs.removeprefix(PREFIX)
        if path.startswith("/v1/") and request.headers.get("Authorization") != f"Bearer {KEY}":
            problem = {"title": "Unauthorized", "detail": "no valid key", "code": "unauthorized"}
            return web.json_response(problem, status=401, content_type="application/problem+json")
        given = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        body = await request.read()
        async with http.request(request.method, url + path, data=body, headers=given) as answer:
            kept = {name: value for name, value in answer.headers.items() if name in _PASSED}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        return response

    app = web.Application()
    app.router.add_route("*", PREFIX + "/{path:.*}", pass_on)
    async with aiohttp.ClientSession() as http:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}{PREFIX}"
        finally:
            await runner.cleanup()
