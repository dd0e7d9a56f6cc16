"""A run on one machine and its worker on another: two network namespaces, and nothing between them but a bad link.

Needs root and `ip`; `make test-netns`.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from elastic.compose.incarnations import replay
from elastic.core.events import LeaseGranted, TokensReceived
from elastic.protocol.ticket_store import TicketBook
from elastic.runtime.journal import JournalError, RunDirectory
from tests.bad_link import BadLink, LinkQuality
from tests.cli.conftest import CONFIG
from tests.proof import check_tokens

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900)]

RUN_HOST, RUN_GATE = "10.77.1.1", "10.77.1.2"
WORKER_HOST, WORKER_GATE = "10.77.2.1", "10.77.2.2"
PORT = 7433
PATIENCE_S = 300.0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[dict[str, str]]:
    """Two namespaces, each with a cable to this one; there is no way from one to the other but by a proxy here."""
    names = {"run": f"elastic-run-{os.getpid()}", "worker": f"elastic-worker-{os.getpid()}"}
    cables = {"run": (RUN_HOST, RUN_GATE), "worker": (WORKER_HOST, WORKER_GATE)}
    with contextlib.ExitStack() as undo:
        for number, (role, (inside, outside)) in enumerate(cables.items()):
            name, cable = names[role], f"el{os.getpid() % 100_000}x{number}"
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("addr", "add", f"{outside}/24", "dev", cable)
            ip("link", "set", cable, "up")
            ip("-n", name, "addr", "add", f"{inside}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


class Far:
    """A run under way behind `gate`, a link to its gateway, and `relay`, one to its weights."""

    def __init__(self, machines: dict[str, str], directory: Path, config: Path) -> None:
        self._machines, self._directory, self._config = machines, directory, config
        self._processes: list[subprocess.Popen[str]] = []
        self.gate, self.relay = (BadLink(f"{RUN_HOST}:{port}", LinkQuality()) for port in (PORT, PORT + 1))

    async def start(self, *settings: str) -> None:
        await self.gate.start(WORKER_GATE, PORT)
        await self.relay.start(WORKER_GATE, PORT + 1)
        overrides = [part for setting in settings for part in ("--set", setting)]
        self.run = self.elastic(
            *("run", "run", str(self._config), "--providers", "joined"),
            *("--listen", f"{RUN_HOST}:{PORT}", "--advertise", WORKER_GATE, *overrides),
        )
        await self.until("the run listens", lambda: "endpoint" in self.notes())

    def elastic(self, where: str, *arguments: str) -> "subprocess.Popen[str]":
        command = ["ip", "netns", "exec", self._machines[where], sys.executable, "-m", "elastic.cli", *arguments]
        process = subprocess.Popen(
            command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._processes.append(process)
        return process

    def ticket(self, name: str = "ticket") -> Path:
        path = self._directory / name
        minted = subprocess.run(
            [
                *(sys.executable, "-m", "elastic.cli", "ticket", self.directory().name, "-o", str(path)),
                *("--directory", str(self._directory / "runs"), "--usd-per-gpu-hour", "0.5"),
            ],
            capture_output=True,
            text=True,
        )
        assert minted.returncode == 0, minted.stderr
        return path

    def worker(self, ticket: Path) -> "subprocess.Popen[str]":
        return self.elastic("worker", "worker", "--ticket-file", str(ticket))

    def directory(self) -> Path:
        (found,) = (self._directory / "runs").iterdir()
        return found

    def notes(self) -> dict[str, str]:
        with (
            contextlib.suppress(JournalError, ValueError, OSError),
            RunDirectory(self.directory()).newest_journal() as journal,
        ):
            return journal.meta()
        return {}

    def far_tokens(self) -> int:
        """Accepted of the worker elsewhere so far."""
        with RunDirectory(self.directory()).newest_journal() as journal:
            workers = {w for _, e in journal.events() if isinstance(e, LeaseGranted) for w in e.workers}
            far = {w for w in workers if w.startswith("joined")}
            events = [e for _, e in journal.events() if isinstance(e, TokensReceived) and e.worker in far]
        return sum(chunk.count for event in events for chunk in event.chunks)

    async def until(self, what: str, holds: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert self.run.poll() is None, (self.run.stdout and self.run.stdout.read(), what)
            assert time.monotonic() < deadline_s, what
            await asyncio.sleep(0.2)

    async def more_far_tokens(self) -> None:
        had = self.far_tokens()
        await self.until("tokens of the worker elsewhere", lambda: self.far_tokens() > had)

    async def aclose(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        await self.gate.aclose()
        await self.relay.aclose()


@pytest.fixture
async def far(machines: dict[str, str], tmp_path: Path, checkpoint: Path) -> AsyncIterator[Far]:
    path = tmp_path / "small.toml"
    text = CONFIG.format(directory=tmp_path, checkpoint=checkpoint).partition("[providers.spot]")[0]
    path.write_text(text.replace("window_s = 0.2", "window_s = 0.0"))
    far = Far(machines, tmp_path, path)
    yield far
    await far.aclose()


async def test_a_worker_elsewhere_works_through_whatever_befalls_its_link(far: Far) -> None:
    """Delays, a limit, resets, a stall and ten seconds of nothing: no token is lost, none comes twice."""
    await far.start("run.steps=1000")
    far.gate.quality.delay_s = far.relay.quality.delay_s = 0.025
    far.relay.quality.bytes_per_s = 12.5e6
    worker = far.worker(far.ticket())
    await far.more_far_tokens()

    async def stall() -> None:
        far.gate.cut()
        await asyncio.sleep(1.0)
        far.gate.mend()

    async def cut() -> None:
        for link in (far.gate, far.relay):
            link.cut()
        await asyncio.sleep(10.0)
        for link in (far.gate, far.relay):
            link.mend()

    async def reset() -> None:
        far.gate.reset()
        far.relay.reset()

    disturbances: list[Callable[[], Awaitable[None]]] = [reset, stall, cut, reset]
    for disturb in disturbances:
        await disturb()
        await far.more_far_tokens()
    assert worker.poll() is None, "the same process all the time: it came back each time"
    assert len([*TicketBook(far.directory()).all()]) == 1
    far.run.send_signal(signal.SIGINT)
    await asyncio.to_thread(far.run.wait, PATIENCE_S)
    assert check_tokens(RunDirectory(far.directory())) == (0, 0)
    assert replay(RunDirectory(far.directory())).ledger.imbalance_ns() == 0
    assert await asyncio.to_thread(worker.wait, PATIENCE_S) == 0, "it was told that the run is over"


async def test_who_may_not_join_is_told_why_across_machines(far: Far) -> None:
    await far.start("run.steps=1000")
    spent = far.ticket("spent")
    worker = far.worker(spent)
    await far.more_far_tokens()
    again = far.worker(spent)
    out, _ = await asyncio.to_thread(again.communicate, timeout=PATIENCE_S)
    assert again.returncode == 1
    assert "is spent on worker joined-" in out
    other = far.elastic("worker", "worker", "--ticket-file", str(far.ticket("other")), "--join", "nosuch.invalid:1")
    out, _ = await asyncio.to_thread(other.communicate, timeout=PATIENCE_S)
    assert "does not resolve" in out
    assert worker.poll() is None
