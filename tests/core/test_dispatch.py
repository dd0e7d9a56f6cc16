"""Dispatch costs what it decides, and who looks at everything with every event decides the same."""

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.policy import FleetView, TurnView
from elastic.core.turn_manager import NEXT_NS, SENT_AT_ONCE, STRUCK_LOOK_NS
from elastic.core.types import NS_PER_S, FinishReason
from elastic.testing.faults.core.incarnation import fresh_core
from elastic.testing.faults.core.world import simulate
from policies.routing import TurnWiseRouting
from tests.seeds import seeds

GROUP = 40


class CountedRouting:
    def __init__(self) -> None:
        self.asked = 0

    def route(self, turn: TurnView, fleet: FleetView) -> str | None:
        self.asked += 1
        return TurnWiseRouting().route(turn, fleet)


@pytest.mark.parametrize("seed", [*seeds(2, 12), pytest.param(99, marks=pytest.mark.nightly)])
def test_who_looks_at_everything_with_every_event_decides_the_same(seed: int) -> None:
    """Worlds are lived through twice, the second time without any shortcut."""
    outcome = simulate(seed)
    core, thorough = fresh_core(outcome.settings), fresh_core(outcome.settings)
    for now_ns, event in max((journal.events for journal in outcome.journals), key=len):
        thorough.turns.queue.changed = thorough.fleet.help_changed = True
        assert core.handle(event, now_ns) == thorough.handle(event, now_ns)
        assert core.next_wakeup_ns() == thorough.next_wakeup_ns()
    assert digest(core) == digest(thorough)


def test_an_event_that_frees_nothing_asks_for_no_route(make_core) -> None:
    routing = CountedRouting()
    core = make_core(group_size=GROUP, routing=routing)
    core.trainer(capacity=0)
    worker = core.worker("spot", capacity=2)
    starts: list[c.StartTurn] = []
    for member in range(4):
        core.request(f"0/0/{member}")
        starts += core.sent(c.StartTurn)
    assert len(starts) == 2
    asked = routing.asked
    for member in range(4, GROUP):
        core.request(f"0/0/{member}")
        core.tokens(starts[0], 1, start=member - 4)
    core.beat(worker, capacity=2, executing=2)
    assert routing.asked == asked
    core.tokens(starts[1], 1, finish=FinishReason.STOP)
    assert core.one(c.StartTurn).turn == "0/0/2#0"
    assert routing.asked == asked + 2


def test_turns_of_workers_with_strikes_are_not_looked_at_with_every_event(make_core) -> None:
    """The one that is left there goes on where others have a place, as soon as one has."""
    routing = CountedRouting()
    core = make_core(group_size=4, routing=routing)
    core.trainer(capacity=0)
    byzantine = core.worker("spot", capacity=2)
    starts: list[c.StartTurn] = []
    for member in range(2):
        core.request(f"0/0/{member}")
        starts += core.sent(c.StartTurn)
    assert [start.worker for start in starts] == [byzantine, byzantine]
    honest = core.worker("serving", capacity=1)
    core.tokens(starts[0], 1, start=5)
    moved = core.one(c.StartTurn)
    assert moved.worker == honest
    core.tokens(moved, 1)
    asked = routing.asked
    for start in range(1, 20):
        core.tokens(moved, 1, start=start)
    assert routing.asked == asked
    core.now_s += STRUCK_LOOK_NS / NS_PER_S
    core.tokens(moved, 1, start=20)
    assert routing.asked == asked + 1
    core.now_s += STRUCK_LOOK_NS / NS_PER_S
    core.tokens(moved, 1, start=21, finish=FinishReason.STOP)
    assert (core.one(c.StartTurn).turn, core.one(c.StartTurn).worker) == (starts[1].turn, honest)


def test_turns_of_a_lost_worker_are_sent_a_few_at_a_time(make_core) -> None:
    core = make_core(group_size=5)
    core.trainer(capacity=0)
    lost = core.worker("spot", capacity=5)
    for member in range(5):
        core.request(f"0/0/{member}")
        core.tokens(core.one(c.StartTurn), 1)
    for _ in range(3):
        core.worker("serving")
    core.tell(e.WorkerDisconnected(worker=lost, epoch=1))
    sent = [core.sent(c.StartTurn)]
    while core.scheduler.timers.waiting("dispatch", "queue"):
        core.now_s += NEXT_NS / NS_PER_S
        core.tell(e.Tick())
        sent.append(core.sent(c.StartTurn))
    assert [len(starts) for starts in sent] == [0, SENT_AT_ONCE, SENT_AT_ONCE, 1]
    assert [start.turn for starts in sent for start in starts] == [f"0/0/{member}#0" for member in range(5)]


def test_whatever_comes_next_sends_turns_of_a_lost_worker_however_late_the_clock_rings(make_core) -> None:
    """A shell that is late says all events of then with one time: tokens of others must not wait for its clock."""
    core = make_core(group_size=6)
    core.trainer(capacity=0)
    busy = core.worker("serving", capacity=1)
    core.request("0/0/0")
    playing = core.one(c.StartTurn)
    assert playing.worker == busy
    core.tokens(playing, 1)
    lost = core.worker("spot", capacity=5)
    for member in range(1, 6):
        core.request(f"0/0/{member}")
        core.tokens(core.one(c.StartTurn), 1)
    for _ in range(3):
        core.worker("reserve")
    core.tell(e.WorkerDisconnected(worker=lost, epoch=1))
    sent = [len(core.sent(c.StartTurn))]
    for start in range(1, 5):
        core.tokens(playing, 1, start=start)
        sent.append(len(core.sent(c.StartTurn)))
    assert sent == [0, SENT_AT_ONCE, SENT_AT_ONCE, 1, 0]
    assert not core.scheduler.timers.waiting("dispatch", "queue")
