"""Parquet that breaks, and Parquet made to break us: real files, refused with a reason."""

import io
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from api.bulk import parquet, reading
from api.bulk.reading import RawLine, read_lines
from contract.errors import MalformedRequestError, TooLargeError, UnsupportedMediaTypeError
from tests.bulk.bench import Bulks

pyarrow = pytest.importorskip("pyarrow")

_MIB = 1024 * 1024


def to_parquet(table: Any, **options: Any) -> bytes:
    """Return the bytes of a Parquet file, uncompressed unless ``options`` say otherwise."""
    from pyarrow.parquet import write_table  # noqa: PLC0415

    sink = io.BytesIO()
    write_table(table, sink, **{"compression": "none", "use_dictionary": False, **options})
    return sink.getvalue()


async def lines_of(data: bytes, max_line_bytes: int = 1000) -> list[RawLine]:
    """Read an input that comes in pieces; return its lines."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 1000):
            yield data[start : start + 1000]

    return [
        line
        async for block in read_lines(pieces(), max_line_bytes=max_line_bytes)
        for line in block
    ]


def repeated(value: str, count: int) -> Any:
    """Return a column of one text again and again, which takes the space of one."""
    codes = pyarrow.repeat(pyarrow.scalar(0, pyarrow.int32()), count)
    return pyarrow.DictionaryArray.from_arrays(codes, pyarrow.array([value]))


async def test_rows_become_lines() -> None:
    """Each row with its number, of every type that JSON has; one beyond the limit is reported."""
    table = pyarrow.table(
        {
            "item": [f"text {n}" for n in range(4999)] + ["x" * 2000],
            "tags": [["a", "b"]] * 5000,
            "more": [{"n": n, "none": None} for n in range(5000)],
        }
    )

    lines = await lines_of(to_parquet(table, compression="zstd", use_dictionary=True))

    assert [number for number, _, _ in lines] == list(range(1, 5001))
    assert lines[1][1] == b'{"item":"text 1","tags":["a","b"],"more":{"n":1,"none":null}}'
    assert lines[4999][1] is None
    assert "max_line_bytes" in lines[4999][2]


async def test_parquet_that_breaks_inside_is_refused() -> None:
    """The footer is whole and the pages are not, or hold no text: 400, not 500."""
    whole = to_parquet(pyarrow.table({"item": [f"text {n}" for n in range(5000)]}))
    broken = whole[:4] + b"\xff" * 500 + whole[504:]
    no_text = pyarrow.array([b"\xff\xfe"]).cast(pyarrow.binary())
    strange = pyarrow.StringArray.from_buffers(1, *no_text.buffers()[1:])

    assert len(await lines_of(whole)) == 5000
    for data in (broken, to_parquet(pyarrow.table({"item": strange}))):
        with pytest.raises(MalformedRequestError, match="Parquet file is broken"):
            await lines_of(data)


async def test_the_footer_alone_may_be_no_bomb() -> None:
    """Cut off, without a footer, or with one that says it is huge: said before pyarrow sees it."""
    whole = to_parquet(pyarrow.table({"item": ["a"]}))
    for data in (b"PAR1", whole[:-1], whole[:-8] + b"\xff\xff\xff\x00PAR1x"):
        with pytest.raises(MalformedRequestError, match="not Parquet"):
            await lines_of(data)
    with pytest.raises(MalformedRequestError, match="not Parquet"):
        await lines_of(whole[:4] + b"\x00" * 50 + (50).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(TooLargeError, match="footer"):
        await lines_of(whole[:-8] + b"\xff\xff\xff\x7fPAR1")


async def test_a_bomb_that_says_so_is_refused_unread() -> None:
    """100 MiB of one letter in some kilobytes: the footer names its size."""
    bomb = to_parquet(pyarrow.table({"item": ["x" * _MIB] * 100}), compression="zstd")

    with pytest.raises(TooLargeError, match="columns together"):
        await lines_of(bomb)

    assert len(bomb) < 100_000


def test_a_row_group_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large all may be together: what is in one group is said before it is read."""
    from pyarrow.parquet import read_metadata  # noqa: PLC0415

    data = to_parquet(pyarrow.table({"n": list(range(10_000))}))
    metadata = read_metadata(io.BytesIO(data))
    parquet._check_shape(metadata, 10**9)
    monkeypatch.setattr(parquet, "_ROW_GROUP_BYTES", 50_000)

    with pytest.raises(parquet.RefusedError, match="row group 0"):
        parquet._check_shape(metadata, 10**9)


async def test_a_bomb_that_hides_in_a_dictionary_is_stopped() -> None:
    """Ten thousand rows name one text of 30 kB: the lines would be 300 MB."""
    bomb = to_parquet(pyarrow.table({"item": repeated("x" * 30_000, 10_000)}), use_dictionary=True)

    with pytest.raises(TooLargeError, match="200 times its size"):
        await lines_of(bomb, max_line_bytes=100_000)

    assert len(bomb) < 100_000


async def test_a_bomb_in_one_row_meets_the_end_of_its_own_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list that names one text thousands of times: the reading process ends, and not the API."""
    monkeypatch.setattr(reading, "_PARQUET_MEMORY_BYTES", 200 * _MIB)
    texts = ["x" * 500_000] * 400
    table = pyarrow.table({"items": pyarrow.array([texts], pyarrow.list_(pyarrow.string()))})
    bomb = to_parquet(table, use_dictionary=True)

    with pytest.raises(TooLargeError, match="200 MiB of memory"):
        await lines_of(bomb)

    assert len(bomb) < 2 * _MIB


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (pyarrow.struct([(f"c{n}", pyarrow.int8()) for n in range(2000)]), "2000 columns"),
        ("deep", "deep"),
    ],
    ids=["wide", "deep"],
)
async def test_schemas_have_limits(schema: Any, reason: str) -> None:
    """Too many columns, and lists in lists in lists."""
    if schema == "deep":
        schema = pyarrow.int8()
        for _ in range(40):
            schema = pyarrow.list_(schema)
    bomb = to_parquet(pyarrow.table({"item": pyarrow.nulls(1, schema)}))

    with pytest.raises(TooLargeError, match=reason):
        await lines_of(bomb)


async def test_without_pyarrow_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """415, and what to install."""
    (tmp_path / "pyarrow.py").write_text("raise ImportError")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    whole = to_parquet(pyarrow.table({"item": ["a"]}))

    with pytest.raises(UnsupportedMediaTypeError, match="pip install"):
        await lines_of(whole)


@pytest.mark.parametrize(
    ("program", "reason"),
    [("import os; os.abort()", "nothing could read it"), ("while True: pass", "no row came")],
    ids=["crashes", "spins"],
)
async def test_a_reader_that_crashes_or_spins_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    """Whatever a file does to pyarrow, it is the file that is refused."""
    (tmp_path / "pyarrow.py").write_text(program)
    whole = to_parquet(pyarrow.table({"item": ["a"]}))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(reading, "_PARQUET_SILENCE_S", 2.0)
    before = set(psutil.Process().children())  # servers of other tests

    with pytest.raises(MalformedRequestError, match=reason):
        await lines_of(whole)

    assert set(psutil.Process().children()) <= before


async def test_a_reader_whose_reader_left_is_ended() -> None:
    """Who stops amid a file leaves no process behind."""
    whole = to_parquet(pyarrow.table({"item": ["x" * 900] * 60_000}))

    async def pieces() -> AsyncIterator[bytes]:
        yield whole

    before = set(psutil.Process().children())  # servers of other tests
    blocks = read_lines(pieces(), max_line_bytes=1000)
    await anext(blocks)
    running = set(psutil.Process().children()) - before
    await blocks.aclose()  # type: ignore[attr-defined]  # an async generator

    assert len(running) == 1
    assert set(psutil.Process().children()) <= before


async def test_the_process_that_reads_knows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is what Python needs."""
    monkeypatch.setenv("SCOREKEEP_DATABASE_URL", "postgresql://u:secret@h/d")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    environment = reading._plain_environment()

    assert environment["PATH"] == os.environ["PATH"]
    assert "secret" not in repr(environment)


async def test_a_bomb_is_an_error_of_its_bulk(sqlite_bulks: Bulks) -> None:
    """From the upload to the answer: the bulk fails, and says why."""
    bomb = to_parquet(pyarrow.table({"item": ["x" * _MIB] * 100}), compression="zstd")

    bulk = await sqlite_bulks.run(bomb)

    assert bulk["state"] == "failed"
    assert bulk["errors"][0]["code"] == "too_large"
    assert "may be" in bulk["errors"][0]["message"]
