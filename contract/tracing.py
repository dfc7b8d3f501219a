"""OpenTelemetry traces, where the extra ``otel`` is installed and ``OTEL_…`` asks for them.

The only place that imports OpenTelemetry. Off, a span costs a function call and nothing is kept.
The standard variables are the SDK's to read: exporter, sampler, resource.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

try:
    from opentelemetry import context, propagate, trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
except ImportError:  # the extra is not installed
    IS_INSTALLED = False
else:
    IS_INSTALLED = True

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

__all__ = [
    "IS_INSTALLED",
    "add_span",
    "current_traceparent",
    "is_wanted",
    "set_up_tracing",
    "shut_down_tracing",
    "span",
]

_LOG = logging.getLogger(__name__)
_Kind = Literal["server", "client", "producer", "consumer", "internal"]
_ASKING = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
)
#: What is set up: at most one provider a process.
_state: dict[str, Any] = {}


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether the standard variables ask for traces: they name an exporter or where it sends."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "").lower() == "none":
        return False
    return any(environment.get(name) for name in _ASKING)


def set_up_tracing(
    service: str,
    *,
    environment: Mapping[str, str] | None = None,
    exporter: "SpanExporter | None" = None,
) -> bool:
    """Trace from now on where the environment asks for it; tell whether it does.

    ``service`` is the name unless ``OTEL_SERVICE_NAME`` gives one; ``exporter`` stands in for the
    one that sends OTLP over HTTP.
    """
    variables = os.environ if environment is None else environment
    if not is_wanted(variables):
        return False
    if not IS_INSTALLED:
        _LOG.warning("OTEL variables ask for traces, and the extra otel is not installed")
        return False
    named = {} if variables.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
    _state.update(provider=provider, tracer=provider.get_tracer("scorekeep"))
    return True


def shut_down_tracing() -> None:
    """Send what is left, and trace no more. Blocks for as long as the exporter takes."""
    provider = _state.pop("provider", None)
    _state.clear()
    if provider is not None:
        provider.shutdown()


@contextmanager
def span(
    name: str,
    *,
    kind: _Kind = "internal",
    parent: str = "",
    links: Sequence[str] = (),
    **attributes: str | float | None,
) -> Iterator["Span | None"]:
    """Trace what happens within. ``parent`` and ``links`` are ``traceparent`` of other processes.

    Yields the span, to which attributes can be added, or None where nothing is traced. An error
    that passes marks it, by its kind alone: messages may quote inputs.
    """
    made = _start(name, kind, parent, links, None, attributes)
    if made is None:
        yield None
        return
    with trace.use_span(
        made, end_on_exit=True, record_exception=False, set_status_on_exception=False
    ):
        try:
            yield made
        except BaseException as error:
            made.set_attribute("error.type", type(error).__name__)
            made.set_status(trace.StatusCode.ERROR)
            raise


def add_span(
    name: str,
    *,
    began_at: float,
    ended_at: float,
    kind: _Kind = "internal",
    parent: str,
    **attributes: str | float | None,
) -> str:
    """Trace something that is over, between two moments of ``time.time``; return its traceparent.

    Empty where nothing is traced, or where ``parent`` is not.
    """
    if not parent:
        return ""
    made = _start(name, kind, parent, (), int(began_at * 1e9), attributes)
    if made is None:
        return ""
    made.end(int(ended_at * 1e9))
    return _render(trace.set_span_in_context(made))


def current_traceparent() -> str:
    """Return what another process needs to go on with this trace; empty where there is none."""
    return _render(context.get_current()) if "tracer" in _state else ""


def _start(  # a span has this many sides
    name: str,
    kind: _Kind,
    parent: str,
    links: Sequence[str],
    began_at_ns: int | None,
    attributes: Mapping[str, str | float | None],
) -> "Span | None":
    tracer = _state.get("tracer")
    if tracer is None:
        return None
    around = _extract(parent) if parent else None
    linked = [
        trace.Link(trace.get_current_span(_extract(each)).get_span_context()) for each in links
    ]
    made: Span = tracer.start_span(
        name,
        context=around,
        kind=trace.SpanKind[kind.upper()],
        attributes={key: value for key, value in attributes.items() if value is not None},
        links=linked,
        start_time=began_at_ns,
    )
    return made


def _extract(traceparent: str) -> Any:  # noqa: ANN401  # OpenTelemetry's Context
    return propagate.extract({"traceparent": traceparent}, context=context.Context())


def _render(around: Any) -> str:  # noqa: ANN401  # OpenTelemetry's Context
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=around)
    return carrier.get("traceparent", "")
