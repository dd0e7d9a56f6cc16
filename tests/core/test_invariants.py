"""The checker itself: a state that is spoilt in one way is found out, by the right invariant."""

from collections.abc import Callable

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.invariants import NUMBERS, InvariantViolated, check
from elastic.core.scheduler import Scheduler
from elastic.core.types import (
    Account,
    EndCause,
    GroupState,
    LeaseState,
    ScoringState,
    TurnState,
    WorkerRole,
    WorkerState,
)

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
    (12, lambda s: s.turns.conversations["0/0/0"].turns.clear()),
    (12, lambda s: s.step.groups["0/0"].members.update({"0/0/0": 1.0})),
    (1, lambda s: spoil_turn(s, state=TurnState.QUEUED)),
    (5, lambda s: spoil_turn(s, worker="nobody")),
    (12, lambda s: spoil_turn(s, state=TurnState.MOVING)),
    (4, lambda s: setattr(s.step.groups["0/0"], "oldest_token", -1)),
    (3, lambda s: setattr(s.step.groups["0/0"], "slot", 0)),
    (7, lambda s: s.leases._held.update({"spot": 1})),
    (6, lambda s: setattr(s.ledger.books[WORKER], "cursor_ns", 10**15)),
    (6, lambda s: s.ledger.books[WORKER].accounts_ns.update({Account.IDLE: -1, Account.DECODE: 1})),
    (3, lambda s: setattr(s._device, "order", c.TrainGroup(group="0/0", trajectories=(), step=0, slot=0))),
    (3, lambda s: setattr(s._device, "order", c.UpdateWeights(step=0, version=1))),
    (12, lambda s: s.timers.set("waking", "trainer", s.now_ns, 1)),
    (12, lambda s: s.timers.set("load", WORKER, s.now_ns, 1)),
    (12, lambda s: s.timers.set("expiry", "spot-1", s.now_ns, 1)),
]
"""Of a run with one turn on a worker, the trainer's device asleep."""


LEFT_BEHIND = (
    *(("boot", "nobody"), ("drain", "nobody"), ("grant", "nothing"), ("succession", "nothing")),
    *(("token", "no turn"), ("handover", "no turn"), ("score", "nowhere"), ("score again", "nowhere")),
    *(("capacity", "queue"), ("place", "queue"), ("reseed", "queue"), ("back-off", "nobody")),
    *(("start", "run"), ("stop", "run")),
)


@pytest.mark.parametrize(("what", "key"), LEFT_BEHIND)
def test_wait_about_nothing_is_found_out(desk, what: str, key: str) -> None:
    working(desk)
    desk.scheduler.timers.set(what, key, desk.scheduler.now_ns, 1)
    with pytest.raises(InvariantViolated, match=f"invariant 12.*wait {what} of {key}: is left behind"):
        check(desk.scheduler)


def test_deadline_that_has_passed_is_found_out(desk) -> None:
    working(desk)
    timers = desk.scheduler.timers
    timers.set("back-off", "spot", desk.scheduler.now_ns, 0)
    check(desk.scheduler)
    timers.set("back-off", "spot", desk.scheduler.now_ns - 1, 0)
    with pytest.raises(InvariantViolated, match="was due"):
        check(desk.scheduler)


@pytest.mark.parametrize(("number", "spoil"), SPOILT)
def test_spoilt_state_is_found_out(desk, number: int, spoil: Callable[[Scheduler], object]) -> None:
    working(desk)
    found_out(desk, number, spoil)


def working(desk) -> None:
    desk.trainer()
    desk.worker()
    desk.end_seeding()
    desk.request("0/0/0")
    assert desk.one(c.StartTurn).worker == WORKER
    check(desk.scheduler)


def found_out(desk, number: int, spoil: Callable[[Scheduler], object], told: str = "") -> None:
    spoil(desk.scheduler)
    with pytest.raises(InvariantViolated) as caught:
        check(desk.scheduler)
    assert caught.value.number == number, str(caught.value)
    assert NUMBERS[number] in str(caught.value)
    assert told in str(caught.value)


def lease(s: Scheduler):
    return s.leases.leases["spot-1"]


@pytest.mark.parametrize(
    ("number", "spoil"),
    [
        (7, lambda s: setattr(lease(s), "leaving", False)),
        (12, lambda s: s.timers.clear("release", "spot-1")),
        (12, lambda s: s.timers.set("grant", "spot-1", s.now_ns, 1)),
        (12, lambda s: s.timers.set("drain", WORKER, s.now_ns, 1)),
        (7, lambda s: setattr(lease(s), "state", LeaseState.GRANTED)),
    ],
)
def test_lease_on_its_way_back(desk, number: int, spoil: Callable[[Scheduler], object]) -> None:
    working(desk)
    desk.tell(e.WorkerDisconnected(worker=WORKER, epoch=1, goodbye=True))
    assert lease(desk.scheduler).state is LeaseState.RELEASING
    found_out(desk, number, spoil)


@pytest.mark.parametrize(
    ("number", "spoil"),
    [
        (12, lambda s: s.timers.clear("drain", WORKER)),
        (12, lambda s: s.timers.clear("expiry", "spot-1")),
        (12, lambda s: s.timers.set("boot", WORKER, s.now_ns, 1)),
        (12, lambda s: s.timers.clear("handover", TURN)),
        (5, lambda s: setattr(lease(s), "expires_at_ns", s.now_ns)),
        (5, lambda s: s.timers.set("token", TURN, s.now_ns, 1) or spoil_turn(s, state=TurnState.RUNNING)),
        (12, lambda s: s.timers.set("succession", "spot-1", s.now_ns, 1)),
    ],
)
def test_draining_worker(desk, number: int, spoil: Callable[[Scheduler], object]) -> None:
    working(desk)
    desk.tell(e.LeaseNotice(lease="spot-1", deadline_ns=desk.scheduler.now_ns + 10**9, reason="preemption"))
    assert desk.scheduler.fleet.workers[WORKER].state is WorkerState.DRAINING
    found_out(desk, number, spoil)


def test_every_state_of_a_worker_has_its_deadline(desk) -> None:
    desk.trainer()
    desk.offer("spot")
    desk.grant("spot-1")
    waits = [("boot", lambda: desk.join(WORKER, version=None))]
    waits += [("load", lambda: desk.tell(e.WeightsFailed(worker=WORKER, epoch=1, version=0, reason="torn")))]
    waits += [("reload", lambda: desk.tell(e.WorkerDisconnected(worker=WORKER, epoch=1))), ("resume", lambda: None)]
    for what, go_on in waits:
        timers, now_ns = desk.scheduler.timers, desk.scheduler.now_ns
        assert timers.waiting(what, WORKER)
        timers.clear(what, WORKER)
        with pytest.raises(InvariantViolated, match="invariant 12"):
            check(desk.scheduler)
        timers.set(what, WORKER, now_ns, 10**9)
        go_on()


def test_a_worker_has_begun_all_its_turns_but_the_pending_ones(desk) -> None:
    working(desk)
    found_out(desk, 9, lambda s: spoil_worker(s, pending=7), "7 pending")


def test_worker_that_serves_a_version_is_not_loading(desk) -> None:
    desk.trainer()
    desk.offer("spot")
    desk.grant("spot-1")
    desk.join(WORKER, version=None)
    desk.scheduler.timers.clear("load", WORKER)
    found_out(desk, 9, lambda s: spoil_worker(s, version=0, loading_version=None))


@pytest.mark.parametrize(
    ("number", "spoil"),
    [
        (11, lambda s: s.step.groups["0/0"].members.update({"0/0/0": 1.0})),
        (12, lambda s: s.timers.clear("score", "0/0/0")),
        (12, lambda s: s.timers.set("score again", "0/0/0", s.now_ns, 1)),
        (12, lambda s: setattr(s.scorings["0/0/0"], "attempt", s.limits.score_attempts_max + 1)),
        (9, lambda s: s.timers.clear("score", "0/0/0") or setattr(s.scorings["0/0/0"], "state", ScoringState.QUEUED)),
    ],
)
def test_spoilt_scoring(desk, number: int, spoil: Callable[[Scheduler], object]) -> None:
    desk.trainer()
    desk.tell(e.RewardRequested(trajectory="0/0/0", tokens=1))
    found_out(desk, number, spoil)


def test_more_scorings_than_the_pool_takes(make_desk) -> None:
    desk = make_desk(group_size=3)
    desk.trainer()
    for trajectory in ("0/0/0", "0/0/1", "0/0/2"):
        desk.tell(e.RewardRequested(trajectory=trajectory, tokens=1))
    scoring = desk.scheduler.scorings["0/0/2"]
    assert scoring.state is ScoringState.QUEUED
    desk.scheduler.timers.set("score", "0/0/2", desk.scheduler.now_ns, 1)
    found_out(desk, 9, lambda s: setattr(scoring, "state", ScoringState.RUNNING))


@pytest.mark.parametrize(
    ("number", "spoil"),
    [
        (9, lambda s: setattr(s.turns.live["0/0/1#0"], "order", -1)),
        (9, lambda s: s.turns._queues.clear()),
        (12, lambda s: s.timers.clear("place", "queue")),
    ],
)
def test_spoilt_queue(desk, number: int, spoil: Callable[[Scheduler], object]) -> None:
    desk.trainer(capacity=0)
    for trajectory in ("0/0/0", "0/0/1"):
        desk.request(trajectory)
    found_out(desk, number, spoil)


def test_trainers_device_that_sleeps_while_nobody_can_go_on(desk) -> None:
    working(desk)
    desk.lease_ended("spot-1")
    assert desk.scheduler.timers.waiting("reseed", "queue")
    found_out(desk, 9, lambda s: s.timers.clear("reseed", "queue"))


@pytest.mark.parametrize(
    ("number", "spoil"),
    [
        (12, lambda s: s.timers.clear("training", "trainer")),
        (3, lambda s: setattr(s._device, "order", None)),
        (3, lambda s: s.fleet.move(s.trainer(), WorkerState.READY, s.now_ns, "test")),
        (3, lambda s: setattr(s.step.groups["0/0"], "slot", None)),
    ],
)
def test_spoilt_training(desk, number: int, spoil: Callable[[Scheduler], object]) -> None:
    desk.trainer()
    desk.tell(e.TrajectoryFinished(trajectory="0/0/0", reward=0.0, tokens=1))
    desk.tell(e.TrajectoryFinished(trajectory="0/0/1", reward=1.0, tokens=1))
    desk.tell(e.WorkerSlept(worker="trainer", epoch=1))
    assert desk.sent(c.TrainGroup)
    found_out(desk, number, spoil)


@pytest.mark.parametrize(
    ("number", "spoil"),
    [
        (12, lambda s: s.timers.set("stop", "run", s.now_ns, 1)),
        (12, lambda s: s.turns.request("0/0/0#0", "0/0/0", 1, 1, 0)),
        (7, lambda s: setattr(s._run, "failed", "") or s.leases.request("spot")),
        (6, lambda s: s.ledger.books["trainer"].accounts_ns.update({Account.IDLE: 10**15})),
        (6, lambda s: setattr(s.ledger.books["trainer"], "closed_ns", 10**15)),
    ],
)
def test_spoilt_end(desk, number: int, spoil: Callable[[Scheduler], object]) -> None:
    desk.trainer()
    desk.offer("spot")
    desk.tell(e.StopRequested(reason="asked to"))
    desk.tell(e.LeaseRefused(lease="spot-1", reason="withdrawn"))
    desk.tell(e.WorkerDisconnected(worker="trainer", epoch=1, goodbye=True))
    desk.lease_ended("trainer-1", EndCause.RELEASED)
    assert desk.sent(c.EndRun)
    found_out(desk, number, spoil)


def test_a_book_ends_where_it_was_closed(desk) -> None:
    desk.trainer()
    desk.tell(e.StopRequested(reason="asked to"))
    desk.tell(e.WorkerDisconnected(worker="trainer", epoch=1, goodbye=True))
    desk.lease_ended("trainer-1", EndCause.RELEASED)
    found_out(desk, 6, lambda s: setattr(s.ledger.books["trainer"], "closed_ns", 10**15), "closed at 1000000000000000")


def test_run_that_ends_with_leases_says_so(desk) -> None:
    """Where it does, their books need not be closed."""
    desk.trainer()
    desk.tell(e.StopRequested(reason="asked to"))
    desk.wait(20)
    assert desk.scheduler.leases.leases
    check(desk.scheduler)


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
