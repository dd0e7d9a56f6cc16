"""What a node agent decides: its device is one job's at a time, under numbers that only grow, and not beyond its
time."""

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.pool.node_agent_state import (
    BeginResident,
    NodeAgentEvent,
    NodeAgentState,
    PermitRefused,
    ResidentEnded,
    ResidentSaid,
    ScriptStarted,
    Signal,
    TellPool,
    TellResident,
    Untaken,
    WakeupDue,
)
from tests.seeds import examples

JOBS = st.sampled_from(["a", "b", "c"])
PICKS = st.integers(0, 5)


def order(job: str, placement: int = 1, *, script: bool = False) -> w.StartResidentFrame:
    return w.StartResidentFrame(job, placement, PhaseKind.ROLLOUT, ("x",), {}, "", "", script)


def ticket(worker: str) -> w.WorkerTicketFrame:
    return w.WorkerTicketFrame("run", worker, "token", "a:1")


def warm(state: NodeAgentState, *jobs: str) -> None:
    for job in jobs:
        state.handle(order(job), 0)
        state.handle(ResidentSaid(job, w.Warm()), 0)


def test_the_next_job_has_the_device_once_the_one_before_has_parked():
    state = NodeAgentState()
    warm(state, "a", "b")
    assert state.handle(w.GiveDevice(1, "a", 10), 0) == [TellResident("a", w.Resume(1))]
    assert state.handle(w.TakeDevice(1, "a", 5), 1) == [TellResident("a", w.Park(1))]
    freed = w.DeviceFreed(1, "a", 4.75, 4.0)
    state.handle(ResidentSaid("a", w.DeviceResumed(1, 0.25)), 1)
    assert state.handle(ResidentSaid("a", w.Parked(1, 0.5, cold_s=4.0)), 2) == [TellPool(freed)]
    assert state.handle(w.GiveDevice(2, "b", 10), 3) == [TellResident("b", w.Resume(2))]
    assert state.handle(w.GiveDevice(1, "a", 10), 4) == [PermitRefused(1)]
    assert state.given() == (2, "b")


def test_who_has_the_device_too_long_or_does_not_park_is_killed():
    for taken, cause in ((False, "it held the device too long"), (True, "it has not parked in time")):
        state = NodeAgentState()
        warm(state, "a")
        state.handle(w.GiveDevice(1, "a", 10), 0)
        if taken:
            state.handle(w.TakeDevice(1, "a", 4), 6)
        assert state.next_wakeup_s() == 10
        assert not state.handle(WakeupDue(), 9)
        assert state.handle(WakeupDue(), 10) == [Signal("a", cause, kill=True)]
        assert state.next_wakeup_s() is None
        gone = w.ResidentGone("a", 1, cause, 1, -9)
        assert TellPool(gone) in state.handle(ResidentEnded("a", "killed", -9), 11)
        assert state.given() == (0, "")


def test_a_device_that_was_not_taken_back_is_the_pool_s_fault_and_its_holder_is_killed_before_the_next_one_has_it():
    state = NodeAgentState()
    warm(state, "a", "b")
    state.handle(w.GiveDevice(1, "a", 10), 0)
    cause = "permit 1 counts no more, and it has not parked"
    assert state.handle(w.GiveDevice(2, "b", 10), 1) == [Untaken(2, 1), Signal("a", cause, kill=True)]
    assert state.handle(ResidentEnded("a", "killed"), 2)[-1] == TellResident("b", w.Resume(2))


def test_a_later_placement_follows_once_the_earlier_one_is_gone_and_has_its_permit_no_more():
    state = NodeAgentState()
    warm(state, "a")
    state.handle(w.GiveDevice(1, "a", 10), 0)
    (killed,) = state.handle(order("a", 2), 1)
    assert isinstance(killed, Signal)
    assert killed.kill
    commands = state.handle(ResidentEnded("a", "killed"), 2)
    assert commands[1:] == [BeginResident(order("a", 2), quietly=False)]
    assert state.given() == (0, "")


def test_whoever_starts_beside_others_starts_quietly_unless_it_has_the_device():
    state = NodeAgentState()
    assert state.handle(order("a"), 0) == [BeginResident(order("a"), quietly=False)]
    assert state.handle(order("b"), 0) == [BeginResident(order("b"), quietly=True)]
    state.handle(w.GiveDevice(1, "c", 10), 0)
    assert state.handle(order("c"), 0) == [BeginResident(order("c"), quietly=False)]


def test_a_resident_is_asked_to_end_and_killed_when_its_grace_is_over():
    state = NodeAgentState()
    warm(state, "a")
    assert state.handle(w.EndResident("a", "enough", 3), 1) == [Signal("a", "enough", kill=False)]
    assert state.next_wakeup_s() == 4
    assert state.handle(WakeupDue(), 4) == [Signal("a", "enough", kill=True)]


def test_a_script_s_device_is_free_at_once_and_its_end_is_told_at_every_dial():
    state = NodeAgentState()
    assert state.handle(order("a", script=True), 0)
    assert state.handle(ScriptStarted("a"), 0) == [TellPool(w.ResidentUp("a", 1))]
    state.handle(w.GiveDevice(1, "a", 10), 0)
    assert state.handle(w.TakeDevice(1, "a", 5), 1) == [TellPool(w.DeviceFreed(1, "a"))]
    gone = w.ResidentGone("a", 1, "it exited", 0, 0)
    assert state.handle(ResidentEnded("a", "it exited", 0), 2) == [TellPool(gone)]
    assert state.hello("n", "", 1).gone == (gone,)
    state.handle(order("a", 2, script=True), 3)
    assert not state.hello("n", "", 1).gone


def test_a_worker_is_lent_with_the_device_and_its_end_is_told():
    state = NodeAgentState()
    warm(state, "a")
    assert state.handle(w.GiveDevice(2, "a", 10, ticket("w")), 0) == [
        TellResident("a", w.Resume(2)),
        TellResident("a", w.WorkAs(ticket("w"))),
    ]
    assert not state.handle(w.GiveDevice(2, "a", 10, ticket("w")), 0)
    assert state.handle(w.LeaveWorker("a", "w"), 2) == [TellResident("a", w.Leave("w"))]
    assert state.handle(ResidentSaid("a", w.Left("w")), 3.5) == [TellPool(w.WorkerLeft("a", "w"))]
    assert state.handle(w.GiveDevice(2, "a", 10, ticket("v")), 4) == [TellResident("a", w.WorkAs(ticket("v")))]
    refused, late = state.handle(w.GiveDevice(1, "a", 10, ticket("u")), 5)
    assert refused == PermitRefused(1)
    assert late == TellPool(w.WorkerLeft("a", "u", "the device is not its job's any more"))


def picked(jobs: Iterable[str], pick: int) -> str:
    among = sorted(jobs)
    return among[pick % len(among)]


class AnyNodeAgent(RuleBasedStateMachine):
    """A pool that says anything in any order, and residents that park, or do not, or die."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.now_s = NodeAgentState(), 0.0
        self.living: dict[str, w.StartResidentFrame] = {}
        self.computing: dict[str, int] = {}
        self.parking: dict[str, int] = {}
        self.killed: set[str] = set()
        self.resumed = 0
        self.until_s: dict[int, float] = {}
        self.unanswered: dict[int, str] = {}

    def tell(self, event: NodeAgentEvent) -> None:
        for command in self.state.handle(event, self.now_s):
            match command:
                case BeginResident(order=launched):
                    assert launched.job not in self.living
                    self.living[launched.job] = launched
                case TellResident(job=job, message=w.Resume(permit=permit)):
                    assert job in self.living
                    assert not self.computing, f"{job} computes beside {self.computing}"
                    assert permit >= self.resumed, "permits only grow"
                    self.computing[job] = self.resumed = permit
                case TellResident(job=job, message=w.Park(permit=permit)):
                    assert self.computing[job] == permit
                    self.parking[job] = permit
                case Untaken(former=former):
                    assert former not in self.unanswered, "it has been taken"
                case Signal(job=job, kill=True):
                    assert job in self.living
                    self.killed.add(job)
                case TellPool(message=w.DeviceFreed(permit=permit) | w.ResidentGone(permit=permit)):
                    self.unanswered.pop(permit, None)
                case _:
                    pass

    @rule(job=JOBS, placement=st.integers(1, 2))
    def starts(self, job: str, placement: int) -> None:
        self.tell(order(job, placement))

    @precondition(lambda self: self.living.keys() - self.killed)
    @rule(pick=PICKS)
    def is_warm(self, pick: int) -> None:
        self.tell(ResidentSaid(picked(self.living.keys() - self.killed, pick), w.Warm()))

    @rule(job=JOBS, permit=st.integers(1, 8), left_s=st.integers(1, 20))
    def gives(self, job: str, permit: int, left_s: int) -> None:
        before, last = self.state.given(), self.state.last_permit
        self.tell(w.GiveDevice(permit, job, left_s))
        if permit > last or before == (permit, job):
            self.until_s[permit] = max(self.until_s.get(permit, 0), self.now_s + left_s)
        else:
            assert self.state.given() in (before, (0, "")), "an old permit changes nothing"

    @precondition(lambda self: self.state.given()[0])
    @rule(left_s=st.integers(1, 20))
    def takes(self, left_s: int) -> None:
        permit, job = self.state.given()
        self.unanswered[permit] = job
        self.until_s[permit] = max(self.until_s[permit], self.now_s + left_s)
        self.tell(w.TakeDevice(permit, job, left_s))

    @rule(job=JOBS)
    def lends(self, job: str) -> None:
        permit = self.state.given()[0]
        if permit and job == self.state.given()[1]:
            self.until_s[permit] = max(self.until_s[permit], self.now_s + 1)
        self.tell(w.GiveDevice(permit, job, 1, ticket(f"{job}-{self.now_s}")))

    @rule(job=JOBS, grace_s=st.integers(0, 3))
    def ends(self, job: str, grace_s: int) -> None:
        self.tell(w.EndResident(job, "told so", grace_s))

    @precondition(lambda self: self.parking.keys() - self.killed)
    @rule(pick=PICKS)
    def parks(self, pick: int) -> None:
        job = picked(self.parking.keys() - self.killed, pick)
        permit = self.parking.pop(job)
        del self.computing[job]
        self.tell(ResidentSaid(job, w.Parked(permit, 0)))

    @precondition(lambda self: self.living)
    @rule(pick=PICKS)
    def dies(self, pick: int) -> None:
        self.die(picked(self.living, pick))

    def die(self, job: str) -> None:
        self.computing.pop(job, None)
        self.parking.pop(job, None)
        self.killed.discard(job)
        del self.living[job]
        self.tell(ResidentEnded(job, "it died"))

    @rule(after_s=st.integers(1, 30))
    def waits(self, after_s: int) -> None:
        until_s = self.now_s + after_s
        while (due_s := self.state.next_wakeup_s()) is not None and due_s <= until_s:
            assert due_s >= self.now_s
            self.now_s = due_s
            self.tell(WakeupDue())
        self.now_s = until_s

    @precondition(lambda self: self.killed)
    @rule()
    def the_killed_are_gone(self) -> None:
        for job in sorted(self.killed):
            self.die(job)

    @invariant()
    def nobody_computes_beyond_its_time(self) -> None:
        for job, permit in self.computing.items():
            assert job in self.killed or self.now_s <= self.until_s[permit]

    @invariant()
    def it_says_what_it_holds(self) -> None:
        told = {one.job: one.permit for one in self.state.hello("n", "", 1).residents}
        assert told.keys() == self.living.keys()
        assert {job: permit for job, permit in told.items() if permit} == self.computing

    def teardown(self) -> None:
        self.waits(60)
        self.the_killed_are_gone()
        assert not self.unanswered, "a device that is taken becomes free"


AnyNodeAgent.TestCase.settings = settings(max_examples=examples(24, 60), stateful_step_count=40, deadline=None)
TestAnyNodeAgent = AnyNodeAgent.TestCase
