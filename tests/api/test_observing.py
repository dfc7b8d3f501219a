"""Requests are counted by route, logged with their ids, and known to the jobs they submit."""

import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from contract.origins import parse_origin
from tests.api.service import Service

JOB = {"model": "tiny", "items": ["a"]}


async def count_requests(service: Service) -> dict[tuple[str, str, str], float]:
    """Return the counts by method, route and status."""
    text = (await service.get("/metrics")).body.decode()
    (family,) = (
        f for f in text_string_to_metric_families(text) if f.name == "scorekeep_http_requests"
    )
    return {
        (s.labels["method"], s.labels["route"], s.labels["status"]): s.value
        for s in family.samples
        if s.name.endswith("_total")
    }


async def test_requests_are_counted_by_our_own_names(service: Service) -> None:
    """Ids and made-up paths and methods are no labels."""
    await service.report_ready()
    job_id = await service.submit()
    for path in (f"/v1/jobs/{job_id}", "/v1/jobs/job_nonsense", "/made/up/1", "/made/up/2"):
        await service.get(path)
    await service.request("PROPFIND", "/v1/jobs")

    counts = await count_requests(service)

    assert counts["POST", "/v1/jobs", "202"] == 1
    assert counts["GET", "/v1/jobs/{id}", "200"] == 1
    assert counts["GET", "/v1/jobs/{id}", "404"] == 1
    assert counts["OTHER", "unmatched", "404"] == 2
    assert counts["OTHER", "unmatched", "405"] == 1
    assert not any("made" in label for labels in counts for label in labels)


async def test_a_request_is_logged_with_its_ids(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Request id and job id are in one line; probes are not logged."""
    await service.report_ready()
    with caplog.at_level(logging.DEBUG, "api.observing"):
        answer = await service.post("/v1/jobs", JOB, X_Request_Id="given-1")
        await service.get("/healthz")

    (record,) = [each for each in caplog.records if each.getMessage() == "request"]
    assert record.__dict__["request_id"] == "given-1"
    assert record.__dict__["job"] == answer.json["id"]
    assert record.__dict__["route"] == "/v1/jobs"
    assert record.__dict__["status"] == 202


async def test_a_job_knows_its_request(service: Service) -> None:
    """What workers log and trace goes back to it."""
    await service.report_ready()
    await service.post("/v1/jobs", JOB, X_Request_Id="given-2")

    (job,) = await service.claim()

    assert parse_origin(job.origin).request_id == "given-2"
