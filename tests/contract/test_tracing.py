"""Traces: on where the environment asks, off otherwise; what goes on in another process."""

import logging
import time
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from contract import tracing
from contract.origins import Origin, parse_origin, render_origin
from contract.tracing import add_span, current_traceparent, is_wanted, set_up_tracing, span

ASKED = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """Tracing is on, and keeps what it would send."""
    exporter = InMemorySpanExporter()
    assert set_up_tracing("test", environment=ASKED, exporter=exporter)
    yield exporter
    tracing.shut_down_tracing()


def finish(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Send everything; return the spans by name."""
    tracing.shut_down_tracing()
    return {each.name: each for each in exporter.get_finished_spans()}


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        (ASKED, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (ASKED | {"OTEL_SDK_DISABLED": "true"}, False),
        (ASKED | {"OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
    ],
)
def test_the_standard_variables_decide(environment: dict[str, str], *, wanted: bool) -> None:
    """Naming an exporter or where it sends asks for traces; the standard switches win."""
    assert is_wanted(environment) is wanted


def test_off_it_does_nothing() -> None:
    """No span, no trace to go on with; the code within runs."""
    assert not set_up_tracing("test", environment={})

    with span("a", parent="00-" + "1" * 32 + "-" + "2" * 16 + "-01") as made:
        assert (made, current_traceparent()) == (None, "")
    assert add_span("b", parent="00-x", began_at=0, ended_at=1) == ""


def test_without_the_extra_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked for and not installed: a warning, and the process runs."""
    monkeypatch.setattr(tracing, "IS_INSTALLED", False)

    with caplog.at_level(logging.WARNING):
        assert not set_up_tracing("test", environment=ASKED)

    assert "extra otel is not installed" in caplog.text


def test_another_process_goes_on_with_the_trace(exporter: InMemorySpanExporter) -> None:
    """Through what is stored with a job: the same trace, the right parent; links stay apart."""
    with span("request", kind="server", route="/v1/jobs"):
        stored = render_origin(Origin(request_id="r", traceparent=current_traceparent()))
    origin = parse_origin(stored)
    now = time.time()
    job = add_span(
        "job", kind="consumer", parent=origin.traceparent, began_at=now, ended_at=now + 1
    )
    add_span("forward", parent=job, began_at=now, ended_at=now + 0.5, job="job_1")
    with span("hint", links=[origin.traceparent]):
        pass
    found = finish(exporter)

    request, child, leaf, hint = (found[name] for name in ("request", "job", "forward", "hint"))
    assert child.parent is not None
    assert leaf.parent is not None
    assert request.context is not None
    assert child.context is not None
    assert child.parent.span_id == request.context.span_id
    assert leaf.parent.span_id == child.context.span_id
    assert {each.context.trace_id for each in (request, child, leaf) if each.context} == {
        request.context.trace_id
    }
    assert hint.context is not None
    assert hint.context.trace_id != request.context.trace_id
    assert hint.links[0].context.span_id == request.context.span_id
    assert (request.kind, child.kind) == (SpanKind.SERVER, SpanKind.CONSUMER)
    assert (child.end_time or 0) - (child.start_time or 0) == pytest.approx(1e9, rel=1e-3)
    assert request.resource.attributes["service.name"] == "test"


def test_a_client_s_trace_goes_on(exporter: InMemorySpanExporter) -> None:
    """What a request brings is the parent; nonsense is nobody's child."""
    given = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    with span("asked", parent=given):
        pass
    with span("nonsense", parent="00-nonsense"):
        pass
    found = finish(exporter)

    assert found["asked"].parent is not None
    assert found["asked"].parent.span_id == int("b" * 16, 16)
    assert found["nonsense"].parent is None


def test_an_error_marks_the_span_by_its_kind(exporter: InMemorySpanExporter) -> None:
    """Its message may quote an input, and stays out."""

    def fail() -> None:
        message = "secret text"
        raise ValueError(message)

    with pytest.raises(ValueError, match="secret text"), span("failing"):
        fail()
    found = finish(exporter)["failing"]

    assert found.status.status_code is StatusCode.ERROR
    assert (found.attributes or {})["error.type"] == "ValueError"
    assert "secret text" not in found.to_json()


def test_an_origin_may_be_missing() -> None:
    """A job of an earlier version comes from nowhere."""
    assert parse_origin(None) == Origin()
    assert parse_origin(render_origin(Origin(request_id="r"))) == Origin(request_id="r")
