"""Scores and hidden states: JSON, safetensors, ranges, digests."""

import asyncio
import base64
import hashlib
import json

import pytest

from storage.tensors import parse_header
from tests.api.service import Answer, Service, hidden_bytes

SAFETENSORS = {"Accept": "application/vnd.safetensors"}
FILE_PATHS = ["hidden_states", "items/1/hidden_state"]


def tensors_of(answer: Answer) -> dict[str, tuple[str, list[int], bytes]]:
    """Return dtype, shape and bytes of each tensor of a file."""
    return {
        entry.name: (entry.dtype, entry.shape, answer.body[entry.begin : entry.end])
        for entry in parse_header(answer.body)
    }


async def test_scores_as_json(service: Service) -> None:
    """Rows in input order, labels, mass; the client may cache nothing that depends on Accept."""
    job_id = await service.submit_and_finish()

    answer = await service.get(f"/v1/jobs/{job_id}/scores")

    assert answer.status == 200
    assert answer.headers["Vary"] == "Accept"
    assert answer.json["scores"] == [[0.0, 0.0], [1.0, -1.0]]
    assert answer.json["labels"] == ["negative", "positive"]
    assert answer.json["label_mass"] == [0.5, 0.5]
    assert answer.json["token_logprobs"] is None


async def test_scores_as_safetensors(service: Service) -> None:
    """The same numbers as a file, without the hidden states."""
    job_id = await service.submit_and_finish()

    answer = await service.get(f"/v1/jobs/{job_id}/scores", headers=SAFETENSORS)
    tensors = tensors_of(answer)

    assert answer.headers["Content-Type"] == "application/vnd.safetensors"
    assert set(tensors) == {"scores", "label_mass"}
    assert tensors["scores"][:2] == ("F32", [2, 2])


async def test_failed_items_are_null_and_have_no_state(service: Service) -> None:
    """A partial job has its other rows; the failed item's state is a 404 that says why."""
    job_id = await service.submit(return_pooled_hidden_states=True)
    await service.finish(await service.claim(), failed=[0])
    path = f"/v1/jobs/{job_id}"

    scores = (await service.get(f"{path}/scores")).json
    hidden = (await service.get(f"{path}/hidden_states?encoding_format=float")).json
    coded = (await service.get(f"{path}/hidden_states?encoding_format=base64")).json
    failed = await service.get(f"{path}/items/0/hidden_state")

    assert scores["scores"] == [None, [1.0, -1.0]]
    assert scores["label_mass"] == [None, 0.5]
    assert scores["errors"] == [
        {"index": 0, "code": "input_too_long", "message": "900 tokens, 64 fit"}
    ]
    assert hidden["hidden_states"] == [None, [1.0] * 4]
    assert coded["hidden_states"] == [None, base64.b64encode(hidden_bytes(1)).decode()]
    assert failed.status == 404
    assert "input_too_long" in failed.json["detail"]


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
async def test_hidden_states_are_a_file_in_the_models_dtype(service: Service, dtype: str) -> None:
    """The bytes are the worker's, to the bit; tag and digests are of the file."""
    job_id = await service.submit(return_pooled_hidden_states=True)
    await service.finish(await service.claim(), hidden_dtype=dtype)

    answer = await service.get(f"/v1/jobs/{job_id}/hidden_states")
    digest = hashlib.sha256(answer.body)
    rendered = f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"

    assert answer.status == 200
    expected = hidden_bytes(0, dtype) + hidden_bytes(1, dtype)
    assert tensors_of(answer) == {"hidden_states": (dtype, [2, 4], expected)}
    assert answer.headers["ETag"] == f'"{digest.hexdigest()}"'
    assert answer.headers["Content-Digest"] == answer.headers["Repr-Digest"] == rendered
    assert answer.headers["Accept-Ranges"] == "bytes"


async def test_one_items_state_is_a_file(service: Service) -> None:
    """One row, without the item dimension; or as JSON."""
    job_id = await service.submit_and_finish()
    path = f"/v1/jobs/{job_id}/items/1/hidden_state"

    answer = await service.get(path)
    shown = (await service.get(f"{path}?encoding_format=float")).json

    assert tensors_of(answer) == {"hidden_states": ("BF16", [4], hidden_bytes(1))}
    assert shown["hidden_states"] == [[1.0] * 4]
    assert shown["shape"] == [4]


@pytest.mark.parametrize("path", FILE_PATHS)
@pytest.mark.parametrize(
    ("begin", "end", "header"),
    [
        (0, 1, "bytes=0-0"),
        (3, 150, "bytes=3-149"),
        (140, None, "bytes=140-"),
        (-5, None, "bytes=-5"),
    ],
)
async def test_parts_are_sent(
    sqlite_service: Service, path: str, begin: int, end: int | None, header: str
) -> None:
    """206 with exactly those bytes, wherever header and data meet, and the part's own digest."""
    job_id = await sqlite_service.submit_and_finish()
    url = f"/v1/jobs/{job_id}/{path}"
    whole = await sqlite_service.get(url)

    part = await sqlite_service.get(url, headers={"Range": header})
    digest = base64.b64encode(hashlib.sha256(part.body).digest()).decode()

    assert part.status == 206
    assert part.body == whole.body[begin:end]
    assert part.headers["Content-Range"].endswith(f"/{len(whole.body)}")
    assert part.headers["Content-Digest"] == f"sha-256=:{digest}:"
    assert part.headers["Repr-Digest"] == whole.headers["Repr-Digest"]
    assert part.headers["ETag"] == whole.headers["ETag"]


async def test_preconditions_of_files(sqlite_service: Service) -> None:
    """416 with the size; ``If-Range`` and ``If-None-Match`` by the tag; HEAD without a body."""
    job_id = await sqlite_service.submit_and_finish()
    url = f"/v1/jobs/{job_id}/hidden_states"
    whole = await sqlite_service.get(url)
    tag = whole.headers["ETag"]

    beyond = await sqlite_service.get(url, headers={"Range": "bytes=99999-"})
    same = await sqlite_service.get(url, headers={"Range": "bytes=0-0", "If-Range": tag})
    other = await sqlite_service.get(url, headers={"Range": "bytes=0-0", "If-Range": '"x"'})
    fresh = await sqlite_service.get(url, headers={"If-None-Match": tag})
    head = await sqlite_service.request("HEAD", url)

    assert beyond.status == 416
    assert beyond.headers["Content-Range"] == f"bytes */{len(whole.body)}"
    assert beyond.json["code"] == "range_not_satisfiable"
    assert same.status == 206
    assert other.status == 200
    assert other.body == whole.body
    assert fresh.status == 304
    assert fresh.body == b""
    assert head.status == 200
    assert head.headers["Content-Length"] == str(len(whole.body))
    assert head.headers["ETag"] == tag


@pytest.mark.parametrize("path", ["scores", "hidden_states", "items/0/hidden_state"])
async def test_no_result_yet_is_a_conflict_worth_retrying(
    sqlite_service: Service, path: str
) -> None:
    """409 with ``Retry-After`` before the end, without and not to be retried after a cancel."""
    job_id = await sqlite_service.submit(return_pooled_hidden_states=True)

    early = await sqlite_service.get(f"/v1/jobs/{job_id}/{path}")
    await sqlite_service.post(f"/v1/jobs/{job_id}/cancel", {})
    late = await sqlite_service.get(f"/v1/jobs/{job_id}/{path}")

    assert early.status == late.status == 409
    assert early.json["code"] == "result_not_ready"
    assert early.headers["Retry-After"]
    assert "x-should-retry" not in early.headers
    assert late.json["code"] == "conflict"
    assert late.headers["x-should-retry"] == "false"


async def test_what_was_not_asked_for_is_not_there(sqlite_service: Service) -> None:
    """404 for hidden states of a job without them, and for items that it does not have."""
    plain = await sqlite_service.submit()
    await sqlite_service.finish(await sqlite_service.claim())
    asked = await sqlite_service.submit_and_finish()

    missing = await sqlite_service.get(f"/v1/jobs/{plain}/hidden_states")
    indices = ["2", "-1", "x", "1.0", "99999999999"]
    answers = [
        await sqlite_service.get(f"/v1/jobs/{asked}/items/{index}/hidden_state")
        for index in indices
    ]

    assert missing.status == 404
    assert "return_pooled_hidden_states" in missing.json["detail"]
    assert [answer.status for answer in answers] == [404] * len(indices)


async def test_unacceptable_forms_are_refused(sqlite_service: Service) -> None:
    """406 for types that there are not, 422 for encodings that there are not."""
    job_id = await sqlite_service.submit_and_finish()
    path = f"/v1/jobs/{job_id}"

    for part in ("scores", "hidden_states", "items/0/hidden_state"):
        answer = await sqlite_service.get(f"{path}/{part}", headers={"Accept": "text/html"})
        assert answer.status == 406
    answer = await sqlite_service.get(f"{path}/hidden_states?encoding_format=hex")
    assert answer.status == 422
    assert answer.json["param"] == "encoding_format"


async def test_a_large_tensor_is_not_made_json(
    sqlite_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """413 that leads to safetensors."""
    monkeypatch.setattr("api.results.MAX_JSON_BYTES", 8)
    job_id = await sqlite_service.submit_and_finish()

    answer = await sqlite_service.get(f"/v1/jobs/{job_id}/hidden_states?encoding_format=base64")

    assert answer.status == 413
    assert "safetensors" in answer.json["detail"]


async def test_reading_while_a_neighbour_is_deleted(service: Service) -> None:
    """A blob that is rewritten under the reader is found again: 200 and the right bytes."""
    ids = [await service.submit(return_pooled_hidden_states=True) for _ in range(6)]
    await service.finish(await service.claim())
    keeper, others = ids[0], ids[1:]

    async def read() -> None:
        for _ in range(20):
            answer = await service.get(f"/v1/jobs/{keeper}/scores")
            assert answer.json["scores"] == [[0.0, 0.0], [1.0, -1.0]]

    deletes = [service.request("DELETE", f"/v1/jobs/{job_id}") for job_id in others]
    reading = asyncio.create_task(read())
    answers = await asyncio.gather(*deletes)
    await reading

    assert [answer.status for answer in answers] == [204] * len(others)


async def test_lost_bytes_are_gone_and_no_fault_of_the_client(sqlite_service: Service) -> None:
    """A blob that somebody removed by hand gives 410, not a 500."""
    job_id = await sqlite_service.submit_and_finish()
    keys = [info.key async for info in sqlite_service.blobs.list()]

    await sqlite_service.blobs.delete(keys)

    for part in ("scores", "hidden_states"):
        answer = await sqlite_service.get(f"/v1/jobs/{job_id}/{part}")
        assert answer.status == 410
        assert json.loads(answer.body)["code"] == "gone"
