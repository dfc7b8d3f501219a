"""What a webhook says: under 20 kB whatever it is about, and the same at every attempt."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from contract.config import Settings
from contract.jobs import JobState, Lane
from contract.webhooks import EventType
from storage.blobs import BlobStore
from storage.deliveries import BulkNews, DueDelivery
from storage.jobs import JobRow
from worker.bodies import render_body

BULK = BulkNews(
    id="blk_1",
    kind="bulk",
    counts='{"lines":3}',
    metadata={"a": "b"},
    errors=None,
    output_file_id=None,
    error_file_id=None,
)
DELIVERY = DueDelivery(
    id="dlv_1",
    attempt=1,
    failures=0,
    url="https://example.org/",
    tenant="t",
    endpoint_id="",
    receiver="r",
    receiver_failures=0,
    event_id="evt_1",
    event_type=EventType.BATCH_COMPLETED,
    event_at=0.0,
    sequence=7,
    job=None,
    bulk=BULK,
    secrets=[],
)


def make_job(**fields: Any) -> JobRow:
    """Return a job that failed."""
    values: dict[str, Any] = dict.fromkeys(JobRow.__dataclass_fields__, 0) | {
        "id": "job_1",
        "model": "m",
        "lane": Lane.NORMAL,
        "state": JobState.FAILED,
        "metadata": {},
        "tensors": [],
        "usage": None,
        "error": None,
        "result": None,
        "blob_key": None,
    }
    return JobRow(**(values | fields))


async def render(blob_store: BlobStore, delivery: DueDelivery) -> dict[str, Any]:
    """Return the body's data, which is the same a second time and small enough."""
    settings = Settings(public_url="https://scores.example/")
    body = await render_body(settings, blob_store, delivery)
    assert body == await render_body(settings, blob_store, delivery)
    assert len(body) < 20_000
    event = msgspec.json.decode(body)
    assert (event["type"], event["sequence"]) == (delivery.event_type, 7)
    return dict(event["data"])


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (EventType.BATCH_PROGRESS, "running"),
        (EventType.BATCH_COMPLETED, "completed"),
        (EventType.BATCH_FAILED, "failed"),
        (EventType.BATCH_CANCELLED, "cancelled"),
        (EventType.BATCH_EXPIRED, "expired"),
    ],
)
async def test_a_bulk_is_as_its_event_says(
    blob_store: BlobStore, kind: EventType, state: str
) -> None:
    """Whatever became of it since; its links go where clients reach the service."""
    data = await render(blob_store, replace(DELIVERY, event_type=kind))

    assert (data["id"], data["object"], data["state"]) == ("blk_1", "bulk", state)
    assert data["counts"] == {"lines": 3}
    assert data["links"]["self"] == "https://scores.example/v1/bulks/blk_1"
    assert "output_file_id" not in data


async def test_a_batch_names_its_files_at_its_end(blob_store: BlobStore) -> None:
    """On its way there are none yet."""
    batch = replace(BULK, kind="batch", output_file_id="file_1")
    ended = await render(blob_store, replace(DELIVERY, bulk=batch))
    going = replace(DELIVERY, bulk=batch, event_type=EventType.BATCH_PROGRESS)

    assert (ended["output_file_id"], ended["error_file_id"]) == ("file_1", None)
    assert ended["links"]["batch"] == "https://scores.example/v1/batches/blk_1"
    assert "output_file_id" not in await render(blob_store, going)


async def test_very_many_errors_are_behind_the_links(blob_store: BlobStore) -> None:
    """Few are in the body, many are not; what identifies the bulk always is."""
    few = msgspec.json.encode([{"code": "c", "message": "m", "line": 1}]).decode()
    many = msgspec.json.encode([{"code": "c", "message": "m" * 900}] * 100).decode()
    short = await render(blob_store, replace(DELIVERY, bulk=replace(BULK, errors=few)))
    long = await render(blob_store, replace(DELIVERY, bulk=replace(BULK, errors=many)))

    assert short["errors"][0]["line"] == 1
    assert "errors" not in long
    assert long["metadata"] == {"a": "b"}


async def test_a_job_s_error_of_any_length(blob_store: BlobStore) -> None:
    """It is in the body when it fits, and dropped before the body grows too large."""
    errors = [msgspec.json.encode({"code": "c", "message": "x" * n}) for n in (10, 50_000)]
    found = [
        await render(
            blob_store,
            replace(
                DELIVERY, bulk=None, event_type=EventType.JOB_FAILED, job=make_job(error=error)
            ),
        )
        for error in errors
    ]

    assert found[0]["error"]["code"] == "c"
    assert "error" not in found[1]
    assert [each["id"] for each in found] == ["job_1"] * 2


async def test_a_test_event_is_about_its_endpoint(blob_store: BlobStore) -> None:
    """And about nothing else."""
    test = replace(DELIVERY, bulk=None, endpoint_id="whe_1", event_type=EventType.WEBHOOK_TEST)

    assert await render(blob_store, test) == {"object": "test", "endpoint": "whe_1"}
