"""Commands over a run's socket: durable before they are acknowledged, done once, and refused with a reason."""

import asyncio
import os
import pwd
import socket
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic.core import events as e
from elastic.core.scheduler import Scheduler
from elastic.core.types import Plan
from elastic.protocol import control_socket as line_socket
from elastic.protocol import run_control as control
from elastic.protocol.run_control import (
    SOCKET,
    Acknowledged,
    CommandRefused,
    ControlError,
    Refused,
    RunControl,
    RunNotFound,
    RunOfAnotherUser,
    RunSilent,
)
from elastic.runtime.control import CommandManager, ControlSocket
from elastic.runtime.snapshot import run_status
from elastic.testing.faults.core.incarnation import policies
from elastic.testing.faults.core.settings import SMALL_LIMITS, WorldSettings


class CommandedRun:
    """A core with a socket in `path`, and a journal that is durable when `settle` is called, or at once."""

    def __init__(self, path: Path) -> None:
        settings = WorldSettings(plan=Plan(steps=1, groups=1, group_size=2))
        self.path = path
        self.core = Scheduler(settings.plan, SMALL_LIMITS, policies(settings), 0)
        self.events: list[e.Event] = []
        self.pending: list[Callable[[], None]] | None = None
        command_manager = CommandManager(
            self.core, self._feed, self._durable, lambda: ["spot", "serving"], self._status
        )
        self.socket = ControlSocket(path, command_manager)

    def _feed(self, event: e.Event) -> None:
        self.events.append(event)
        self.core.handle(event, 0)

    def _durable(self, then: Callable[[], None]) -> None:
        if self.pending is None:
            then()
        else:
            self.pending.append(then)

    def _status(self) -> Any:
        return run_status(
            "run",
            self.core,
            0,
            {},
            rewards=[],
            last_success_rate=None,
            last_mean_reward=None,
            tokens_per_s=0.0,
            function_usd=0.0,
        )

    async def raw(self, line: bytes) -> dict[str, Any]:
        return await asked(self.path, line)


async def asked(path: Path, line: bytes) -> dict[str, Any]:
    """What the socket in `path` answers."""
    reader, writer = await asyncio.open_unix_connection(str(path / SOCKET))
    writer.write(line)
    answer = await reader.readline()
    writer.close()
    return msgspec.json.decode(answer)


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[CommandedRun]:
    run = CommandedRun(tmp_path)
    await run.socket.start()
    yield run
    await run.socket.aclose()
    assert not (tmp_path / SOCKET).exists()


async def test_commands_become_events_of_the_core(run: CommandedRun) -> None:
    client = RunControl(run.path)
    await client.cap("spot", 4, "a")
    await client.budget(12.5, "b")
    assert (run.core.controls.caps, run.core.controls.budget_usd) == ({"spot": 4}, 12.5)
    await client.cap("spot", None, "c")
    await client.budget(None, "d")
    assert (run.core.controls.caps, run.core.controls.budget_usd) == ({}, None)
    reply = await client.status()
    assert (reply.run, reply.pid, reply.status["phase"]) == ("run", os.getpid(), "starting")
    assert await client.stop("enough", "e") == Acknowledged(id="e")
    assert run.core.stopped == "enough"
    assert run.events == [
        e.CapSet(command="a", provider="spot", gpus=4),
        e.BudgetSet(command="b", usd=12.5),
        e.CapSet(command="c", provider="spot", gpus=None),
        e.BudgetSet(command="d", usd=None),
        e.StopCommanded(command="e", reason="enough"),
    ]


async def test_a_command_is_acknowledged_once_it_is_durable(run: CommandedRun) -> None:
    run.pending = []
    with pytest.raises(RunSilent, match=r"did not answer within 0\.2 s"):
        await RunControl(run.path, timeout_s=0.2).cap("spot", 1, "a")
    asked = asyncio.create_task(RunControl(run.path).cap("spot", 1, "a"))
    pending = run.pending
    await until(lambda: len(pending) == 2)
    assert not asked.done()
    for settle in run.pending:
        settle()
    assert await asked == Acknowledged(id="a", repeated=True)
    assert len(run.events) == 1


async def test_a_repeat_is_done_once_even_while_the_run_ends(run: CommandedRun) -> None:
    client = RunControl(run.path)
    await client.stop("enough", "a")
    assert await client.stop("enough", "a") == Acknowledged(id="a", repeated=True)
    assert len(run.events) == 1
    for refused in (client.stop("enough", "b"), client.cap("spot", 1), client.budget(1.0)):
        with pytest.raises(CommandRefused, match="ending already: enough") as found:
            await refused
        assert found.value.kind == "ending"


async def test_an_id_stands_for_one_command(run: CommandedRun) -> None:
    client = RunControl(run.path)
    await client.cap("spot", 4, "a")
    with pytest.raises(CommandRefused, match="command a was another one: cap spot=4") as found:
        await client.cap("spot", 5, "a")
    assert (found.value.kind, run.core.controls.caps) == ("conflict", {"spot": 4})


async def test_only_the_runs_own_providers_are_capped(run: CommandedRun) -> None:
    client = RunControl(run.path)
    with pytest.raises(CommandRefused, match="no provider 'clouds'; allowed: spot, serving"):
        await client.cap("clouds", 4)
    with pytest.raises(CommandRefused, match="the run's own"):
        await client.cap("trainer", 0)
    assert not run.events


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense\n", "malformed"),
        (b'{"command": "explode", "id": "a"}\n', "Invalid value"),
        (b'{"command": "stop", "id": "a", "reason": ""}\n', "length >= 1"),
        (b'{"command": "cap", "id": "a", "provider": "spot", "gpus": -1}\n', ">= 0"),
        (b'{"command": "cap", "id": "a", "provider": "spot", "gpus": 1.5}\n', "Expected"),
        (b'{"command": "budget", "id": "a", "usd": -1}\n', ">= 0"),
        (b'{"command": "budget", "id": "a", "usd": 1e400}\n', "out of range"),
        (b'{"command": "budget", "id": "a", "usd": NaN}\n', "malformed"),
        (b'{"command": "budget", "id": "", "usd": 1}\n', "length >= 1"),
        (b'{"command": "budget", "id": "a", "usd": 1, "more": 2}\n', "unknown field"),
        (b"x" * 2 * control.REQUEST_BYTES_MAX + b"\n", "at most 16384 bytes"),
    ],
)
async def test_what_is_no_request_is_refused_with_words(run: CommandedRun, line: bytes, message: str) -> None:
    answer = await run.raw(line)
    assert (answer["answer"], answer["kind"]) == ("refused", "invalid")
    assert message in answer["message"]
    assert not run.events


async def test_whoever_says_nothing_holds_nothing(tmp_path: Path) -> None:
    async def answer(line: bytes) -> Refused:
        raise AssertionError(line)

    hasty = line_socket.LineSocket(
        tmp_path, answer, lambda message: Refused(kind="invalid", message=message), request_timeout_s=0.1
    )
    await hasty.start()
    answered = await asked(tmp_path, b"")
    assert "no line came within 0.1 s" in answered["message"]
    await hasty.aclose()


async def test_connections_are_bounded_and_others_go_on(run: CommandedRun) -> None:
    idle = [await asyncio.open_unix_connection(str(run.path / SOCKET)) for _ in range(line_socket.CONNECTIONS_MAX)]
    await until(lambda: len(run.socket.connections) == line_socket.CONNECTIONS_MAX)
    with pytest.raises(RunSilent, match="ended before it had answered"):
        await RunControl(run.path).status()
    for _, writer in idle:
        writer.close()
    await until(lambda: not run.socket.connections)
    await RunControl(run.path).status()


async def test_the_socket_is_its_owners_and_a_former_one_is_replaced(tmp_path: Path) -> None:
    (tmp_path / SOCKET).write_text("of a process that was killed")
    run = CommandedRun(tmp_path)
    await run.socket.start()
    assert stat.S_IMODE((tmp_path / SOCKET).stat().st_mode) == 0o600
    await RunControl(tmp_path).status()
    await run.socket.aclose()
    with pytest.raises(RunNotFound, match="no process is at it now"):
        await RunControl(tmp_path).status()
    with pytest.raises(RunNotFound, match="there is no such run"):
        await RunControl(tmp_path / "nowhere").status()


async def test_a_socket_of_a_process_that_was_killed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / SOCKET))
    assert (tmp_path / SOCKET).is_socket()
    with pytest.raises(RunNotFound, match="no process is at it now"):
        await RunControl(tmp_path).status()


async def test_a_directory_with_a_long_path(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120) / ("y" * 120)
    path.mkdir(parents=True)
    run = CommandedRun(path)
    await run.socket.start()
    await RunControl(path).cap("spot", 2)
    await run.socket.aclose()
    assert run.core.controls.caps == {"spot": 2}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_another_user_is_told_whose_run_it_is(run: CommandedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.path.chmod(0o755)
    monkeypatch.chdir(run.path)  # Whoever is there already needs no way through the folders above.
    nobody = pwd.getpwnam("nobody")
    was = os.geteuid()
    os.seteuid(nobody.pw_uid)
    try:
        with pytest.raises(RunOfAnotherUser, match="belongs to user root"):
            await RunControl(Path()).status()
    finally:
        os.seteuid(was)
    assert issubclass(RunOfAnotherUser, ControlError)
