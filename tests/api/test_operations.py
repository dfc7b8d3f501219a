"""Retry, workers and metrics: what operators do and watch."""

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from api.observing import REQUEST_METRICS
from api.routes.operations import COUNTERS, GAUGES, HISTOGRAMS
from contract.histograms import Histogram
from contract.models import ModelState, ModelStatus
from contract.scores import Problem
from storage.counters import add_counts
from storage.database import Database
from tests.api.conftest import make_settings
from tests.api.service import Service
from tests.services import free_port
from tests.storage.factories import run_sql

DOCS = Path(__file__).parents[2] / "docs"
POISONED = Problem("poisoned", "its workers died", 500)


async def test_a_failed_job_is_found_and_retried(service: Service) -> None:
    """Listed by state and error code; 202 under the same id; the key makes it one retry."""
    job_id = await service.submit()
    (job,) = await service.claim()
    await service.fail(job, POISONED)
    listed = await service.get("/v1/jobs?state=failed&error_code=poisoned")
    other = await service.get("/v1/jobs?state=failed&error_code=out_of_memory")
    shown = await service.get(f"/v1/jobs/{job_id}")

    first = await service.post(f"/v1/jobs/{job_id}/retry", {}, Idempotency_Key="k")
    again = await service.post(f"/v1/jobs/{job_id}/retry", {}, Idempotency_Key="k")
    await service.finish(await service.next_claim())
    ended = await service.get(f"/v1/jobs/{job_id}")
    refused = await service.post(f"/v1/jobs/{job_id}/retry", {})

    assert [row["id"] for row in listed.json["data"]] == [job_id]
    assert other.json["data"] == []
    assert shown.json["links"]["retry"].endswith(f"{job_id}/retry")
    assert (first.status, first.json["state"], first.json["id"]) == (202, "queued", job_id)
    assert (again.status, again.headers["Idempotent-Replayed"]) == (202, "true")
    assert (ended.json["state"], ended.json["attempt"]) == ("succeeded", 2)
    assert (refused.status, refused.json["code"]) == (409, "illegal_transition")


async def test_an_error_code_is_a_word(service: Service) -> None:
    """Anything else is refused by name."""
    answer = await service.get("/v1/jobs?error_code=%25")

    assert (answer.status, answer.json["param"]) == (422, "error_code")


async def test_workers_are_listed(service: Service) -> None:
    """With their models; one whose heart stopped is not alive."""
    await service.report_ready()
    await service.report(ModelStatus(name="other", state=ModelState.FAILED, reason="r"))
    await run_sql(
        service.database,
        "UPDATE workers SET heartbeat_at = heartbeat_at - 1000 WHERE models LIKE '%other%'",
    )

    rows = (await service.get("/v1/workers")).json["data"]

    found = {(*row["models"].items(), row["alive"]) for row in rows}
    assert found == {(("tiny", "ready"), True), (("other", "failed"), False)}
    assert all(row["pid"] == 1 and row["heartbeat_age_s"] >= 0 for row in rows)


async def test_metrics_show_queue_and_counters(service: Service) -> None:
    """Prometheus text with depth, age and every counter; few labels."""
    await service.report_ready()
    await service.submit()
    async with service.database.transaction() as tx:
        await add_counts(tx, {"fenced_writes": 2})
        await add_counts(tx, {"fenced_writes": 1, "commit_seconds": 0.5})

    answer = await service.get("/metrics")
    families = {f.name: f for f in text_string_to_metric_families(answer.body.decode())}
    depth = families["scorekeep_queue_jobs"].samples

    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert [(s.labels, s.value) for s in depth] == [({"model": "tiny", "lane": "normal"}, 1.0)]
    assert families["scorekeep_queue_age_seconds"].samples[0].value >= 0
    assert families["scorekeep_fenced_writes"].samples[0].value == 3
    assert families["scorekeep_commit_seconds"].samples[0].value == 0.5
    assert families["scorekeep_workers"].samples[0].value == 1
    named = {*COUNTERS, *HISTOGRAMS}
    requests = {name.removesuffix("_total") for name in REQUEST_METRICS}
    assert set(families) == {f"scorekeep_{name}" for name in named} | set(GAUGES) | requests


async def test_metrics_show_histograms_of_all_workers(service: Service) -> None:
    """What several workers added is one histogram, whose buckets hold all below them."""
    async with service.database.transaction() as tx:
        for values in ((1, 5), (900,)):
            sizes = Histogram("batch_sequences")
            for value in values:
                sizes.observe(value)
            await add_counts(tx, sizes.totals())

    answer = await service.get("/metrics")
    families = {f.name: f for f in text_string_to_metric_families(answer.body.decode())}
    samples = families["scorekeep_batch_sequences"].samples
    buckets = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}

    assert (buckets["1.0"] if "1.0" in buckets else buckets["1"]) == 1
    assert (buckets["8.0"] if "8.0" in buckets else buckets["8"]) == 2
    assert buckets["+Inf"] == 3
    assert [s.value for s in samples if s.name.endswith("_sum")] == [906]
    assert [s.value for s in samples if s.name.endswith("_count")] == [3]


async def test_the_grafana_dashboard_names_what_is_exposed(service: Service) -> None:
    """Every metric of deploy/grafana/scorekeep.json is in the text that /metrics gives."""
    await service.report_ready()
    await service.submit()
    dashboard = json.loads((DOCS.parent / "deploy/grafana/scorekeep.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"scorekeep_\w+", query)}

    await service.get("/healthz")
    text = (await service.get("/metrics")).body.decode()
    exposed = {sample.name for f in text_string_to_metric_families(text) for sample in f.samples}

    assert len(named) > 20
    assert named <= exposed
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


async def test_metrics_survive_the_store(
    sqlite_database: Database, blob_url: str, redis_url: str
) -> None:
    """They say that it is down."""
    url = f"postgresql+asyncpg://postgres@127.0.0.1:{free_port()}/none"
    service = Service(make_settings(url, blob_url, redis_url), sqlite_database)
    await service.start()
    answer = await service.get("/metrics")
    await service.stop()

    assert answer.status == 200
    assert b"scorekeep_store_up 0.0" in answer.body


def test_every_metric_is_documented() -> None:
    """docs/operations.md names each."""
    text = (DOCS / "operations.md").read_text()
    names = [*GAUGES, *REQUEST_METRICS, *(f"scorekeep_{name}" for name in HISTOGRAMS)]
    names += [f"scorekeep_{name}_total" for name in COUNTERS]

    assert [name for name in names if f"`{name}`" not in text] == []
