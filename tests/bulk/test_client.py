"""The command line and the reader of hidden states, against the real application."""

import asyncio
import gzip
import json
import math
from pathlib import Path

import pytest
from aiohttp import web
from safetensors import safe_open

from contract.errors import ScoreError, UnavailableError
from contract.models import ModelConfig, ScoringPath
from scorekeep.bulk import BulkClient
from scorekeep.cli import main
from scorekeep.hidden import INDEX_FILE, HiddenStates
from tests.bulk.bench import MODELS, Bulks, render, rows


async def run(bulks: Bulks, *words: str) -> int:
    """Run a command in a thread, as a process would."""
    return await asyncio.to_thread(main, [*words, "--url", bulks.service.url])


async def test_submit_watch_and_fetch(
    sqlite_bulks: Bulks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Submitting twice is one bulk; results go on where the file ends, after a half line too."""
    await sqlite_bulks.start_worker()
    source, out = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    source.write_bytes(gzip.compress(render(rows(900))))
    submit = ("bulk", "submit", str(source), "--model", "tiny", "--softmax", "--json")
    assert await run(sqlite_bulks, *submit, "--watch") == 0
    bulk = json.loads(capsys.readouterr().out)
    assert await run(sqlite_bulks, *submit) == 0
    again = json.loads(capsys.readouterr().out)
    await run(sqlite_bulks, "bulk", "results", bulk["id"], "-o", str(out))
    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) // 2])
    await run(sqlite_bulks, "bulk", "results", bulk["id"], "-o", str(out))

    assert again["id"] == bulk["id"]
    assert bulk["counts"]["scored"] == 900
    assert out.read_bytes() == whole
    assert [json.loads(line)["line"] for line in whole.splitlines()] == list(range(1, 901))
    assert await run(sqlite_bulks, "bulk", "watch", bulk["id"]) == 0
    assert "900 of 900 lines" in capsys.readouterr().out
    assert await run(sqlite_bulks, "bulk", "cancel", bulk["id"]) == 1
    assert await run(sqlite_bulks, "rescore", bulk["id"], "--model", "other", "--watch") == 0
    assert "900 items scored, 0 of them from the cache" in capsys.readouterr().out


async def test_bulks_are_listed_and_causal_models_get_their_labels(
    sqlite_bulks: Bulks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a score takes a bulk takes for every line, and a re-score for those that there were."""
    judge = ModelConfig(source=MODELS["tiny"].source, path=ScoringPath.CAUSAL, instruction="")
    await sqlite_bulks.start_worker(tiny=MODELS["tiny"], other=judge)
    source = tmp_path / "in.jsonl"
    source.write_bytes(render(rows(2)))
    asked = ("--label", " yes", "--label", " no", "--instruction", "rate", "--softmax", "--watch")

    submitted = await run(
        sqlite_bulks, "bulk", "submit", str(source), "--model", "other", "--json", *asked
    )
    bulk = json.loads(capsys.readouterr().out)
    changed = await run(sqlite_bulks, "rescore", bulk["id"], "--watch", "--truncation", "item")
    capsys.readouterr()
    listed = await run(sqlite_bulks, "bulk", "list", "--json")
    found = json.loads(capsys.readouterr().out)
    await run(sqlite_bulks, "bulk", "list", "--limit", "1")
    newest = capsys.readouterr().out
    shown = await run(sqlite_bulks, "bulk", "show", bulk["id"])

    assert (submitted, changed, listed, shown) == (0, 0, 0, 0)
    assert [each["id"] for each in found][-1] == bulk["id"]
    assert len(found) == 2
    assert newest.startswith(found[0]["id"])
    assert capsys.readouterr().out.startswith(f"{bulk['id']} completed: 2 of 2 lines")
    assert [len(line["scores"][0]) for line in await sqlite_bulks.results(bulk["id"])] == [2, 2]


async def test_csv_columns_and_failures(
    sqlite_bulks: Bulks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns of a CSV are mapped; some failures are exit code 3, a refused file 1."""
    await sqlite_bulks.start_worker()
    source = tmp_path / "in.csv"
    source.write_text("uid,text\na,short\nb,far too long to fit\n")
    words = ("bulk", "submit", str(source), "--model", "short", "--watch", "--id", "uid")
    assert await run(sqlite_bulks, *words, "--item", "text") == 3
    assert await run(sqlite_bulks, *words, "--query", "text") == 1
    printed = capsys.readouterr().out
    bulk_id = printed.split()[0]
    results = await sqlite_bulks.results(bulk_id)

    assert [line["custom_id"] for line in results] == ["a", "b"]
    assert "no column 'item'" in printed


@pytest.mark.parametrize("shard_rows", [100, 65_536])
async def test_hidden_states_row_by_row(  # noqa: PLR0915  # one set, looked at from all sides
    sqlite_bulks: Bulks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_rows: int
) -> None:
    """The set opens with safetensors itself, rows lie in input order, failed ones are NaN."""
    monkeypatch.setattr("api.bulk.vectors.SHARD_ROWS", shard_rows)
    await sqlite_bulks.start_worker()
    lines = [
        *rows(520),
        {"custom_id": "long", "items": ["ok", "far too long for this model, by far"]},
    ]

    await sqlite_bulks.stop_workers()
    await sqlite_bulks.start_worker(tiny=ModelConfig(source=MODELS["tiny"].source, max_tokens=20))
    bulk = await sqlite_bulks.run(lines, hidden_states=True)
    folder = tmp_path / "hidden"
    assert await run(sqlite_bulks, "bulk", "hidden-states", bulk["id"], "-o", str(folder)) == 0
    job = await sqlite_bulks.service.post(
        "/v1/score", {"model": "tiny", "items": ["text 333"], "return_pooled_hidden_states": True}
    )
    expected = job.json["pooled_hidden_states"][0]

    with HiddenStates(folder) as states:
        assert states.shape == (522, 16)
        assert states[333].tolist() == expected
        assert states[-1].shape == (16,)
        assert math.isnan(states[521][0])
        assert states[520][0] == states[520:522][0][0]
        assert len(list(states)) == len(states) == 522
        assert list(states.ids())[520:] == [("long", 0), ("long", 1)]
        assert states[90:210].tolist() == [states[n].tolist() for n in range(90, 210)]
        with pytest.raises(IndexError):
            states[522]
        with pytest.raises(ValueError, match="steps of one"):
            states[0:10:2]
    with HiddenStates(folder, framework="torch") as tensors:
        assert tensors[333].tolist() == expected
    first = min(folder.glob("*.safetensors"))
    with safe_open(str(first), "np") as file:
        assert file.get_tensor("hidden_states").shape == (min(shard_rows, 522), 16)
        assert file.metadata()["bulk"] == bulk["id"]
    assert len(list(folder.glob("*.safetensors"))) == -(-522 // shard_rows)

    data = first.read_bytes()
    first.unlink()
    first.with_name(first.name + ".part").write_bytes(data[:1000])
    assert await run(sqlite_bulks, "bulk", "hidden-states", bulk["id"], "-o", str(folder)) == 0
    assert first.read_bytes() == data
    url = f"/v1/bulks/{bulk['id']}/hidden_states/{first.name}"
    for begin, end in ((0, 10), (700, 5000), (len(data) - 3, len(data) - 1)):
        part = await sqlite_bulks.service.get(url, headers={"Range": f"bytes={begin}-{end}"})
        assert part.status == 206
        assert part.body == data[begin : end + 1]
    assert (await sqlite_bulks.service.get(url.replace("00001", "00099", 1))).status == 404
    first.write_bytes(b"")
    with HiddenStates(folder) as states, pytest.raises(ScoreError, match="cannot be read"):
        states[0]


async def test_a_download_that_breaks_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is cut amid a line: the rest is fetched, no line twice."""
    monkeypatch.setattr("scorekeep.bulk._FIRST_BACKOFF_S", 0.001)
    lines = [b'{"line": %d}\n' % n for n in range(1, 6)]
    asked: list[str] = []

    async def results(request: web.Request) -> web.StreamResponse:
        after = int(request.query["after"])
        asked.append(request.query["after"])
        response = web.StreamResponse()
        await response.prepare(request)
        if len(asked) in {1, 3, 4, 5, 6, 7, 8, 9}:
            await response.write(b"".join(lines[after : after + 2]) + b'{"li')
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(b"".join(lines[after:]))
        return response

    app = web.Application()
    app.router.add_get("/v1/bulks/b/results", results)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with BulkClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
        last = await client.write_results("b", tmp_path / "out")
        with pytest.raises(UnavailableError, match="broke off"):
            await client.write_results("b", tmp_path / "never")
    await runner.cleanup()

    assert last == 5
    assert asked[:2] == ["0", "2"]
    assert await asyncio.to_thread((tmp_path / "out").read_bytes) == b"".join(lines)


async def test_what_is_no_set(sqlite_bulks: Bulks, tmp_path: Path) -> None:
    """A folder without an index, and a bulk without hidden states, are refused with a reason."""
    (tmp_path / INDEX_FILE).write_text("{}")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ScoreError, match="no set of hidden states"):
            HiddenStates(folder)
    await sqlite_bulks.service.report_ready()
    bulk_id = await sqlite_bulks.start(rows(1))
    early = await sqlite_bulks.service.get(f"/v1/bulks/{bulk_id}/hidden_states")
    await sqlite_bulks.start_worker()
    await sqlite_bulks.wait(bulk_id)
    without = await sqlite_bulks.service.get(f"/v1/bulks/{bulk_id}/hidden_states")

    assert early.status == 409
    assert without.status == 404
    async with BulkClient(sqlite_bulks.service.url) as client:
        with pytest.raises(ScoreError):
            await client.write_results("blk_none", tmp_path / "out")
