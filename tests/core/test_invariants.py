"""The checker itself: a state that is spoilt in one way is found out, by the right invariant."""

from collections.abc import Callable

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.invariants import NUMBERS, InvariantViolated, check
from elastic.core.scheduler import Scheduler
from elastic.core.trainer_device import TrainerDevice
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
from tests.core.conftest import part

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
    s.timers.clear("token", WORKER)
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
    (12, lambda s: s.timers.clear("token", WORKER)),
    (12, lambda s: spoil_turn(s, due_ns=s.now_ns)),
    (1, lambda s: s.fleet.workers[WORKER].slots.clear()),
    (12, lambda s: s.timers.clear("heartbeat", WORKER)),
    (12, lambda s: s.timers.set("release", "spot-1", s.now_ns, 1)),
    (12, lambda s: s.timers.set("boot", "nobody", s.now_ns, 1)),
    (12, lambda s: s.timers.set("back-off", "spot", 0, 0)),
    (12, lambda s: s.timers.set("training", "trainer", s.now_ns, 1)),
    (12, lambda s: s.turns.trajectories.clear()),
    (12, lambda s: s.turns.trajectories["0/0/0"].turns.clear()),
    (12, lambda s: s.step.groups["0/0"].members.update({"0/0/0": 1.0})),
    (1, lambda s: spoil_turn(s, state=TurnState.QUEUED)),
    (5, lambda s: spoil_turn(s, worker="nobody")),
    (12, lambda s: spoil_turn(s, state=TurnState.MOVING)),
    (4, lambda s: setattr(s.step.groups["0/0"], "oldest_token", -1)),
    (3, lambda s: setattr(s.step.groups["0/0"], "slot", 0)),
    (7, lambda s: s.leases._held.update({"spot": 1})),
    (6, lambda s: setattr(s.ledger.books[WORKER], "cursor_ns", 10**15)),
    (6, lambda s: s.ledger.books[WORKER].accounts_ns.update({Account.IDLE: -1, Account.DECODE: 1})),
    (3, lambda s: setattr(part(s, TrainerDevice), "order", c.TrainGroup(group="0/0", trajectories=(), step=0, slot=0))),
    (3, lambda s: setattr(part(s, TrainerDevice), "order", c.UpdateWeights(step=0, version=1))),
    (12, lambda s: s.timers.set("waking", "trainer", s.now_ns, 1)),
    (12, lambda s: s.timers.set("load", WORKER, s.now_ns, 1)),
    (12, lambda s: s.timers.set("expiry", "spot-1", s.now_ns, 1)),
]
"""Of a run with one turn on a worker, the trainer's device asleep."""


LEFT_BEHIND = (
    *(("boot", "nobody"), ("drain", "nobody"), ("grant", "nothing"), ("early replacement", "nothing")),
    *(("token", "nobody"), ("handover", "no turn"), ("score", "nowhere"), ("score again", "nowhere")),
    *(("capacity", "queue"), ("place", "queue"), ("reseed", "queue"), ("back-off", "nobody")),
    *(("start", "run"), ("stop", "run")),
)


@pytest.mark.parametrize(("what", "key"), LEFT_BEHIND)
def test_wait_about_nothing_is_found_out(core, what: str, key: str) -> None:
    working(core)
    core.scheduler.timers.set(what, key, core.scheduler.now_ns, 1)
    with pytest.raises(InvariantViolated, match=f"invariant 12.*wait {what} of {key}: is left behind"):
        check(core.scheduler)


def test_deadline_that_has_passed_is_found_out(core) -> None:
    working(core)
    timers = core.scheduler.timers
    timers.set("back-off", "spot", core.scheduler.now_ns, 0)
    check(core.scheduler)
    timers.set("back-off", "spot", core.scheduler.now_ns - 1, 0)
    with pytest.raises(InvariantViolated, match="was due"):
        check(core.scheduler)


@pytest.mark.parametrize(("number", "spoil"), SPOILT)
def test_spoilt_state_is_found_out(core, number: int, spoil: Callable[[Scheduler], object]) -> None:
    working(core)
    found_out(core, number, spoil)


def working(core) -> None:
    core.trainer()
    core.worker()
    core.end_seeding()
    core.request("0/0/0")
    assert core.one(c.StartTurn).worker == WORKER
    check(core.scheduler)


def found_out(core, number: int, spoil: Callable[[Scheduler], object], told: str = "") -> None:
    spoil(core.scheduler)
    with pytest.raises(InvariantViolated) as caught:
        check(core.scheduler)
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
def test_lease_on_its_way_back(core, number: int, spoil: Callable[[Scheduler], object]) -> None:
    working(core)
    core.tell(e.WorkerDisconnected(worker=WORKER, epoch=1, goodbye=True))
    assert lease(core.scheduler).state is LeaseState.RELEASING
    found_out(core, number, spoil)


@pytest.mark.parametrize(
    ("number", "spoil"),
    [
        (12, lambda s: s.timers.clear("drain", WORKER)),
        (12, lambda s: s.timers.clear("expiry", "spot-1")),
        (12, lambda s: s.timers.set("boot", WORKER, s.now_ns, 1)),
        (12, lambda s: s.timers.clear("handover", TURN)),
        (5, lambda s: setattr(lease(s), "expires_at_ns", s.now_ns)),
        (5, lambda s: s.timers.set("token", WORKER, s.now_ns, 0) or spoil_turn(s, state=TurnState.RUNNING)),
        (12, lambda s: s.timers.set("early replacement", "spot-1", s.now_ns, 1)),
    ],
)
def test_draining_worker(core, number: int, spoil: Callable[[Scheduler], object]) -> None:
    working(core)
    core.tell(e.LeaseNotice(lease="spot-1", deadline_ns=core.scheduler.now_ns + 10**9, reason="preemption"))
    assert core.scheduler.fleet.workers[WORKER].state is WorkerState.DRAINING
    found_out(core, number, spoil)


def test_every_state_of_a_worker_has_its_deadline(core) -> None:
    core.trainer()
    core.offer("spot")
    core.grant("spot-1")
    waits = [("boot", lambda: core.join(WORKER, version=None))]
    waits += [("load", lambda: core.tell(e.WeightsFailed(worker=WORKER, epoch=1, version=0, reason="torn")))]
    waits += [("reload", lambda: core.tell(e.WorkerDisconnected(worker=WORKER, epoch=1))), ("resume", lambda: None)]
    for what, go_on in waits:
        timers, now_ns = core.scheduler.timers, core.scheduler.now_ns
        assert timers.waiting(what, WORKER)
        timers.clear(what, WORKER)
        with pytest.raises(InvariantViolated, match="invariant 12"):
            check(core.scheduler)
        timers.set(what, WORKER, now_ns, 10**9)
        go_on()


def test_a_worker_has_begun_all_its_turns_but_the_pending_ones(core) -> None:
    working(core)
    found_out(core, 9, lambda s: spoil_worker(s, pending=7), "7 pending")


def test_worker_that_serves_a_version_is_not_loading(core) -> None:
    core.trainer()
    core.offer("spot")
    core.grant("spot-1")
    core.join(WORKER, version=None)
    core.scheduler.timers.clear("load", WORKER)
    found_out(core, 9, lambda s: spoil_worker(s, version=0, loading_version=None))


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
def test_spoilt_scoring(core, number: int, spoil: Callable[[Scheduler], object]) -> None:
    core.trainer()
    core.tell(e.RewardRequested(trajectory="0/0/0", tokens=1))
    found_out(core, number, spoil)


def test_more_scorings_than_the_pool_takes(make_core) -> None:
    core = make_core(group_size=3)
    core.trainer()
    for trajectory in ("0/0/0", "0/0/1", "0/0/2"):
        core.tell(e.RewardRequested(trajectory=trajectory, tokens=1))
    scoring = core.scheduler.scorings["0/0/2"]
    assert scoring.state is ScoringState.QUEUED
    core.scheduler.timers.set("score", "0/0/2", core.scheduler.now_ns, 1)
    found_out(core, 9, lambda s: setattr(scoring, "state", ScoringState.RUNNING))


@pytest.mark.parametrize(
    ("number", "spoil"),
    [
        (9, lambda s: setattr(s.turns.live["0/0/1#0"], "order", -1)),
        (9, lambda s: s.turns.queue.remove("0/0/0#0", 0)),
        (12, lambda s: s.timers.clear("place", "queue")),
    ],
)
def test_spoilt_queue(core, number: int, spoil: Callable[[Scheduler], object]) -> None:
    core.trainer(capacity=0)
    for trajectory in ("0/0/0", "0/0/1"):
        core.request(trajectory)
    found_out(core, number, spoil)


def test_trainers_device_that_sleeps_while_nobody_can_go_on(core) -> None:
    working(core)
    core.lease_ended("spot-1")
    assert core.scheduler.timers.waiting("reseed", "queue")
    found_out(core, 9, lambda s: s.timers.clear("reseed", "queue"))


@pytest.mark.parametrize(
    ("number", "spoil"),
    [
        (12, lambda s: s.timers.clear("training", "trainer")),
        (3, lambda s: setattr(part(s, TrainerDevice), "order", None)),
        (3, lambda s: s.fleet.move(s.trainer(), WorkerState.READY, s.now_ns, "test")),
        (3, lambda s: setattr(s.step.groups["0/0"], "slot", None)),
    ],
)
def test_spoilt_training(core, number: int, spoil: Callable[[Scheduler], object]) -> None:
    core.trainer()
    core.tell(e.TrajectoryFinished(trajectory="0/0/0", reward=0.0, tokens=1))
    core.tell(e.TrajectoryFinished(trajectory="0/0/1", reward=1.0, tokens=1))
    core.tell(e.WorkerSlept(worker="trainer", epoch=1))
    assert core.sent(c.TrainGroup)
    found_out(core, number, spoil)


@pytest.mark.parametrize(
    ("number", "spoil"),
    [
        (12, lambda s: s.timers.set("stop", "run", s.now_ns, 1)),
        (12, lambda s: s.turns.request("0/0/0#0", "0/0/0", 1, 1, 0)),
        (7, lambda s: setattr(s.pieces[0], "failed", "") or s.leases.request("spot")),
        (6, lambda s: s.ledger.books["trainer"].accounts_ns.update({Account.IDLE: 10**15})),
        (6, lambda s: setattr(s.ledger.books["trainer"], "closed_ns", 10**15)),
    ],
)
def test_spoilt_end(core, number: int, spoil: Callable[[Scheduler], object]) -> None:
    core.trainer()
    core.offer("spot")
    core.tell(e.StopRequested(reason="asked to"))
    core.tell(e.LeaseRefused(lease="spot-1", reason="withdrawn"))
    core.tell(e.WorkerDisconnected(worker="trainer", epoch=1, goodbye=True))
    core.lease_ended("trainer-1", EndCause.RELEASED)
    assert core.sent(c.EndRun)
    found_out(core, number, spoil)


def test_a_book_ends_where_it_was_closed(core) -> None:
    core.trainer()
    core.tell(e.StopRequested(reason="asked to"))
    core.tell(e.WorkerDisconnected(worker="trainer", epoch=1, goodbye=True))
    core.lease_ended("trainer-1", EndCause.RELEASED)
    found_out(core, 6, lambda s: setattr(s.ledger.books["trainer"], "closed_ns", 10**15), "closed at 1000000000000000")


def test_run_that_ends_with_leases_says_so(core) -> None:
    """Where it does, their books need not be closed."""
    core.trainer()
    core.tell(e.StopRequested(reason="asked to"))
    core.wait(20)
    assert core.scheduler.leases.leases
    check(core.scheduler)


def test_nan_reward_is_found_out(core) -> None:
    core.trainer()
    core.scheduler.step.groups["0/0"].members["0/0/0"] = float("nan")
    with pytest.raises(InvariantViolated, match="invariant 11"):
        check(core.scheduler)


def test_violation_tells_the_things_story(core) -> None:
    core.trainer()
    core.worker()
    core.scheduler.timers.clear("heartbeat", WORKER)
    with pytest.raises(InvariantViolated, match="booting → ready"):
        check(core.scheduler)
