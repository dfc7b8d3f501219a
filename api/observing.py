"""What every request leaves behind: a count, its duration, a span, a line in the log.

Counts and durations are of this process since it started, as Prometheus expects of each target.
"""

import logging
import re
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from api.middleware import REQUEST_ID
from contract.tracing import current_traceparent, span

__all__ = ["METRICS", "REQUEST_METRICS", "TRACEPARENT", "RequestMetrics", "observe_middleware"]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)
_JOB_ID = re.compile(r"job_[0-9a-f]{32}")
_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
#: Asked for by probes all day: counted, not logged.
_PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
#: Names and what they mean; docs/operations.md has each.
REQUEST_METRICS = {
    "scorekeep_http_requests_total": "Requests that this API process answered",
    "scorekeep_http_request_duration_seconds": "Seconds from a request to the end of its answer",
}
#: The trace that goes on in the job which the request submits.
TRACEPARENT = web.RequestKey("traceparent", str)


class RequestMetrics:
    """Counts requests. Labels are few: our own routes, methods, and statuses."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a third of the lines, and nobody asks for them
        self.registry = CollectorRegistry()
        (requests, seconds) = REQUEST_METRICS
        self._requests = Counter(
            requests,
            REQUEST_METRICS[requests],
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            seconds,
            REQUEST_METRICS[seconds],
            ["method", "route"],
            registry=self.registry,
            buckets=_BOUNDS_S,
        )

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)


METRICS = web.AppKey("metrics", RequestMetrics)


@web.middleware
async def observe_middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Count, trace and log the request; the outermost but for its id."""
    method, route = _name_route(request)
    started_at = time.perf_counter()
    status = 0  # nobody was left to be answered
    job = None
    with span(
        f"{method} {route}",
        kind="server",
        parent=request.headers.get("traceparent", ""),
        **{"http.request.method": method, "http.route": route, "request_id": request[REQUEST_ID]},
    ) as made:
        request[TRACEPARENT] = current_traceparent()
        try:
            response = await handler(request)
            status, job = response.status, _find_job(request, response)
            return response
        finally:
            seconds = time.perf_counter() - started_at
            request.app[METRICS].count(method, route, status, seconds)
            if made is not None:
                made.set_attribute("http.response.status_code", status)
                made.set_attribute("job", job or "")
            level = logging.DEBUG if method in {"GET", "HEAD"} else logging.INFO
            if route not in _PROBES and _log.isEnabledFor(level):
                extra = {"action": "request", "method": method, "route": route, "status": status}
                extra |= {"seconds": round(seconds, 4), "request_id": request[REQUEST_ID]}
                _log.log(level, "request", extra=extra | ({"job": job} if job else {}))


def _name_route(request: web.Request) -> tuple[str, str]:
    """Return method and route as we spell them: a client cannot make up labels."""
    resource = request.match_info.route.resource
    if resource is None:
        return "OTHER", "unmatched"
    return request.method, resource.canonical


def _find_job(request: web.Request, response: web.StreamResponse) -> str | None:
    named = _JOB_ID.search(response.headers.get("Location", "") or request.path)
    return None if named is None else named.group()
