"""The parsers under atheris, which looks for inputs that reach new code: ``make fuzz``.

``python -m tests.fuzz.guided [--seconds 60] [--only headers]`` runs each target in a process of its
own, prints how many inputs it took, and ends with 1 where one of them was a finding. Targets are
what strangers write and we read; each says what must hold, as tests/fuzz/test_parsers.py does.
"""

import argparse
import asyncio
import gzip
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import atheris
import msgspec

with atheris.instrument_imports(include=["api", "contract", "scorekeep", "storage"]):
    from api.bulk.lines import LineParser
    from api.bulk.reading import read_lines
    from api.idempotency import parse_key
    from api.preferences import parse_preferences
    from api.ranges import is_match, select_range
    from api.routes.events import parse_last_id
    from contract.config import Settings
    from contract.errors import (
        MalformedRequestError,
        RangeNotSatisfiableError,
        SignatureError,
    )
    from contract.models import ModelState, ModelStatus
    from contract.webhooks import create_secret, verify
    from scorekeep.streams import EventReader
    from storage.tensors import Tensor, parse_header, render_safetensors

_MOMENT = 1_700_000_000
_SECRET = create_secret()
_DONE = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_SPARE_S = 60
_LONGEST_BYTES = 4096


def read_safetensors(data: bytes) -> None:
    """Every tensor of a header that is taken lies within the file."""
    try:
        entries = parse_header(data, size_bytes=len(data))
    except ValueError:
        return
    for entry in entries:
        assert 8 <= entry.begin <= entry.end <= len(data)


def read_jsonl(data: bytes) -> None:
    """Lines are numbered without a gap and none exceeds the limit, in whatever pieces they come."""
    if not data or data[1:5] == b"PAR1":  # that is another process's
        return
    step, most = data[0] % 16 + 1, 64

    async def read() -> list[tuple[int, bytes | None, str]]:
        async def pieces() -> AsyncIterator[bytes]:
            for start in range(1, len(data), step):
                yield data[start : start + step]

        return [line async for block in read_lines(pieces(), max_line_bytes=most) for line in block]

    try:
        lines = asyncio.run(read())
    except MalformedRequestError:
        return
    assert [number for number, _, _ in lines] == list(range(1, len(lines) + 1))
    assert all(raw is None or len(raw) <= most for _, raw, _ in lines)


def read_bulk_lines(data: bytes) -> None:
    """A line of a bulk is a request, or an error with the line's number."""
    parser = LineParser(
        {"m": ModelStatus(name="m", state=ModelState.READY)},
        endpoint=[None, "/v1/score", "/v1/rerank", "/v1/classify"][data[0] % 4] if data else None,
        model="m",
        parameters={},
        columns={},
        hidden_states=None,
        limits=Settings(max_items=10),
    )
    line = parser.parse(7, data[1:])
    assert (line.request is not None or line.family is not None) != (line.error is not None)
    assert line.error is None or line.error.line == 7


def verify_webhooks(data: bytes) -> None:
    """Nothing that we did not sign is taken."""
    provider = atheris.FuzzedDataProvider(data)
    headers = {
        "webhook-id": provider.ConsumeUnicodeNoSurrogates(20),
        "webhook-timestamp": provider.ConsumeUnicodeNoSurrogates(20)
        if provider.ConsumeBool()
        else str(_MOMENT),
        "webhook-signature": provider.ConsumeUnicodeNoSurrogates(80),
    }
    try:
        verify(provider.ConsumeBytes(100), headers, _SECRET, now=_MOMENT)
    except SignatureError:
        return
    message = "a signature of nobody's was taken"
    raise AssertionError(message)


def read_headers(data: bytes) -> None:
    """``Range``, ``Prefer``, ``Idempotency-Key``: an answer within bounds, or our refusal."""
    provider = atheris.FuzzedDataProvider(data)
    size = provider.ConsumeIntInRange(0, 2**40)
    text, other = (provider.ConsumeUnicodeNoSurrogates(200) for _ in range(2))
    is_match(other, '"abc"')
    try:
        part = select_range(text, other or None, etag='"abc"', size_bytes=size)
    except RangeNotSatisfiableError as error:
        part, size = None, error.size_bytes
    assert part is None or 0 <= part.begin < part.end <= size
    wait_s = parse_preferences([text, other]).wait_s
    assert wait_s is None or wait_s >= 0
    try:
        key = parse_key([text])
    except MalformedRequestError:
        return
    assert key is not None
    assert 1 <= len(key) <= 255
    assert key.isascii()
    assert key.isprintable()


def read_streams(data: bytes) -> None:
    """The server reads where to go on; the client an event, or that what came is no event."""
    text = data.decode("utf-8", "replace")
    assert 0 <= parse_last_id(text) < 10**18
    reader = EventReader(0)
    for line in text.splitlines():
        try:
            reader.take(line)
        except msgspec.DecodeError:
            return


TARGETS: dict[str, Callable[[bytes], None]] = {
    "safetensors": read_safetensors,
    "jsonl": read_jsonl,
    "bulk_lines": read_bulk_lines,
    "webhooks": verify_webhooks,
    "headers": read_headers,
    "streams": read_streams,
}
_SEEDS: dict[str, list[bytes]] = {
    "safetensors": [render_safetensors([Tensor("a", "F32", [1], b"abcd")])],
    "jsonl": [b'\x07{"item":"x"}\n\n{"item":"y"}', b"\x07" + gzip.compress(b'{"item":"x"}\n')],
    "bulk_lines": [
        b'\0{"item":"x","id":"a"}',
        b'\1{"custom_id":"a","method":"POST","url":"/v1/score","body":{"items":["x"],"model":"m"}}',
    ],
    "webhooks": [b"evt_1 v1,AAAA"],
    "headers": [b"\0\0\0\0\0bytes=0-99", b'\0\0\0\0\0wait=10, respond-async; "x"'],
    "streams": [b'id: 1\nevent: job.state\ndata: {"id":"j","state":"queued"}\n\n'],
}


def _run_apart(name: str, seconds: int) -> tuple[int, str]:
    """Run one target in a process of its own; return its inputs, and what was found."""
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(_SEEDS[name]):
            (Path(folder) / f"seed{number}").write_bytes(seed)
        command = [sys.executable, "-m", "tests.fuzz.guided", "--target", name, folder]
        command += [f"-max_total_time={seconds}", f"-max_len={_LONGEST_BYTES}"]
        command += ["-print_final_stats=1", "-timeout=10", f"-artifact_prefix={folder}/"]
        done = subprocess.run(  # noqa: S603  # words of ours
            command, capture_output=True, text=True, timeout=seconds + _SPARE_S, check=False
        )
    counted = _DONE.search(done.stderr)
    inputs = int(counted.group(1)) if counted else 0
    return inputs, "" if done.returncode == 0 and inputs else done.stdout + done.stderr


def main() -> int:
    """Run the targets one after the other."""
    if sys.argv[1:2] == ["--target"]:
        atheris.Setup([sys.argv[0], *sys.argv[3:]], TARGETS[sys.argv[2]])
        atheris.Fuzz()
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--only", choices=TARGETS, action="append")
    options = parser.parse_args()
    code = 0
    for name in options.only or TARGETS:
        inputs, finding = _run_apart(name, options.seconds)
        sys.stdout.write(f"{name}: {inputs} inputs, {'a finding' if finding else 'no finding'}\n")
        if finding:
            sys.stdout.write(finding[-4000:] + "\n")
            code = 1
        sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
