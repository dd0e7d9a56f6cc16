"""What viewers ask of a run: answered beside its rollouts, and told to nobody else."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.spare import ENDING, NO_SPARE, SpareCredit
from elastic.core.types import NS_PER_S, Chunk, FinishReason
from elastic.protocol import front_messages as m
from elastic.protocol import wire
from elastic.protocol.connection import Connection, over_socket
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.sampled import ids_of, pack_ids
from elastic.runtime.agents import AgentRollouts, ChatLimits, Chats, ChattingWorkers, Doorkeeper
from elastic.runtime.agents.streams import FrontStreams
from elastic.runtime.episodes import OpenTurn
from tests.core.conftest import CoreHarness
from tests.runtime.agents.test_streams import LIMITS, heard

VIEWER = m.AgentCaller(viewer="main")


class Told:
    """The workers' port: what they are told, in order."""

    def __init__(self) -> None:
        self.orders: list[Any] = []
        self.prompts: dict[str, list[int]] = {}
        self.aborted = asyncio.Event()

    def start_turn(self, order: c.StartTurn, prompt: OpenTurn) -> None:
        self.orders.append(order)
        self.prompts[order.turn] = ids_of(bytes(prompt.prompt + prompt.token_ids))

    def order(self, order: Any) -> None:
        self.orders.append(order)
        self.aborted.set()

    def fence(self, worker: str, reason: str) -> None:
        self.orders.append(("fence", worker))

    def blame(self, worker: str, reason: str) -> None:
        pass


class Chatted:
    """A run with one worker of `places`, its chats, and a front whose end of the connection is `far`."""

    def __init__(self, places: int, chats_max: int) -> None:
        self.core = CoreHarness()
        self.core.trainer()
        self.worker = self.core.worker(capacity=places)
        self.core.end_seeding()
        self.core.beat(self.worker, places)
        self.told = Told()
        credit = SpareCredit(self.core.scheduler, 20 * NS_PER_S)
        self.chats = Chats(LIMITS, ChatLimits(chats_max, 6), credit, self.told, self.now_ns)
        rollouts = AgentRollouts(7, LIMITS, lambda event, payload=None: None, self.now_ns)
        self.streams = FrontStreams(rollouts, lambda then: then(), lambda: False, None, self.chats)
        self.far: Connection[m.FromFront, m.FromRun]
        self.requests = 1

    def now_ns(self) -> int:
        return round(self.core.now_s * NS_PER_S)

    async def opened(self, ids: list[int], **sampling: Any) -> m.TurnsTaken | m.Declined:
        self.requests += 1
        call = m.AgentCall("/v1/chat/completions", b"1")
        self.far.send(m.LookUp(self.requests, VIEWER, call, [b"digest"]))
        found = await heard(self.far)
        assert found == m.BranchFound(self.requests, "chat")
        wanted = m.WantedSampling(**sampling)
        self.far.send(m.OpenTurns(self.requests, VIEWER, call, None, 0, pack_ids(ids), sampling=wanted))
        answer = await heard(self.far)
        assert isinstance(answer, m.TurnsTaken | m.Declined)
        return answer

    def said(self, *said: tuple[Chunk, list[int]]) -> wire.Tokens | None:
        frame = wire.Tokens.of((chunk, ids, [-0.5] * len(ids)) for chunk, ids in said)
        return self.chats.own(self.worker, 1, frame)


@asynccontextmanager
async def chatted(places: int = 2, chats_max: int = 3) -> AsyncIterator[Chatted]:
    run = Chatted(places, chats_max)
    ours, theirs = socket.socketpair()
    near, run.far = await over_socket(ours, m.RUN_SIDE, "a front"), await over_socket(theirs, m.FRONT_SIDE, "the run")
    run.far.send(m.FrontHello(m.FRONT_VERSION, 1))
    await Doorkeeper("run", RunSecrets(b"x" * 32), lambda: False, run.streams).welcome(near)
    assert isinstance(await heard(run.far), m.FrontWelcome)
    try:
        yield run
    finally:
        await run.far.aclose()
        await near.aclose()


async def test_a_chat_is_answered_beside_rollouts_and_counted_apart() -> None:
    async with chatted() as run:
        taken = await run.opened([1, 2, 3], max_tokens=50, temperature=0.7)
        assert isinstance(taken, m.TurnsTaken)
        (turn,) = taken.turns
        assert (turn.prompt_tokens, turn.max_tokens) == (3, 6), "tokens are bounded"
        (start,) = run.told.orders
        assert run.told.prompts[start.turn] == [1, 2, 3]
        assert run.core.scheduler.turns.live == {}
        rollout = Chunk(0, 0, 2, 0)
        rest = run.said((rollout, [7, 8]), (Chunk(start.slot, 0, 2, 0), [11, 12]), (Chunk(1, 4, 1, 0), [9]))
        assert rest is not None
        assert [(chunk.slot, ids, logprobs) for chunk, ids, logprobs in rest.said()] == [
            (0, [7, 8], [-0.5, -0.5]),
            (1, [9], [-0.5]),
        ]
        came = await heard(run.far)
        assert isinstance(came, m.StreamTokens)
        assert (came.streams, ids_of(came.ids)) == ([turn.stream], [11, 12])
        run.core.now_s += 2
        assert run.said((Chunk(start.slot, 2, 1, 0, FinishReason.STOP), [13])) is None
        came = await heard(run.far)
        assert isinstance(came, m.StreamTokens)
        assert ids_of(came.ids) == [13]
        assert await heard(run.far) == m.TurnOver(turn.stream, "stop")
        run.far.send(m.SettleTurn(turn.stream, 3))
        assert await heard(run.far) == m.TurnSettled(turn.stream)
        run.far.send(m.AnswerDelivered(turn.stream))
        totals = run.chats.totals
        assert (totals.turns, totals.tokens, totals.prompt_tokens) == (1, 3, 3)
        assert totals.gpu_s == pytest.approx(2, rel=0.01)
        assert run.chats.under_way == 0


async def test_a_rollout_is_sent_behind_the_chat_that_makes_room() -> None:
    async with chatted(places=1) as run:
        await run.opened([1])
        (start,) = run.told.orders
        run.core.request("0/0/0")
        order = run.core.one(c.StartTurn)
        ChattingWorkers(run.told, run.chats).start_turn(order, OpenTurn(order.turn, 1))
        kinds = [(type(told), told.turn) for told in run.told.orders[1:]]
        assert kinds == [(c.AbortTurn, start.turn), (c.StartTurn, "0/0/0#0")]
        assert run.said((Chunk(start.slot, 0, 1, 0, FinishReason.ABORTED), [5])) is None
        frame = wire.Tokens.of([(Chunk(0, 0, 1, 0), [6], [-0.5])])
        assert run.chats.own(run.worker, 1, frame) is frame, "nothing is left of it that anybody could say"


async def test_heartbeats_tell_of_rollouts_alone() -> None:
    async with chatted(places=4) as run:
        await run.opened([1])
        await run.opened([2])
        first, _ = run.told.orders
        run.said((Chunk(first.slot, 0, 1, 0), [5]))
        assert run.chats.beside(run.worker, 3, 4) == (2, 3)
        assert run.chats.beside("another", 3, 4) == (3, 4)


async def test_chats_are_bounded_and_waited_for_so_long() -> None:
    async with chatted(places=1, chats_max=2) as run:
        run.core.request("0/0/0")
        first, second = await run.opened([1]), await run.opened([2])
        third = await run.opened([3])
        assert isinstance(first, m.TurnsTaken)
        assert isinstance(second, m.TurnsTaken)
        assert isinstance(third, m.Declined)
        assert (third.status, third.code, third.retry_after_s) == (429, "too_many_turns", 1.0)
        run.core.now_s += 20
        run.chats.look()
        over = await heard(run.far)
        assert isinstance(over, m.TurnOver)
        assert (over.stream, over.status, over.code, over.cause) == (
            first.turns[0].stream,
            503,
            "no_capacity",
            NO_SPARE,
        )
        assert over.retry_after_s == 1.0
        assert run.told.orders == []


@pytest.mark.parametrize("leaves", ["says so", "is killed"])
async def test_a_chat_ends_with_its_client(leaves: str) -> None:
    async with chatted() as run:
        taken = await run.opened([1])
        assert isinstance(taken, m.TurnsTaken)
        if leaves == "says so":
            run.far.send(m.ClientGone(taken.turns[0].stream))
        else:
            run.far.abort()
        async with asyncio.timeout(30):
            await run.told.aborted.wait()
        assert run.chats.under_way == 0
        assert [type(order) for order in run.told.orders] == [c.StartTurn, c.AbortTurn]
        assert run.chats.totals.turns == 1


async def test_a_chat_asked_of_a_run_that_stops_is_refused_at_once() -> None:
    async with chatted() as run:
        run.core.tell(e.StopRequested(reason="enough"))
        taken = await run.opened([1])
        assert isinstance(taken, m.TurnsTaken)
        over = await heard(run.far)
        assert isinstance(over, m.TurnOver)
        assert (over.stream, over.status, over.cause) == (taken.turns[0].stream, 503, ENDING)
        assert (run.told.orders, run.chats.under_way) == ([], 0)


async def test_an_answer_ends_where_its_client_says() -> None:
    async with chatted() as run:
        taken = await run.opened([1])
        assert isinstance(taken, m.TurnsTaken)
        (start,) = run.told.orders
        run.said((Chunk(start.slot, 0, 3, 0), [5, 6, 7]))
        await heard(run.far)
        run.far.send(m.CutTurn(taken.turns[0].stream, 2))
        assert await heard(run.far) == m.TurnOver(taken.turns[0].stream, "stop")
        assert [type(order) for order in run.told.orders] == [c.StartTurn, c.AbortTurn]


async def test_a_viewer_has_chats_alone_and_nobody_else_has_them() -> None:
    async with chatted() as run:
        run.far.send(m.OpenTurns(9, m.AgentCaller(), m.AgentCall("x", b"1"), None, 0, pack_ids([1])))
        declined = await heard(run.far)
        assert isinstance(declined, m.Declined)
        assert declined.code == "trajectory_not_found"
        run.far.send(m.BeginTrajectory(10, VIEWER, b"{}", "g"))
        declined = await heard(run.far)
        assert isinstance(declined, m.Declined)
        assert declined.status == 403
