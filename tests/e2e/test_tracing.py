"""One trace from the request through the worker to the webhook, sent to a collector on loopback."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.stack import Stack, receiving

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
WANTED = {"POST /v1/jobs", "store job", "job m", "prepare", "forward", "store", "webhook"}


class Collector:
    """Takes OTLP over HTTP, and keeps the spans with the service that sent them."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[tuple[str, Span]] = []
        self.arrived = asyncio.Condition()

    async def handle(self, request: web.Request) -> web.Response:
        """Take one batch of spans."""
        told = ExportTraceServiceRequest.FromString(await request.read())
        for of_resource in told.resource_spans:
            named = {each.key: each.value.string_value for each in of_resource.resource.attributes}
            for of_scope in of_resource.scope_spans:
                self.spans += [(named["service.name"], each) for each in of_scope.spans]
        async with self.arrived:
            self.arrived.notify_all()
        return web.Response(content_type="application/x-protobuf")

    def of_trace(self, trace: str) -> dict[str, tuple[str, Span]]:
        """Return the spans of one trace by name, with their services."""
        return {each.name: (who, each) for who, each in self.spans if each.trace_id.hex() == trace}


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Run a collector on a free loopback port."""
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield collector
    await runner.cleanup()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_one_trace_from_the_request_to_the_webhook(tmp_path: Path, redis_url: str) -> None:
    """The client's trace goes on in both processes; no input is in it; logs have the same ids."""
    models = {"m": {"source": "builtin:deterministic"}}
    async with collecting() as collector, receiving() as receiver:
        settings = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "SCOREKEEP_SWEEP_S": "0.2",
            "SCOREKEEP_LOG_FORMAT": "json",
            "SCOREKEEP_SLOW_JOB_S": "0.000001",
        }
        async with Stack(tmp_path, redis_url, models, settings=settings) as stack:
            await stack.start_worker()
            await stack.wait_for("/readyz")
            body = {"model": "m", "items": ["a private text"], "webhook": receiver.url}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "req-e2e"}
            _, _, job = await stack.post("/v1/jobs", body, headers=headers)
            await receiver.wait_for(1)
            async with asyncio.timeout(60), collector.arrived:
                await collector.arrived.wait_for(lambda: WANTED <= set(collector.of_trace(TRACE)))
            hints = [each for _, each in collector.spans if each.name == "hint jobs"]
            logged = stack.log

    found = collector.of_trace(TRACE)
    ids = {name: span.span_id.hex() for name, (_, span) in found.items()}
    parents = {name: span.parent_span_id.hex() for name, (_, span) in found.items()}
    services = {name: who for name, (who, _) in found.items()}
    assert parents["POST /v1/jobs"] == PARENT
    assert parents["store job"] == parents["job m"] == parents["webhook"] == ids["POST /v1/jobs"]
    assert {parents[name] for name in ("prepare", "forward", "store")} == {ids["job m"]}
    assert services["POST /v1/jobs"] == "scorekeep-api"
    assert services["forward"] == services["webhook"] == "scorekeep-worker"
    assert any(link.trace_id.hex() == TRACE for hint in hints for link in hint.links)
    assert "a private text" not in str(collector.spans)
    slow = [line for line in logged.splitlines() if '"action":"slow_job"' in line]
    assert any(job["id"] in line and '"request_id":"req-e2e"' in line for line in slow)
