"""Workers whose turns bring nothing while others' do: they hold a run up once, and then lose their lease."""

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.fleet import STRUCK_OUT
from elastic.core.types import NS_PER_S, EndCause, FinishReason
from elastic.testing.faults.core.settings import SMALL_LIMITS

TOKEN_S = SMALL_LIMITS.turn_stall_timeout_ns / NS_PER_S
STEP_S = 0.25
LONGEST_S = 120.0


class Pair:
    """An honest worker and one that lies, in turns of one group of many. `lie` is told each of the Byzantine worker's
    turns."""

    def __init__(self, core, honest: bool = True) -> None:
        self.core, self.has_honest = core, honest
        core.trainer()
        self.honest = core.worker("spot", capacity=1) if honest else ""
        self.byzantine = core.worker("serving", capacity=3)
        core.end_seeding()
        self.sent: list[c.StartTurn] = []
        self.events = self.done = 0
        self.busy: list[c.StartTurn] = []
        self.out: list[c.Command] = []

    def tell(self, out: list[c.Command]) -> None:
        self.events += 1
        self.out += out
        for command in out:
            if isinstance(command, c.StartTurn):
                if command.worker == self.byzantine:
                    self.sent.append(command)
                else:
                    self.busy.append(command)
            elif isinstance(command, c.FinishTurn):
                self.done += 1

    def play(self, turns: int, lie) -> float:
        """Ask for so many turns, two at a time; returns how long the run took."""
        core, asked = self.core, 0
        began_s = core.now_s
        while self.done < turns and core.now_s < began_s + LONGEST_S:
            while asked < turns and asked - self.done < 3:
                self.tell(core.request(f"0/0/{asked}", max_new_tokens=20))
                asked += 1
            core.now_s += STEP_S
            busy, self.busy = self.busy, []
            for start in busy:
                self.tell(core.tokens(start, 2, finish=FinishReason.STOP))
            self.tell(core.tell(e.Tick()))
            for worker in list(core.scheduler.fleet.workers.values()):
                if worker.id != self.byzantine and worker.connected:
                    self.tell(core.beat(worker.id, capacity=1))
            record = core.scheduler.fleet.workers.get(self.byzantine)
            if record is not None:
                lie(self, record)
        return core.now_s - began_s


def holds(pair: Pair, record) -> None:
    """All turns wait in its engine, says the Byzantine worker, and the engine gets on."""
    pair.tell(pair.core.beat(pair.byzantine, capacity=3, pending=len(record.turns), executing=1))


def says_nothing(pair: Pair, record) -> None:
    """Chunks without tokens."""
    holds(pair, record)
    for turn in list(record.turns):
        start = next(s for s in reversed(pair.sent) if s.turn == turn)
        pair.tell(pair.core.tokens(start, 0, prefilled=1))


def one_token(pair: Pair, record) -> None:
    holds(pair, record)
    for turn, begun in list(record.turns.items()):
        if not begun:
            start = next(s for s in reversed(pair.sent) if s.turn == turn)
            pair.tell(pair.core.tokens(start, 1))


def trickles(pair: Pair, record) -> None:
    """A token now and then: never late, never done."""
    holds(pair, record)
    for turn in list(record.turns):
        live = pair.core.scheduler.turns.live[turn]
        start = next(s for s in reversed(pair.sent) if s.turn == turn)
        if pair.core.now_s - max(live.sent_ns / NS_PER_S, 0) > (live.accepted - live.start + 1) * 0.8 * TOKEN_S:
            pair.tell(pair.core.tokens(start, 1, start=live.accepted))


def begins_elsewhere(pair: Pair, record) -> None:
    holds(pair, record)
    for _ in range(20):
        for turn in list(record.turns):
            start = next(s for s in reversed(pair.sent) if s.turn == turn)
            pair.tell(pair.core.tokens(start, 1, start=start.start + 5))


def is_too_old(pair: Pair, record) -> None:
    holds(pair, record)
    for _ in range(20):
        for turn in list(record.turns):
            start = next(s for s in reversed(pair.sent) if s.turn == turn)
            pair.tell(pair.core.tokens(start, 1, version=-1))


def flaps(pair: Pair, record) -> None:
    for _ in range(20):
        if pair.byzantine in pair.core.scheduler.fleet.workers:
            pair.tell(pair.core.join(pair.byzantine, epoch=record.epoch + 1))
            pair.tell(pair.core.beat(pair.byzantine, capacity=3))


def ends_every(number: int):
    """Ends every so manieth turn at once, and holds the others."""

    def lie(pair: Pair, record) -> None:
        holds(pair, record)
        for turn in list(record.turns):
            start = next(s for s in reversed(pair.sent) if s.turn == turn)
            if pair.sent.index(start) % number == 0:
                pair.tell(pair.core.tokens(start, 2, finish=FinishReason.STOP))

    lie.__name__ = f"ends_every_{number}"
    return lie


TURNS = 100

LIES = [holds, says_nothing, one_token, trickles, begins_elsewhere, is_too_old, flaps]


@pytest.mark.parametrize("lie", LIES)
def test_a_byzantine_worker_holds_a_run_up_once_and_then_loses_its_lease(make_core, lie) -> None:
    pair = Pair(make_core(group_size=TURNS))
    took_s = pair.play(TURNS, lie)
    assert pair.done == TURNS
    assert took_s < TURNS * STEP_S + (8 if lie is trickles else 2) * TOKEN_S
    assert len(pair.sent) < 12
    blamed = [k.worker for k in pair.out if isinstance(k, c.BlameWorker)]
    assert set(blamed) == {pair.byzantine}
    if lie is trickles:  # Its turns bring something: it holds the run up once, and has lost its reputation.
        return
    assert len(blamed) == STRUCK_OUT
    fenced = [(k.worker, k.reason) for k in pair.out if isinstance(k, c.FenceWorker)]
    assert fenced[0] == (pair.byzantine, EndCause.STRUCK_OUT)
    assert {worker for worker, _ in fenced} == {pair.byzantine}
    assert [k.provider for k in pair.out if isinstance(k, c.BarLease)] == ["serving"]


@pytest.mark.parametrize("number", [3, 5])
def test_a_byzantine_worker_that_ends_some_turns_loses_its_lease_too(make_core, number: int) -> None:
    pair = Pair(make_core(group_size=TURNS))
    took_s = pair.play(TURNS, ends_every(number))
    assert pair.done == TURNS
    assert took_s < TURNS * STEP_S + STRUCK_OUT * TOKEN_S
    fenced = [(k.worker, k.reason) for k in pair.out if isinstance(k, c.FenceWorker)]
    assert fenced[0] == (pair.byzantine, EndCause.STRUCK_OUT)


def test_who_is_alone_is_tried_again_and_again(make_core) -> None:
    pair = Pair(make_core(group_size=8), honest=False)
    pair.play(2, begins_elsewhere)
    assert not [command for command in pair.out if isinstance(command, c.FenceWorker)]
    assert 3 < len(pair.sent) < 40


def test_a_long_turn_of_a_slow_worker_ends_where_it_began(make_core) -> None:
    pair = Pair(make_core(group_size=8), honest=False)
    pair.tell(pair.core.request("0/0/0", max_new_tokens=10))
    (start,) = pair.sent
    for place in range(10):
        pair.core.wait(0.8 * TOKEN_S, beating=(pair.byzantine, "trainer"))
        pair.tell(pair.core.tokens(start, 1, start=place))
    assert pair.done == 1
    assert pair.sent == [start]


def test_a_machine_that_goes_before_its_turn_began_is_not_blamed(make_core) -> None:
    """Only who comes back, and had begun nothing, is."""
    core = make_core(group_size=4)
    core.trainer()
    worker = core.worker("spot", capacity=2)
    core.end_seeding()
    out = core.request("0/0/0")
    assert any(isinstance(k, c.StartTurn) and k.worker == worker for k in out)
    gone = core.tell(e.WorkerDisconnected(worker=worker, epoch=1, goodbye=False))
    assert not [k for k in gone if isinstance(k, c.BlameWorker)]
    assert [k.worker for k in core.join(worker, epoch=2) if isinstance(k, c.BlameWorker)] == [worker]
