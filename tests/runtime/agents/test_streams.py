"""What a front hears of its clients' turns, over a real socket."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from elastic.core import commands as c
from elastic.core.types import SamplingParameters
from elastic.protocol import front_messages as m
from elastic.protocol.connection import Connection, over_socket
from elastic.protocol.frames import RefusedFrame
from elastic.protocol.run_control import socket_address
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.sampled import pack_ids
from elastic.runtime.agents import AgentLimits, AgentRollouts
from elastic.runtime.agents.hub import Doorkeeper, FrontHub
from elastic.runtime.agents.streams import FrontStreams

LIMITS = AgentLimits(
    sampling=SamplingParameters(max_new_tokens=8, noise_seed=0),
    pinned=frozenset(),
    max_turns=10,
    max_context_tokens=64,
    vocab_size=1000,
    open_turns_max=10,
    deadline_s=100.0,
    idle_s=100.0,
)
AGENT = m.AgentCaller(trajectory="0/0/0")


@asynccontextmanager
async def front(
    stopped: Callable[[], bool],
) -> AsyncIterator[tuple[AgentRollouts, Connection[m.FromFront, m.FromRun]]]:
    """A front that has an open turn."""
    rollouts = AgentRollouts(7, LIMITS, lambda event, payload=None: None, lambda: 0)
    rollouts.start(c.StartGroup(step=0, group="0/0", index=0, trajectories=("0/0/0", "0/0/1")))
    streams = FrontStreams(rollouts, lambda then: then(), stopped)
    ours, theirs = socket.socketpair()
    near, far = await over_socket(ours, m.RUN_SIDE, "a front"), await over_socket(theirs, m.FRONT_SIDE, "the run")
    far.send(m.FrontHello(m.FRONT_VERSION, 1))
    await Doorkeeper("run", RunSecrets(b"x" * 32), stopped, streams).welcome(near)
    rollouts.begin(m.BeginTrajectory(1, m.AgentCaller(driver="main"), b"{}", "g"))
    far.send(m.OpenTurns(2, AGENT, m.AgentCall("chat", b"1"), None, 0, pack_ids([1, 2])))
    assert isinstance(await heard(far), m.FrontWelcome)
    assert isinstance(await heard(far), m.TurnsTaken)
    try:
        yield rollouts, far
    finally:
        await far.aclose()
        await near.aclose()


async def heard(far: Connection[m.FromFront, m.FromRun]) -> m.FromRun:
    async with asyncio.timeout(30):
        return await far.receive()


async def test_a_trajectory_that_the_run_drops_is_over_for_its_clients() -> None:
    async with front(lambda: False) as (rollouts, far):
        rollouts.cancel("0/0/0")
        over = await heard(far)
    assert isinstance(over, m.TurnOver)
    assert (over.status, over.code, over.retry) == (410, "trajectory_over", False)


@pytest.mark.parametrize("finished", [False, True])
async def test_a_trajectory_that_ends_is_over_for_its_clients(finished: bool) -> None:
    """Also where its last turn is over, and its front is about to say what the answer is."""
    async with front(lambda: False) as (rollouts, far):
        if finished:
            rollouts.finish_turn("0/0/0/0")
            assert isinstance(await heard(far), m.TurnOver)
        rollouts.end(AGENT, "")
        over = await heard(far)
        assert isinstance(over, m.TurnOver)
        assert (over.stream, over.status, over.code, over.retry) == (1, 410, "trajectory_over", False)
        far.send(m.SettleTurn(1, 0))
        far.send(m.ShowTrajectory(3, AGENT))
        shown = await heard(far)
        assert isinstance(shown, m.TrajectoryShown), "the front is still heard"


async def test_of_a_run_that_is_being_stopped_no_trajectory_is_over() -> None:
    """It goes on with them once it is resumed: clients may ask again."""
    stopping: list[bool] = []
    async with front(lambda: bool(stopping)) as (rollouts, far):
        stopping.append(True)
        rollouts.cancel("0/0/0")
        said = await heard(far)
    assert isinstance(said, RefusedFrame)
    assert said.retry


@pytest.mark.parametrize("turns", range(6))
async def test_whoever_says_nothing_is_let_go_as_the_run_ends(turns: int, tmp_path: Path) -> None:
    """However far it has come: it is in the queue, taken, or being welcomed."""
    hub = FrontHub(tmp_path, Doorkeeper("run", RunSecrets(b"x" * 32), lambda: False))
    await hub.start()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.settimeout(5)
        with socket_address(tmp_path, m.SOCKET) as address:
            silent.connect(address)
        for _ in range(turns):
            await asyncio.sleep(0)
        await hub.aclose()
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""
