"""The run's account of calls of models elsewhere: whatever fronts and runs die, the bounds hold and nothing is lost."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core import saved_state
from elastic.core.types import SamplingParameters
from elastic.protocol import front_messages as m
from elastic.protocol.connection import Connection, over_socket
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.agents import AgentLimits, AgentRollouts, UpstreamBounds
from elastic.runtime.agents.hub import Doorkeeper
from elastic.runtime.agents.refusals import CallRefused
from elastic.runtime.agents.streams import FrontStreams
from elastic.testing.faults.core.incarnation import fresh_core
from elastic.testing.faults.core.world import simulate
from functions.base import Call
from tests.seeds import examples

BOUNDS = UpstreamBounds(
    calls_max=12,
    usd_max=0.01,
    concurrency=3,
    timeout_s=60.0,
    context_tokens=1000,
    usd_per_million_in=2.5,
    usd_per_million_out=10.0,
)
CHAT = "/v1/chat/completions"
REFUSED = -1
DRIVER, AGENT = m.AgentCaller(driver="main"), m.AgentCaller(trajectory="0/0/0")


def limits(bounds: UpstreamBounds | None, idle_s: float) -> AgentLimits:
    return AgentLimits(
        sampling=SamplingParameters(max_new_tokens=8, noise_seed=0),
        pinned=frozenset(),
        max_turns=10,
        max_context_tokens=64,
        vocab_size=1000,
        open_turns_max=10,
        deadline_s=1e6,
        idle_s=idle_s,
        upstream=bounds,
    )


@dataclass
class Ledgered:
    """Rollouts with one open trajectory, their journal, and what was billed."""

    bounds: UpstreamBounds | None = BOUNDS
    idle_s: float = 1e6
    now_ns: int = 0
    told: list[tuple[e.Event, list[c.Command]]] = field(default_factory=list)
    bills: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rollouts = self._fresh()
        start = c.StartGroup(step=0, group="0/0", index=0, trajectories=("0/0/0", "0/0/1"))
        self.told.append((e.Tick(), [start]))
        self.rollouts.start(start)
        self.rollouts.begin(m.BeginTrajectory(1, DRIVER, b"{}", "g"))

    def _fresh(self) -> AgentRollouts:
        return AgentRollouts(
            7, limits(self.bounds, self.idle_s), self._feed, lambda: self.now_ns, billed=self.bills.append
        )

    def _feed(self, event: e.Event, payload: Any = None) -> None:
        self.told.append((event, []))

    def restart(self) -> None:
        """Another process has read the journal."""
        self.rollouts = self._fresh()
        for event, commands in self.told:
            self.rollouts.recalled(event, None)
            for command in commands:
                self.rollouts.recalled(event, command)

    def leave(self, prompt: int | None = 100, answer: int | None = 100, **more: Any) -> int | None:
        ask = m.AskUpstream(1, more.pop("caller", AGENT), CHAT, more.pop("model", "judge"), prompt, answer, **more)
        return self.rollouts.leave(ask)

    def granted(self, prompt: int | None, answer: int | None, choices: int) -> int | None:
        """As `leave`, or `REFUSED` for good."""
        try:
            return self.leave(prompt, answer, choices=choices)
        except CallRefused as refused:
            return REFUSED if (refused.status, refused.retry) in ((402, False), (429, False)) else None

    @property
    def status(self) -> Any:
        status = self.rollouts.upstream_status()
        assert status is not None
        return status


@settings(max_examples=examples(15, 80), deadline=None)
@given(st.data())
def test_bounds_hold_and_nothing_is_lost_whoever_dies(data: st.DataObject) -> None:
    bench = Ledgered()
    tokens = st.one_of(st.none(), st.integers(0, 1500))
    real: dict[int, tuple[int, int]] = {}
    """What calls have truly come to, which the run may never hear."""
    open_calls: list[int] = []
    made = 0
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(("ask", "ask", "told", "unknown", "again", "unused", "front", "run", "time"))):
            case "ask":
                prompt, answer, choices = data.draw(tokens), data.draw(tokens), data.draw(st.integers(1, 3))
                call = bench.granted(prompt, answer, choices)
                if call == REFUSED:
                    continue
                if call is None:
                    assert open_calls, "it waits for nobody"
                    continue
                assert call not in real, "two calls have one number"
                most = [1000 if tokens is None else min(tokens, 1000) for tokens in (prompt, answer)]
                real[call] = data.draw(st.integers(0, most[0])), data.draw(st.integers(0, choices * most[1]))
                open_calls.append(call)
                made += 1
            case "told" if open_calls:
                call = open_calls.pop(data.draw(st.integers(0, len(open_calls) - 1)))
                bench.rollouts.called(m.UpstreamOver(call, 200, *real[call], 1.0))
            case "unknown" if open_calls:
                call = open_calls.pop()
                bench.rollouts.called(m.UpstreamOver(call, 502, None, data.draw(st.sampled_from((None, 0)))))
            case "again" if real:
                call = data.draw(st.sampled_from(sorted(set(real) - set(open_calls)) or [10**6]))
                before = bench.status
                bench.rollouts.called(m.UpstreamOver(call, 200, 1, 1))
                assert bench.status == before
            case "unused" if open_calls:
                call = open_calls.pop()
                bench.rollouts.called(m.UpstreamOver(call, 0))
                real[call] = 0, 0
                made -= 1
            case "front":
                for call in open_calls:
                    bench.rollouts.lost_call(call)
                open_calls.clear()
            case "run":
                before = bench.status
                bench.restart()
                assert bench.status == before, "another process has it otherwise"
            case "time":
                bench.now_ns += int(data.draw(st.sampled_from((10, 100))) * 1e9)
                bench.rollouts.look_after()
                open_calls = [call for call in open_calls if call in cast(Any, bench.rollouts.saved())[2].open]
            case _:
                pass
        status = bench.status
        spent = sum(BOUNDS.nano_usd(*tokens) for tokens in real.values()) / 1e9
        assert status.open == len(open_calls) <= BOUNDS.concurrency
        assert status.calls == made <= BOUNDS.calls_max
        assert spent <= status.usd + status.held_usd + 1e-12
        assert status.usd + status.held_usd <= (BOUNDS.usd_max or 0.0) + 1e-12
        assert sum(model.calls for model in status.models.values()) + status.open == made
        assert sum(bill.usd for bill in bench.bills) == pytest.approx(status.usd)


def test_beyond_its_bounds_a_call_is_refused_and_not_to_be_tried_again() -> None:
    bench = Ledgered(bounds=UpstreamBounds(**{**vars_of(BOUNDS), "calls_max": 1, "usd_max": 0.001}))
    with pytest.raises(CallRefused) as dear:
        bench.leave(None, None)
    assert (dear.value.status, dear.value.code, dear.value.retry) == (402, "upstream_usd_max", False)
    assert "a lower max_tokens would bound" in str(dear.value)
    assert bench.leave(10, 10) == 0
    with pytest.raises(CallRefused) as many:
        bench.leave(10, 10)
    assert (many.value.status, many.value.code, many.value.retry) == (429, "upstream_calls_max", False)


def vars_of(bounds: UpstreamBounds) -> dict[str, Any]:
    return {name: getattr(bounds, name) for name in UpstreamBounds.__slots__}


def test_only_who_has_a_trajectory_or_a_drivers_key_calls_models_elsewhere() -> None:
    bench = Ledgered()
    assert bench.leave(caller=DRIVER) == 0, "a driver's own judge"
    for caller in (
        m.AgentCaller(trajectory="0/0/1"),
        m.AgentCaller(driver="main", named="s"),
        m.AgentCaller(viewer="v"),
    ):
        with pytest.raises(CallRefused) as foreign:
            bench.leave(caller=caller)
        assert foreign.value.status == 404
    bench.rollouts.end(AGENT, "")
    with pytest.raises(CallRefused) as over:
        bench.leave()
    assert over.value.status == 410
    without = Ledgered(bounds=None)
    with pytest.raises(CallRefused) as none:
        without.leave()
    assert (none.value.status, none.value.code) == (404, "model_not_found")
    assert without.rollouts.upstream_status() is None


def test_a_trajectory_that_waits_for_a_model_elsewhere_is_not_idle() -> None:
    bench = Ledgered(bounds=UpstreamBounds(**{**vars_of(BOUNDS), "timeout_s": 1000.0}), idle_s=100.0)
    call = bench.leave()
    assert call is not None
    bench.now_ns = int(500e9)
    bench.rollouts.look_after()
    assert bench.rollouts.show(AGENT).state == "open"
    bench.rollouts.called(m.UpstreamOver(call, 200, 1, 1))
    bench.now_ns = int(550e9)
    bench.rollouts.look_after()
    assert bench.rollouts.show(AGENT).state == "open", "its answer has only just come"
    bench.now_ns = int(700e9)
    bench.rollouts.look_after()
    assert bench.rollouts.show(AGENT).state == "failed"


def test_models_are_told_apart_up_to_a_bound() -> None:
    bench = Ledgered(bounds=UpstreamBounds(**{**vars_of(BOUNDS), "calls_max": 100, "usd_max": None}))
    for number in range(50):
        call = bench.leave(1, 1, model=f"judge-{number}")
        assert call is not None
        bench.rollouts.called(m.UpstreamOver(call, 200, 1, 1))
    models = bench.status.models
    assert sum(model.calls for model in models.values()) == 50
    assert (len(models), models["(others)"].calls) == (33, 18)


@pytest.mark.parametrize("tokens", [(1001, 1), (1, 1001), (2**53 - 1, 2**53 - 1)])
def test_more_tokens_than_a_context_has_are_not_believed(tokens: tuple[int, int]) -> None:
    bench = Ledgered()
    call = bench.leave(100, 10)
    assert call is not None
    held_usd = bench.status.held_usd
    bench.rollouts.called(m.UpstreamOver(call, 200, *tokens))
    assert (bench.status.usd, bench.status.models["judge"].bounded) == (held_usd, 1)
    assert bench.leave(100, 10) is not None, "the run may still call"


def test_an_account_is_saved_with_the_run() -> None:
    bench = Ledgered()
    bench.leave()
    saved = saved_state.save(fresh_core(simulate(1).settings), bench.rollouts.saved())
    other = Ledgered()
    other.rollouts.restore(*saved_state.restore(fresh_core(simulate(1).settings), saved))
    assert other.status == bench.status
    assert other.status.open == 1


# Fronts


@asynccontextmanager
async def fronts(bench: Ledgered, count: int) -> AsyncIterator[list[Connection[m.FromFront, m.FromRun]]]:
    streams = FrontStreams(bench.rollouts, lambda then: then(), lambda: False)
    doorkeeper = Doorkeeper("run", RunSecrets(b"x" * 32), lambda: False, streams)
    ends: list[tuple[Any, Any]] = []
    try:
        for number in range(count):
            ours, theirs = socket.socketpair()
            near, far = await over_socket(ours, m.RUN_SIDE, "a front"), await over_socket(theirs, m.FRONT_SIDE, "run")
            ends.append((near, far))
            far.send(m.FrontHello(m.FRONT_VERSION, number))
            await doorkeeper.welcome(near)
            assert isinstance(await heard(far), m.FrontWelcome)
        yield [far for _, far in ends]
    finally:
        for end in (end for pair in ends for end in pair):
            await end.aclose()


async def heard(far: Connection[m.FromFront, m.FromRun]) -> m.FromRun:
    async with asyncio.timeout(30):
        return await far.receive()


def ask(request: int) -> m.AskUpstream:
    return m.AskUpstream(request, AGENT, CHAT, "judge", 10, 10)


async def test_leave_is_given_in_turn_and_the_calls_of_a_dead_front_make_room() -> None:
    bench = Ledgered(bounds=UpstreamBounds(**{**vars_of(BOUNDS), "concurrency": 2}))
    async with fronts(bench, 2) as (dying, living):
        for request in (1, 2):
            dying.send(ask(request))
            assert await heard(dying) == m.UpstreamAllowed(request, request - 1)
        for request in (3, 4, 5):
            living.send(ask(request))
        dying.send(m.UpstreamOver(0, 200, 5, 5))
        assert await heard(living) == m.UpstreamAllowed(3, 2)
        assert bench.status.open == 2
        await dying.aclose()
        assert await heard(living) == m.UpstreamAllowed(4, 3)
        lost = bench.status.models["judge"]
        assert (lost.calls, lost.bounded, lost.failed) == (2, 1, 1)
        living.send(m.UpstreamOver(3, 0))
        assert await heard(living) == m.UpstreamAllowed(5, 4)
    assert bench.status.calls == 4


async def test_leave_that_was_waived_is_given_to_the_next() -> None:
    bench = Ledgered(bounds=UpstreamBounds(**{**vars_of(BOUNDS), "concurrency": 1}))
    async with fronts(bench, 2) as (front, other):
        front.send(ask(1))
        assert await heard(front) == m.UpstreamAllowed(1, 0)
        for request in (2, 3, 4):
            front.send(ask(request))
        front.send(m.UpstreamWaived(2))
        front.send(m.UpstreamWaived(4))
        front.send(m.UpstreamOver(0, 200, 5, 5))
        assert await heard(front) == m.UpstreamAllowed(3, 1)
        other.send(ask(3))
        front.send(m.UpstreamWaived(3))
        front.send(m.UpstreamOver(1, 0))
        assert await heard(other) == m.UpstreamAllowed(3, 2)
    assert bench.status.calls == 2


@pytest.mark.parametrize("how", ["waived", "dead"])
async def test_a_dear_call_that_nobody_waits_for_holds_up_no_other(how: str) -> None:
    bench = Ledgered()
    async with fronts(bench, 2) as (gone, living):
        living.send(ask(1))
        assert await heard(living) == m.UpstreamAllowed(1, 0)
        gone.send(m.AskUpstream(1, AGENT, CHAT, "judge", 0, 999))
        gone.send(m.ShowTrajectory(2, AGENT))
        assert isinstance(await heard(gone), m.TrajectoryShown)
        living.send(ask(2))
        living.send(m.ShowTrajectory(3, AGENT))
        assert isinstance(await heard(living), m.TrajectoryShown), "the call waits for the one that came before"
        if how == "waived":
            gone.send(m.UpstreamWaived(1))
        else:
            await gone.aclose()
        assert await heard(living) == m.UpstreamAllowed(2, 1)


async def test_who_waits_for_leave_is_told_when_no_more_is_given() -> None:
    bench = Ledgered(bounds=UpstreamBounds(**{**vars_of(BOUNDS), "calls_max": 2, "concurrency": 1}))
    async with fronts(bench, 1) as (front,):
        front.send(ask(1))
        assert await heard(front) == m.UpstreamAllowed(1, 0)
        front.send(ask(2))
        front.send(ask(3))
        front.send(m.UpstreamOver(0, 200, 5, 5))
        assert await heard(front) == m.UpstreamAllowed(2, 1)
        refused = await heard(front)
    assert isinstance(refused, m.Declined)
    assert (refused.request, refused.status, refused.code, refused.retry) == (3, 429, "upstream_calls_max", False)
