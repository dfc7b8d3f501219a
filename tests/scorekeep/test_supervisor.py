"""Children are kept running, reported, and stopped in order."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from contract.errors import UnavailableError
from scorekeep.supervisor import Command, Supervisor, render_status, run_once
from tests.scorekeep.processes import PATIENT, PYTHON, STUBBORN, is_gone, wait_until


def _command(name: str, code: str, *, grace_s: float = 10.0) -> Command:
    return Command(name, (*PYTHON, code), dict(os.environ), grace_s)


def _patient(log: Path, name: str, code: str = PATIENT) -> str:
    """A child that notes when it is up, and when it ends."""
    return code.replace('print("up", flush=True)', f"open({str(log)!r}, 'a').write('{name} up\\n')")


async def _until_read(log: Path, text: str) -> None:
    await asyncio.to_thread(wait_until, lambda: log.exists() and text in log.read_text())


async def test_children_are_stopped_in_reverse(tmp_path: Path) -> None:
    """The last started goes first, and the next waits until it is gone."""
    lines: list[str] = []
    supervisor = Supervisor(lines.append)
    log = tmp_path / "log"
    for name in ("first", "second"):
        ending = f"(open({str(log)!r}, 'a').write('{name} down\\\\n'), sys.exit(0))"
        code = _patient(log, name).replace("sys.exit(0)", ending.replace("\\\\n", "\\n"))
        await supervisor.start(_command(name, code))
        await _until_read(log, f"{name} up")
    pids = [child.pid for child in supervisor.children]

    await supervisor.stop()

    assert log.read_text().split("\n")[2:4] == ["second down", "first down"]
    assert all(pid is not None and is_gone(pid) for pid in pids)
    assert lines == []
    assert [child.pid for child in supervisor.children] == [None, None]


async def test_a_child_that_dies_is_started_again(tmp_path: Path) -> None:
    """It says so, and how it ended; pauses grow."""
    lines: list[str] = []
    supervisor = Supervisor(lines.append, back_off_s=0.05)
    log = tmp_path / "log"
    child = await supervisor.start(_command("worker", _patient(log, "one")))
    await _until_read(log, "one up")
    assert child.pid is not None

    os.kill(child.pid, signal.SIGKILL)

    await _until_read(log, "one up\none up")
    assert lines == ["worker ended (SIGKILL); starting it again in 0.05 s"]
    assert child.starts == 2
    assert await child.ended() == "SIGKILL"
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    await _until_read(log, "one up\none up\none up")
    await supervisor.stop()
    assert lines[1] == "worker ended (SIGKILL); starting it again in 0.1 s"


async def test_a_steady_child_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long life the pause starts small again."""
    monkeypatch.setattr("scorekeep.supervisor._STEADY_AFTER_S", 0.0)
    lines: list[str] = []
    supervisor = Supervisor(lines.append, back_off_s=0.01)
    child = await supervisor.start(_command("api", "raise SystemExit(3)"))

    async with asyncio.timeout(10):
        while child.starts < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await supervisor.stop()

    assert set(lines) == {"api ended (status 3); starting it again in 0.01 s"}


async def test_stop_does_not_wait_for_a_back_off() -> None:
    """A child that is down stays down, at once."""
    supervisor = Supervisor(lambda _line: None, back_off_s=30)
    child = await supervisor.start(_command("api", "raise SystemExit(3)"))
    await child.ended()

    async with asyncio.timeout(5):
        await supervisor.stop()

    assert child.starts == 1


async def test_a_child_that_will_not_end_is_killed(tmp_path: Path) -> None:
    """After its grace, and said."""
    lines: list[str] = []
    supervisor = Supervisor(lines.append)
    log = tmp_path / "log"
    child = await supervisor.start(_command("api", _patient(log, "it", STUBBORN), grace_s=0.1))
    await _until_read(log, "it up")
    pid = child.pid

    await supervisor.stop()

    assert pid is not None
    assert is_gone(pid)
    assert lines == ["api is still running after 0.1 s: killed"]


async def test_kill_is_at_once(tmp_path: Path) -> None:
    """kill() asks nobody; stop() afterwards only collects."""
    supervisor = Supervisor(lambda _line: None)
    log = tmp_path / "log"
    child = await supervisor.start(_command("api", _patient(log, "it", STUBBORN)))
    await _until_read(log, "it up")
    pid = child.pid

    supervisor.kill()

    assert pid is not None
    await asyncio.to_thread(wait_until, lambda: is_gone(pid))
    await supervisor.stop()


async def test_output_goes_where_it_is_sent(tmp_path: Path) -> None:
    """Both streams of all children into one file."""
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
    with (tmp_path / "log").open("wb") as log:
        supervisor = Supervisor(lambda _line: None, output=log.fileno(), back_off_s=30)
        child = await supervisor.start(_command("api", code))
        await child.ended()
        await supervisor.stop()

    assert (tmp_path / "log").read_text() == "out\nerr\n"


async def test_a_command_that_fails_says_why() -> None:
    """run_once raises with the end of the output; success is silent."""
    await run_once(_command("migrate", "print('fine')"))

    with pytest.raises(UnavailableError, match="migrate failed \\(status 3\\):\nno table"):
        await run_once(_command("migrate", "print('no table'); raise SystemExit(3)"))


async def test_a_command_that_hangs_is_ended() -> None:
    """run_once leaves nothing behind."""
    with pytest.raises(UnavailableError, match=r"migrate has not ended after 0\.2 s"):
        await run_once(_command("migrate", PATIENT), timeout_s=0.2)


def test_exit_codes_in_words() -> None:
    """Signals by name."""
    assert (render_status(0), render_status(-9)) == ("status 0", "SIGKILL")


async def test_a_child_that_never_started_can_be_stopped() -> None:
    """A supervisor whose start failed still stops."""
    supervisor = Supervisor(lambda _line: None)
    with pytest.raises(TypeError):
        await supervisor.start(Command("api", (), {"A": 1}))  # type: ignore[dict-item]

    await supervisor.stop()
    supervisor.kill()
