"""What a process was started to ignore, it ignores: SIGHUP under `nohup`, SIGINT of a script's background job."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.system.signals import TERMINATION_OR_HANGUP, act_on, handled

ROOT = Path(__file__).parents[1]
MAY_INSTALL = {
    "elastic/system/signals.py",
    "elastic/testing/faults/shell/network.py",  # A loop of the worlds of faults, which has no process.
    "elastic/engine/vllm/process.py",  # Faults that end the process, not requests to end.
    "elastic/simulation/calibration/engine.py",  # Ignores.
    "benchmarks/_checkers.py",  # A timer's.
    "benchmarks/_hosted.py",  # A job's program of a few lines.
    "benchmarks/token_plane.py",  # A server that is only compared with.
}
WAITING = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
signal.sigtimedwait({signal.SIGTERM}, 60)
"""
SUPERVISOR = """
import sys
from elastic.cli.upkeep import keep_up
raise SystemExit(keep_up([sys.executable, "-c", sys.argv[1]], lambda status: False, 0, "it"))
"""
LOOP = """
import asyncio
from elastic.system.signals import TERMINATION_OR_HANGUP, act_on

async def main():
    told = asyncio.Event()
    act_on(TERMINATION_OR_HANGUP, told.set)
    print("ready", flush=True)
    await told.wait()

asyncio.run(main())
"""


@pytest.fixture
def ignored() -> Callable[..., "subprocess.Popen[str]"]:
    """A program of Python's that was started to ignore a signal."""

    def start(number: signal.Signals, *program: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", *program],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(number, signal.SIG_IGN),
            start_new_session=True,
        )

    return start


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("program", [(LOOP,), (SUPERVISOR, WAITING)], ids=["loop", "supervisor"])
def test_an_inherited_deafness_stays(
    ignored: Callable[..., "subprocess.Popen[str]"], number: signal.Signals, program: tuple[str, ...]
) -> None:
    """Only a real process inherits ignored signals."""
    process = ignored(number, *program)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
        assert caught is not None
        assert not int(caught[1], 16) & 1 << (number - 1)
        os.killpg(process.pid, number)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


async def test_others_are_heeded_and_given_back() -> None:
    before = signal.SIG_DFL
    signal.signal(signal.SIGHUP, before)
    told = asyncio.Event()
    end = act_on(TERMINATION_OR_HANGUP, told.set)
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(30):
            await told.wait()
    finally:
        end()
    assert signal.getsignal(signal.SIGHUP) == before
    seen: list[int] = []
    with handled((signal.SIGHUP,), lambda number, _: seen.append(number)):
        os.kill(os.getpid(), signal.SIGHUP)
    assert (seen, signal.getsignal(signal.SIGHUP)) == ([signal.SIGHUP], before)


def test_handlers_are_installed_in_one_place() -> None:
    installs = re.compile(r"signal\.signal\(|add_signal_handler\(|uvicorn\.Server\(|uvicorn\.run\(")
    found = {
        str(path.relative_to(ROOT))
        for room in ("elastic", "functions", "providers", "policies", "benchmarks", "infra")
        for path in (ROOT / room).rglob("*.py")
        if installs.search(path.read_text(encoding="utf-8"))
    }
    assert found == MAY_INSTALL, "handlers are installed by elastic.system.signals"
