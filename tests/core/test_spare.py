"""Spare credit: whole histories of rollouts, with chats beside them and without, and what becomes of a chat."""

from random import Random

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.scheduler import Scheduler
from elastic.core.spare import ERRORS_MAX, FIRST_SLOT, NO_SPARE, SILENT, STUCK, SpareCredit
from elastic.core.types import NS_PER_S, Chunk, FinishReason, WorkerState
from elastic.testing.faults.core.incarnation import fresh_core
from elastic.testing.faults.core.world import simulate
from tests.core.conftest import CoreHarness

WAIT_NS = 20 * NS_PER_S
TOKENS = 12


class Beside:
    """Spare credit beside a scheduler, with workers that answer as they like. It is told what leaves for workers, as
    the shell tells it, and every promise is checked after every step."""

    def __init__(self, scheduler: Scheduler, rng: Random) -> None:
        self.scheduler = scheduler
        self.credit = SpareCredit(scheduler, WAIT_NS)
        self.rng = rng
        self.now_ns = 0
        self.asked = self.placed = self.taken_back = self.ended = 0
        self.sent: dict[str, c.StartTurn] = {}
        self.accepted: dict[str, int] = {}

    def follow(self, commands: list[c.Command]) -> None:
        """What the scheduler orders leaves for the workers, each order behind what it needs of chats."""
        for command in commands:
            match command:
                case c.StartTurn():
                    self.carry_out(self.credit.yield_places(command.worker, self.now_ns))
                    self.check_room(command.worker)
                case c.LoadWeights() | c.SleepWorker() | c.DrainWorker():
                    self.carry_out(self.credit.leave(command.worker, self.now_ns))
                    assert not self.credit.holds(command.worker)
                case _:
                    pass

    def live(self) -> None:
        """What viewers and workers do meanwhile."""
        if self.rng.random() < 1 / 3 and len(self.credit.turns) < 4:
            self.asked += 1
            self.accepted[f"chat/{self.asked}"] = 0
            self.carry_out(self.credit.ask(f"chat/{self.asked}", TOKENS, self.now_ns))
        for turn in self.rng.sample(list(self.sent), min(2, len(self.sent))):
            self.say(turn)
        if self.credit.turns and self.rng.random() < 1 / 20:
            self.carry_out(self.credit.end(next(iter(self.credit.turns)), self.now_ns))
        self.look()

    def say(self, turn: str) -> None:
        order = self.sent[turn]
        finish = self.rng.choice([None, None, None, FinishReason.STOP, FinishReason.ABORTED, FinishReason.ERROR])
        count = min(self.rng.randint(0 if finish else 1, 4), TOKENS - self.accepted[turn])
        chunk = Chunk(order.slot, self.accepted[turn], count, 0, finish, "")
        found, over = self.credit.take(order.worker, order.epoch, chunk, self.now_ns)
        if found is not None:
            self.accepted[turn] += count
            assert found.accepted == self.accepted[turn] <= TOKENS
            self.ended += over
        if found is None or over or finish is not None:
            del self.sent[turn]

    def look(self) -> None:
        self.carry_out(self.credit.look(self.now_ns))
        for name in self.scheduler.fleet.workers:
            self.check_room(name)
        self.credit.given_up.clear()

    def carry_out(self, commands: list[c.Command]) -> None:
        for command in commands:
            if isinstance(command, c.StartTurn):
                worker = self.scheduler.fleet.workers[command.worker]
                assert not self.scheduler.turns.queue, "a rollout's turn waits"
                assert worker.state is WorkerState.READY
                assert worker.loading_version is None
                assert len(worker.turns) + self.credit.holds(worker.id) <= worker.places
                assert command.slot >= FIRST_SLOT
                assert command.start == self.accepted[command.turn]
                self.sent[command.turn] = command
                self.placed += 1
            else:
                assert isinstance(command, c.AbortTurn)
                self.sent.pop(command.turn, None)
                self.taken_back += 1

    def check_room(self, name: str) -> None:
        worker = self.scheduler.fleet.workers[name]
        held = self.credit.holds(name)
        assert not held or len(worker.turns) + held <= worker.places, f"{name} has more turns than places"


@pytest.mark.parametrize("seed", [20, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (3, 11))])
def test_rollouts_are_placed_as_if_there_were_no_chats(seed: int) -> None:
    """Whole runs of the modelled world, with all of its faults, are gone through again with chats beside them."""
    outcome = simulate(seed)
    alone, beside = fresh_core(outcome.settings), fresh_core(outcome.settings)
    chats = Beside(beside, Random(seed))
    for place, (now_ns, event) in enumerate(outcome.journals[0].events):
        expected = alone.handle(event, now_ns)
        chats.now_ns = now_ns
        commands = beside.handle(event, now_ns)
        assert commands == expected
        chats.follow(commands)
        chats.live()
        assert place % 50 or digest(beside) == digest(alone)
    assert digest(beside) == digest(alone)
    assert chats.placed
    assert chats.ended


class Chatting:
    """A core with one worker of two places for rollouts, and chats beside it."""

    def __init__(self) -> None:
        self.core = CoreHarness()
        self.core.trainer()
        self.worker = self.core.worker(capacity=2)
        self.core.end_seeding()
        self.core.beat(self.worker, 2)
        self.credit = SpareCredit(self.core.scheduler, WAIT_NS)

    @property
    def now_ns(self) -> int:
        return round(self.core.now_s * NS_PER_S)

    def ask(self, turn: str = "chat/1") -> list[c.Command]:
        return self.credit.ask(turn, TOKENS, self.now_ns)

    def start(self, turn: str = "chat/1") -> c.StartTurn:
        (start,) = self.ask(turn)
        assert isinstance(start, c.StartTurn)
        return start

    def say(self, order: c.StartTurn, start: int, count: int, finish: FinishReason | None = None) -> object:
        chunk = Chunk(order.slot, start, count, 0, finish, "it broke")
        return self.credit.take(order.worker, order.epoch, chunk, self.now_ns)

    def look(self) -> list[c.Command]:
        return self.credit.look(self.now_ns)

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.core.wait(1)
            self.core.beat(self.worker, 2)


@pytest.fixture
def chatting() -> Chatting:
    return Chatting()


def test_a_chat_leaves_for_a_rollout_and_goes_on_where_it_was(chatting: Chatting) -> None:
    core, credit = chatting.core, chatting.credit
    first = chatting.start()
    chatting.say(first, 0, 5)
    core.request("0/0/0")
    assert core.one(c.StartTurn).worker == chatting.worker
    assert credit.yield_places(chatting.worker, chatting.now_ns) == []
    core.request("0/0/1")
    taken = credit.yield_places(chatting.worker, chatting.now_ns)
    assert taken == [c.AbortTurn(worker=chatting.worker, epoch=1, turn="chat/1", attempt=1)]
    assert chatting.look() == []
    core.tokens(core.one(c.StartTurn), 3, finish=FinishReason.STOP)
    (again,) = chatting.look()
    assert isinstance(again, c.StartTurn)
    assert (again.attempt, again.start) == (2, 5)
    assert chatting.say(first, 5, 1) == (None, False), "what was sent before is nobody's"
    found, over = chatting.credit.take(again.worker, 1, Chunk(again.slot, 5, 7, 0, None), chatting.now_ns)
    assert found is not None
    assert (found.accepted, over, credit.turns) == (TOKENS, True, {})


def test_a_chat_that_finds_no_place_is_given_up_in_time(chatting: Chatting) -> None:
    chatting.core.request("0/0/0")
    chatting.core.request("0/0/1")
    assert chatting.ask() == []
    chatting.wait(19)
    chatting.look()
    assert not chatting.credit.given_up
    chatting.wait(1)
    chatting.look()
    assert [(turn.id, cause) for turn, cause in chatting.credit.given_up] == [("chat/1", NO_SPARE)]


def test_a_chat_of_a_silent_worker_is_given_up_and_called_back(chatting: Chatting) -> None:
    chatting.start()
    chatting.wait(31)
    assert [type(command) for command in chatting.look()] == [c.AbortTurn]
    assert [cause for _, cause in chatting.credit.given_up] == [SILENT]
    assert not chatting.credit.turns


def test_a_chat_that_goes_to_and_fro_without_a_token_is_given_up(chatting: Chatting) -> None:
    chatting.credit.wait_ns = chatting.credit.token_ns = 6 * NS_PER_S
    order: c.Command | None = chatting.start()
    rests: list[int] = []
    while not chatting.credit.given_up:
        if isinstance(order, c.StartTurn):
            chatting.say(order, 0, 0, FinishReason.STALLED)
            rests.append(0)
        chatting.wait(1)
        rests[-1] += 1
        order = next(iter(chatting.look()), None)
        assert sum(rests) <= 12, "as long as a place and a token are waited for"
    assert rests[:5] == [1, 1, 1, 2, 3]
    assert [cause for _, cause in chatting.credit.given_up] == [STUCK]
    assert not chatting.credit.turns


def test_a_chat_that_gets_on_is_not_given_up(chatting: Chatting) -> None:
    chatting.credit.wait_ns = chatting.credit.token_ns = 6 * NS_PER_S
    order = chatting.start()
    for accepted in range(5):
        chatting.wait(2)
        assert chatting.say(order, accepted, 1, FinishReason.ABORTED) != (None, False)
        chatting.wait(3)
        (again,) = chatting.look()
        assert isinstance(again, c.StartTurn)
        order = again


def test_engines_may_fail_a_chat_so_often(chatting: Chatting) -> None:
    order: c.Command = chatting.start()
    for _ in range(ERRORS_MAX - 1):
        assert isinstance(order, c.StartTurn)
        chatting.say(order, 0, 0, FinishReason.ERROR)
        assert chatting.look() == [], "it rests"
        chatting.wait(1)
        (order,) = chatting.look()
    assert isinstance(order, c.StartTurn)
    chatting.say(order, 0, 0, FinishReason.ERROR)
    assert [cause for _, cause in chatting.credit.given_up] == ["engine error: it broke"]


def test_a_session_that_is_over_has_no_chat(chatting: Chatting) -> None:
    first = chatting.start()
    chatting.core.join(chatting.worker, epoch=2)
    chatting.core.beat(chatting.worker, capacity=2)
    (again,) = chatting.look()
    assert isinstance(again, c.StartTurn), "nothing is called back from a session that is over"
    assert (again.epoch, again.slot > first.slot) == (2, True)


def test_the_time_of_devices_is_shared_with_rollouts(chatting: Chatting) -> None:
    order = chatting.start()
    chatting.core.request("0/0/0")
    chatting.wait(2)
    chatting.say(order, 0, 1)
    assert chatting.credit.turns["chat/1"].device_ns == pytest.approx(1e9, rel=0.01)


def test_a_run_that_is_over_has_no_chat(chatting: Chatting) -> None:
    chatting.start()
    chatting.core.tell(e.StopRequested(reason="enough"))
    chatting.look()
    assert [turn.id for turn, _ in chatting.credit.given_up] == ["chat/1"]
    assert not chatting.credit.holds(chatting.worker)
