"""Trajectories of env workers: what one played that is gone begins again under another key, and is scored once."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import InfrastructureCause
from elastic.protocol import front_messages as m
from elastic.protocol.connection import Connection, ConnectionLost, over_socket
from elastic.protocol.frames import RefusedFrame
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.sampled import pack_ids
from elastic.runtime.agents import AgentRollouts
from elastic.runtime.agents.hub import Doorkeeper
from elastic.runtime.agents.refusals import CallRefused
from elastic.runtime.agents.streams import FrontStreams
from elastic.runtime.blame import ALONE_MAX, TOGETHER_MAX
from tests.runtime.agents.test_agent_rollouts import LIMITS, Bench

SECRETS = RunSecrets(b"x" * 32)
CALL = m.AgentCall("chat", b"1")


def agent(trajectory: str, restart: int) -> m.AgentCaller:
    caller = SECRETS.caller_of(SECRETS.agent_key(trajectory, restart))
    assert caller is not None
    return caller


def asked(bench: Bench, trajectory: str, restart: int, call: bytes = b"1") -> str:
    """The turn that a call of whoever plays it is given."""
    turns, _ = bench.ask(m.AgentCall("chat", call), None, 0, [1, 2], caller=agent(trajectory, restart))
    return turns[0].id


def test_what_its_env_worker_leaves_begins_again_elsewhere() -> None:
    bench = Bench()
    first, second = bench.rollouts.begin_due("one"), bench.rollouts.begin_due("two")
    assert first is not None
    assert second is not None
    assert bench.rollouts.begin_due("one") is None
    assert (first.trajectory, first.restart, second.trajectory) == ("0/0/0", 0, "0/0/1")
    assert asked(bench, "0/0/0", 0) == "0/0/0/0"
    assert asked(bench, "0/0/0", 0, b"2") == "0/0/0/1"
    assert asked(bench, "0/0/1", 0) == "0/0/1/0"

    bench.rollouts.hold("one", (), "it was killed")
    with pytest.raises(CallRefused) as gone:
        asked(bench, "0/0/0", 0, b"3")
    assert (gone.value.status, gone.value.retry) == (410, False)
    assert "0/0/1/0" in bench.running, "what another env worker plays goes on"
    assert not {"0/0/0/0", "0/0/0/1"} & bench.running.keys(), "nobody waits for them any more"

    again = bench.rollouts.begin_due("two")
    assert again is not None
    assert (again.trajectory, again.restart, again.number) == ("0/0/0", 1, first.number)
    assert asked(bench, "0/0/0", 1) == "0/0/0/2", "turns keep names of their own"
    assert bench.rollouts.show(agent("0/0/0", 1)).turns == 1, "the limit of turns counts from the beginning"

    for now in (bench, bench.recalled()):
        with pytest.raises(CallRefused):
            now.rollouts.show(agent("0/0/0", 0))
        now.rollouts.hold("two", ("0/0/0",), "another incarnation")
        assert now.rollouts.show(agent("0/0/0", 1)).state == "open"
        assert now.rollouts.begin_due("one").trajectory == "0/0/1"  # type: ignore[union-attr]


CAUSE = "4 env workers in a row died of it, the last 2 while nothing else ran: it was killed"


def test_what_is_begun_too_often_has_failed_and_is_never_a_reward() -> None:
    bench = Bench()
    for restart in range(TOGETHER_MAX + ALONE_MAX):
        begun = bench.rollouts.begin_due("one")
        assert begun is not None
        assert (begun.trajectory, begun.restart) == ("0/0/0", restart)
        bench.rollouts.hold("one", (), "it was killed")
    event, _ = bench.ended["0/0/0"]
    assert event == e.TrajectoryFailed(trajectory="0/0/0", cause=CAUSE)
    assert bench.rollouts.begin_due("one").trajectory == "0/0/1"  # type: ignore[union-attr]


def test_a_reward_of_who_is_gone_counts_for_nothing() -> None:
    bench = Bench()
    bench.rollouts.begin_due("one")
    own = m.AgentCaller(driver="one", named="0-0-0")
    bench.rollouts.reward(own, 1.0)
    bench.rollouts.hold("one", (), "it was killed")
    with pytest.raises(CallRefused):
        bench.rollouts.end(own, "")
    bench.rollouts.begin_due("two")
    assert bench.rollouts.show(agent("0/0/0", 1)).reward is None


class Run:
    """A run's end of its socket, to which env workers connect."""

    def __init__(self, rollouts: AgentRollouts | None = None, *, served: bool = True) -> None:
        self.ended: list[e.Event] = []
        self.rollouts = rollouts or AgentRollouts(7, LIMITS, self._feed, lambda: 0)
        self.streams = FrontStreams(self.rollouts, lambda then: then(), lambda: False, secrets=SECRETS)
        if served:
            self.streams.served_at("http://here/v1")

    def _feed(self, event: e.Event, payload: Any = None) -> None:
        if isinstance(event, e.TrajectoryFinished | e.TrajectoryFailed):
            self.ended.append(event)

    def start(self, number: int, *trajectories: str) -> None:
        group = trajectories[0].rpartition("/")[0]
        self.rollouts.start(c.StartGroup(step=0, group=group, index=0, trajectories=trajectories, number=number))

    @asynccontextmanager
    async def worker(self, key: str, *holds: str) -> AsyncIterator[Connection[m.FromFront, m.FromRun]]:
        ours, theirs = socket.socketpair()
        near, far = await over_socket(ours, m.RUN_SIDE, "it"), await over_socket(theirs, m.FRONT_SIDE, "the run")
        far.send(m.DriverHello(m.FRONT_VERSION, key, list(holds)))
        await Doorkeeper("run", SECRETS, lambda: False, self.streams).welcome(near)
        try:
            yield far
        finally:
            await far.aclose()
            await near.aclose()


async def heard(far: Connection[m.FromFront, m.FromRun]) -> m.FromRun:
    async with asyncio.timeout(30):
        return await far.receive()


async def test_who_dials_before_the_fronts_are_there_is_given_nothing_until_then() -> None:
    run = Run(served=False)
    async with run.worker(SECRETS.driver_key("one")) as far:
        assert isinstance(await heard(far), m.FrontWelcome)
        far.send(m.BeginTrajectory(1, m.AgentCaller(), b"null", ""))
        run.start(0, "0/0/0")
        for _ in range(100):
            await asyncio.sleep(0)
        run.streams.served_at("http://here/v1")
        begun = await heard(far)
        assert isinstance(begun, m.TrajectoryBegun)
        assert begun.base_url == "http://here/v1"


async def test_an_env_worker_waits_for_what_is_due_and_says_what_came_of_it() -> None:
    run = Run()
    async with run.worker(SECRETS.driver_key("one")) as far:
        assert isinstance(await heard(far), m.FrontWelcome)
        far.send(m.BeginTrajectory(1, m.AgentCaller(driver="two"), b"null", ""))
        far.send(m.DriverBeat())
        await asyncio.sleep(0)
        run.start(5, "1/0/0")
        key = SECRETS.agent_key("1/0/0", 0)
        begun = m.TrajectoryBegun(1, "1/0/0", number=5, key=key, base_url="http://here/v1")
        assert await heard(far) == begun
        assert run.streams.heard_s("one") is not None
        assert run.streams.heard_s("two") is None, "it speaks as the driver whose key it has shown"
        run.rollouts.open(m.OpenTurns(9, agent("1/0/0", 0), CALL, None, 0, pack_ids([1, 2])))
        far.send(m.EndTrajectory(2, m.AgentCaller(named="1-0-0"), "the environment raised"))
        shown = await heard(far)
        assert isinstance(shown, m.TrajectoryShown)
        assert shown.status.state == "failed"
    assert run.ended == [e.TrajectoryFailed(trajectory="1/0/0", cause="the environment raised")]


async def test_an_end_that_is_asked_for_again_is_one() -> None:
    bench = Bench()
    run = Run(bench.rollouts)
    async with run.worker(SECRETS.driver_key("one")) as far:
        assert isinstance(await heard(far), m.FrontWelcome)
        far.send(m.BeginTrajectory(1, m.AgentCaller(), b"null", ""))
        assert isinstance(await heard(far), m.TrajectoryBegun)
        (turn,), _ = bench.ask(CALL, None, 0, [1, 2], caller=agent("0/0/0", 0))
        bench.generate(turn, 8)
        bench.rollouts.settle(turn, 8, b"")
        far.send(m.GiveReward(2, m.AgentCaller(named="0-0-0"), 1.0))
        await heard(far)
        for request in (3, 4):
            far.send(m.EndTrajectory(request, m.AgentCaller(named="0-0-0"), ""))
            shown = await heard(far)
            assert isinstance(shown, m.TrajectoryShown)
            assert shown.status.state == "finished"
            assert run.streams.done("one") == 1


async def test_who_comes_in_the_place_of_a_failed_member_is_given_to_who_waits() -> None:
    run = Run()
    run.start(3, "0/0/0")
    async with run.worker(SECRETS.driver_key("one")) as far:
        assert isinstance(await heard(far), m.FrontWelcome)
        for number in (1, 2):
            far.send(m.BeginTrajectory(number, m.AgentCaller(), b"null", ""))
        first = await heard(far)
        assert isinstance(first, m.TrajectoryBegun)
        cause = InfrastructureCause.ENGINE
        run.rollouts.refill(c.RefillMember(trajectory="0/0/1", replaces="0/0/0", cause=cause))
        second = await heard(far)
        assert isinstance(second, m.TrajectoryBegun)
        assert (second.trajectory, second.number) == ("0/0/1", 3)


async def test_slots_that_wait_are_looked_through_together() -> None:
    looks: list[str] = []

    class Counted(AgentRollouts):
        def begin_due(self, driver: str) -> m.TrajectoryBegun | None:
            looks.append(driver)
            return super().begin_due(driver)

    run = Run(Counted(7, LIMITS, lambda event, payload=None: None, lambda: 0))
    async with run.worker(SECRETS.driver_key("one")) as far:
        assert isinstance(await heard(far), m.FrontWelcome)
        for number in range(400):
            far.send(m.BeginTrajectory(number, m.AgentCaller(), b"null", ""))
        far.send(m.BindSession(400, m.AgentCaller(named="9-0-0"), "trace"))
        assert isinstance(await heard(far), m.Declined), "by now all are heard"
        run.start(0, "0/0/0", "0/0/1")
        given = [await heard(far), await heard(far)]
        assert [one.request for one in given if isinstance(one, m.TrajectoryBegun)] == [0, 1]
    assert len(looks) < 40


async def test_an_env_worker_that_comes_anew_gives_up_what_it_does_not_hold() -> None:
    run = Run()
    run.start(0, "0/0/0", "0/0/1")
    run.rollouts.begin_due("one")
    run.rollouts.begin_due("one")
    async with run.worker(SECRETS.driver_key("one"), "0/0/1") as far:
        assert isinstance(await heard(far), m.FrontWelcome)
        far.send(m.BeginTrajectory(1, m.AgentCaller(), b"null", ""))
        begun = await heard(far)
        assert isinstance(begun, m.TrajectoryBegun)
        assert (begun.trajectory, begun.restart) == ("0/0/0", 1)


@pytest.mark.parametrize("key", ["", "driver.one.forged", SECRETS.agent_key("0/0/0", 0), SECRETS.viewer_key()])
async def test_who_has_no_drivers_key_is_no_env_worker(key: str) -> None:
    async with Run().worker(key) as far:
        assert isinstance(await heard(far), RefusedFrame)


@pytest.mark.parametrize("said", [m.AskMetrics(1), m.LookUp(1, m.AgentCaller(trajectory="0/0/0"), CALL)])
async def test_an_env_worker_may_say_nothing_that_is_a_fronts(said: m.FromFront) -> None:
    async with Run().worker(SECRETS.driver_key("one")) as far:
        assert isinstance(await heard(far), m.FrontWelcome)
        far.send(said)
        with contextlib.suppress(ConnectionLost):
            assert isinstance(await heard(far), RefusedFrame)
        async with asyncio.timeout(30):
            await far.lost


async def test_an_env_worker_binds_a_session_to_what_it_plays_until_that_begins_again() -> None:
    run = Run()
    async with run.worker(SECRETS.driver_key("one")) as far:
        assert isinstance(await heard(far), m.FrontWelcome)
        far.send(m.BeginTrajectory(1, m.AgentCaller(), b"null", ""))
        run.start(5, "1/0/0")
        assert isinstance(await heard(far), m.TrajectoryBegun)
        far.send(m.BindSession(2, m.AgentCaller(named="1-0-0"), "trace"))
        shown = await heard(far)
        assert isinstance(shown, m.TrajectoryShown)
        assert shown.request == 2
        by_session = m.AgentCaller(driver="one", named="trace")
        assert run.rollouts.show(by_session).trajectory == "1/0/0"
        with pytest.raises(CallRefused):
            run.rollouts.show(m.AgentCaller(driver="two", named="trace"))
        run.rollouts.hold("one", (), "it was killed")
        with pytest.raises(CallRefused):
            run.rollouts.show(by_session)
