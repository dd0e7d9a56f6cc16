"""The checker itself: a state that is spoilt in one way is found out, by the right invariant."""

from collections.abc import Callable

import pytest

from elastic.core import commands as c
from elastic.core.invariants import NUMBERS, InvariantViolated, check
from elastic.core.scheduler import Scheduler
from elastic.core.types import Account, GroupState, LeaseState, TurnState, WorkerRole, WorkerState

WORKER, TURN = "spot-1/w", "0/0/0#0"


def spoil_turn(s: Scheduler, **fields: object) -> None:
    for name, value in fields.items():
        setattr(s.turns.live[TURN], name, value)


def spoil_worker(s: Scheduler, **fields: object) -> None:
    for name, value in fields.items():
        setattr(s.fleet.workers[WORKER], name, value)


def give_credit_unnoticed(s: Scheduler) -> None:
    worker = s.fleet.workers[WORKER]
    worker.capacity = 0
    s.fleet.reindex(worker)
    s.turns.move(s.turns.live[TURN], TurnState.QUEUED, s.now_ns, "test")
    s.fleet.unassign(worker, TURN)
    s.timers.clear("token", TURN)
    worker.capacity = 4
    s.fleet.reindex(worker)


SPOILT: list[tuple[int, Callable[[Scheduler], object]]] = [
    (1, lambda s: spoil_turn(s, accepted=-1)),
    (1, lambda s: spoil_turn(s, accepted=100)),
    (1, lambda s: s.fleet.workers["trainer"].turns.update({TURN: True})),
    (3, lambda s: setattr(s.step.groups["0/0"], "drop_reason", "none")),
    (3, lambda s: setattr(s.step.groups["0/0"], "state", GroupState.READY)),
    (4, lambda s: spoil_turn(s, oldest_version=1)),
    (4, lambda s: spoil_worker(s, version=9)),
    (5, lambda s: s.fleet.workers[WORKER].turns.clear()),
    (5, lambda s: spoil_worker(s, state=WorkerState.DETACHED)),
    (5, lambda s: setattr(s.leases.leases["spot-1"], "state", LeaseState.REQUESTED)),
    (5, lambda s: setattr(s.leases.leases["spot-1"], "leaving", True)),
    (6, lambda s: s.ledger.books[WORKER].accounts_ns.update({Account.IDLE: 10**15})),
    (6, lambda s: s.ledger.close(WORKER, s.now_ns, clean=True)),
    (6, lambda s: s.ledger.books.pop(WORKER)),
    (5, lambda s: s.fleet.add("stray", "spot-1", "spot", WorkerRole.ELASTIC)),
    (7, lambda s: setattr(s.leases.leases["spot-1"], "workers", (WORKER, "missing"))),
    (12, lambda s: s.leases.request("spot")),
    (9, give_credit_unnoticed),
    (9, lambda s: spoil_worker(s, capacity=9)),
    (9, lambda s: spoil_worker(s, pending=7)),
    (12, lambda s: s.timers.clear("token", TURN)),
    (12, lambda s: s.timers.clear("heartbeat", WORKER)),
    (12, lambda s: s.timers.set("release", "spot-1", s.now_ns, 1)),
    (12, lambda s: s.timers.set("boot", "nobody", s.now_ns, 1)),
    (12, lambda s: s.timers.set("back-off", "spot", 0, 0)),
    (12, lambda s: s.timers.set("training", "trainer", s.now_ns, 1)),
    (12, lambda s: s.turns.conversations.clear()),
]


@pytest.mark.parametrize(("number", "spoil"), SPOILT)
def test_spoilt_state_is_found_out(desk, number: int, spoil: Callable[[Scheduler], object]) -> None:
    desk.trainer()
    desk.worker()
    desk.end_seeding()
    desk.request("0/0/0")
    assert desk.one(c.StartTurn).worker == WORKER
    check(desk.scheduler)
    spoil(desk.scheduler)
    with pytest.raises(InvariantViolated) as caught:
        check(desk.scheduler)
    assert caught.value.number == number, str(caught.value)
    assert NUMBERS[number] in str(caught.value)


def test_nan_reward_is_found_out(desk) -> None:
    desk.trainer()
    desk.scheduler.step.groups["0/0"].members["0/0/0"] = float("nan")
    with pytest.raises(InvariantViolated, match="invariant 11"):
        check(desk.scheduler)


def test_violation_tells_the_things_story(desk) -> None:
    desk.trainer()
    desk.worker()
    desk.scheduler.timers.clear("heartbeat", WORKER)
    with pytest.raises(InvariantViolated, match="booting → ready"):
        check(desk.scheduler)
