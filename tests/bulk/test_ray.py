"""Ray's class gives what a bulk gives, row by row; with real Ray where it is installed."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from contract.models import ModelConfig
from tests.bulk.bench import Bulks, render, rows

pyarrow = pytest.importorskip("pyarrow")

from scorekeep.ray import Score, number_lines  # noqa: E402  # needs pyarrow

CONFIG: dict[str, Any] = {"source": "builtin:deterministic", "max_tokens": 40}
LINES: list[dict[str, Any]] = [
    *rows(40),
    {"custom_id": "two", "items": ["a", "far too long for this model, by far, it really is"]},
    {"custom_id": "query", "item": "b", "query": "q"},
    {"custom_id": "none", "items": []},
    {"custom_id": "bad", "item": "x", "temperature": 2.0},
]


def to_table(lines: list[dict[str, Any]]) -> Any:
    """Return the lines as Ray reads JSONL: what a line lacks is null."""
    return pyarrow.Table.from_pylist(lines, schema=_schema())


def _schema() -> Any:
    text = pyarrow.string()
    return pyarrow.schema(
        [
            ("custom_id", text),
            ("item", text),
            ("items", pyarrow.list_(text)),
            ("query", text),
            ("temperature", pyarrow.float64()),
        ]
    )


async def test_rows_are_those_of_a_bulk(sqlite_bulks: Bulks) -> None:
    """The same lines as a bulk and as a Ray batch: the same rows, numbers and errors."""
    await sqlite_bulks.start_worker(tiny=ModelConfig(**CONFIG))
    bulk = await sqlite_bulks.run(LINES, on_invalid="skip")
    url = f"/v1/bulks/{bulk['id']}/results"
    kind = "application/vnd.apache.arrow.stream"
    answer = await sqlite_bulks.service.get(url, headers={"Accept": kind})
    expected = pyarrow.ipc.open_stream(answer.body).read_all()

    found = Score("tiny", CONFIG)(to_table(LINES))

    assert found.schema == expected.schema
    wanted = [row | {"line": None} for row in expected.to_pylist()]
    refused = wanted.pop()
    assert found.to_pylist()[:-1] == wanted
    assert found.to_pylist()[-1] == refused | {"model": "tiny"}


def test_columns_and_hidden_states() -> None:
    """Columns of any name are mapped, others ignored; hidden states come as a column."""
    table = pyarrow.table({"uid": [7, 8], "text": ["a", "b"], "rest": [0, 0], "line": [3, 4]})
    score = Score("m", CONFIG, columns={"item": "text", "id": "uid"}, hidden_states=True)

    found = score(table).to_pylist()

    assert [row["custom_id"] for row in found] == ["7", "8"]
    assert [row["line"] for row in found] == [3, 4]
    assert [len(row["hidden_states"]) for row in found] == [16, 16]


def test_batches_keep_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond one batch of tokens go through the model in several; answers keep their order."""
    score = Score("m", CONFIG, batch_tokens=30)
    seen: list[int] = []
    forward = score._scorer.forward

    def count(sequences: Any) -> Any:
        seen.append(sum(sequence.cost_tokens for sequence in sequences))
        return forward(sequences)

    monkeypatch.setattr(score._scorer, "forward", count)
    found = score(to_table(rows(20))).to_pylist()
    whole = Score("m", CONFIG)(to_table(rows(20))).to_pylist()

    assert found == whole
    assert len(seen) > 1
    assert max(seen) <= 30


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is an extra: pip install 'scorekeep[ray]'"
)
def test_ray_reads_jsonl_and_writes_parquet(tmp_path: Path) -> None:
    """Real Ray on loopback: a file of lines becomes Parquet with every line once, in order."""
    import ray  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    (tmp_path / "in.jsonl").write_bytes(render(rows(500)))
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    try:
        ray.data.DataContext.get_current().execution_options.preserve_order = True
        lines = number_lines(ray.data.read_json(str(tmp_path / "in.jsonl")))
        scored = lines.map_batches(
            Score,
            fn_constructor_args=("tiny", CONFIG),
            batch_format="pyarrow",
            batch_size=100,
            concurrency=1,
        )
        scored.write_parquet(str(tmp_path / "out"))
    finally:
        ray.shutdown()
    found = parquet.read_table(str(tmp_path / "out")).sort_by("line").to_pylist()
    direct = Score("tiny", CONFIG)(to_table(rows(500))).to_pylist()

    assert [row["line"] for row in found] == list(range(1, 501))
    assert [row["custom_id"] for row in found] == [f"row-{n}" for n in range(500)]
    assert [row["scores"] for row in found] == [row["scores"] for row in direct]
