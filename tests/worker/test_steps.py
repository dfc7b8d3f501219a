"""The steps of a batch: what is slow is said, with ids; what is not is silent."""

import logging
from dataclasses import replace

import pytest

from contract.jobs import Lane
from contract.origins import Origin, render_origin
from storage.claims import ClaimedJob
from worker.steps import Steps

JOB = ClaimedJob(
    id="job_1",
    tenant="t",
    model="m",
    lane=Lane.NORMAL,
    attempt=2,
    crash_count=0,
    error_count=0,
    item_count=3,
    estimated_tokens=9,
    run_timeout_s=None,
    created_at=0.0,
    compressed_request=b"the request",
    origin=render_origin(Origin(request_id="req_1")),
    waited_s=1.5,
)


def test_a_slow_job_is_logged_with_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    """Ids, how long it waited, each step; never what was asked. A batch does not flood the log."""
    steps = Steps([replace(JOB, id=f"job_{n}") for n in range(20)])
    for name in ("prepare", "forward", "store"):
        with steps.step(name):
            pass
    with caplog.at_level(logging.WARNING):
        steps.end(slow_s=-1.0)

    first = caplog.records[0].__dict__
    assert len(caplog.records) == 8
    assert (first["job"], first["request_id"], first["attempt"]) == ("job_0", "req_1", 2)
    assert first["waited_s"] == 1.5
    assert {"prepare_s", "forward_s", "store_s", "took_s"} <= set(first)
    assert "the request" not in str(first)


def test_a_quick_job_is_not(caplog: pytest.LogCaptureFixture) -> None:
    """Nor one without an origin traced."""
    steps = Steps([replace(JOB, origin=None)])
    with pytest.raises(KeyError), steps.step("forward"):
        raise KeyError
    with caplog.at_level(logging.WARNING):
        steps.end(slow_s=60.0)

    assert caplog.records == []
