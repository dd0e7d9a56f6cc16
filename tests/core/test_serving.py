"""A run without groups: what others train is served in the order of their offers, and their requests are never lost."""

from collections.abc import Iterator

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.affinity import MARKS_KEPT, Affinity
from elastic.core.digest import digest
from elastic.core.invariants import check
from elastic.core.saved_state import restore, save
from elastic.core.scheduler import Phase, Scheduler
from elastic.core.types import (
    NS_PER_S,
    EndCause,
    FinishReason,
    LeaseState,
    Plan,
    WorkerState,
)
from elastic.testing.faults.core.incarnation import policies
from elastic.testing.faults.core.settings import SMALL_LIMITS, WorldSettings
from policies.routing import AffinityRouting
from policies.seeding import FixedWindow
from tests.core.conftest import CoreHarness
from tests.core.test_scheduler_fuzz import Monkey

PLAN = {"steps": 10**9, "groups": 0, "staleness_bound": 10**9, "driven_outside": True}


@pytest.fixture
def core() -> CoreHarness:
    """A run whose importer is there, and asleep."""
    return with_importer(CoreHarness(seeding=FixedWindow(0), **PLAN))


def with_importer(core: CoreHarness) -> CoreHarness:
    core.trainer(capacity=0)
    core.tell(e.WorkerSlept(worker="trainer", epoch=1))
    return core


def offered(core: CoreHarness, look: str, label: str = "") -> None:
    core.tell(e.VersionOffered(source=f"at {look}", look=look, label=label))


def published(core: CoreHarness, version: int) -> None:
    core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=version))


def test_nothing_is_done_before_an_offer_which_then_ends_the_step(core: CoreHarness) -> None:
    assert core.scheduler.step is not None
    assert (core.scheduler.step.number, core.scheduler.trainer_order) == (0, None)
    offered(core, "a", "step_7")
    order = core.one(c.UpdateWeights)
    assert (order.step, order.version, order.source, order.empty_slots) == (0, 1, "at a", ())
    published(core, 1)
    assert core.one(c.AnswerOffer) == c.AnswerOffer(look="a", version=1)
    assert core.scheduler.step.number == 1
    assert core.scheduler.serving is not None
    assert core.scheduler.serving.labels == {1: "step_7"}
    assert core.scheduler.warned == 0


def test_two_offers_follow_one_another_and_the_same_is_answered_for_all(core: CoreHarness) -> None:
    offered(core, "a")
    for look in ("b", "a", "b"):
        offered(core, look)
        assert not core.out
    published(core, 1)
    assert core.one(c.AnswerOffer).look == "a"
    assert core.one(c.UpdateWeights).source == "at b"
    published(core, 2)
    assert core.one(c.AnswerOffer) == c.AnswerOffer(look="b", version=2)
    offered(core, "b")
    assert core.one(c.AnswerOffer) == c.AnswerOffer(look="b", version=2), "unchanged, it is answered again"
    offered(core, "a")
    assert core.one(c.UpdateWeights).version == 3, "it is another one by now"


def test_a_refused_offer_leaves_what_was_served_and_the_next_one_its_turn(core: CoreHarness) -> None:
    offered(core, "a")
    offered(core, "b")
    core.tell(e.VersionRefused(worker="trainer", epoch=1, version=1, reason="half written", again=False))
    assert core.one(c.AnswerOffer) == c.AnswerOffer(look="a", version=0, refused="half written")
    assert core.one(c.UpdateWeights).source == "at b"
    core.tell(e.VersionRefused(worker="trainer", epoch=1, version=7, reason="of long ago"))
    assert not core.out
    published(core, 1)
    assert core.scheduler.version == 1


def test_turns_have_the_version_that_was_answered_or_a_later_one(core: CoreHarness) -> None:
    worker = core.worker()
    core.request("0/0/0")
    old = core.one(c.StartTurn)
    offered(core, "a")
    published(core, 1)
    core.request("1/1/0")
    assert not core.sent(c.StartTurn), "the only worker has the version before"
    core.tokens(old, 3, version=0)
    core.tokens(old, 1, start=3, version=0, finish=FinishReason.STOP)
    assert core.one(c.FinishTurn).turn == "0/0/0#0", "what was requested before goes on"
    core.tell(e.WeightsApplied(worker=worker, epoch=1, version=1))
    assert core.one(c.StartTurn).turn == "1/1/0#0"


def test_a_request_is_forgotten_with_its_turn(core: CoreHarness) -> None:
    core.worker()
    core.request("0/0/0")
    core.tokens(core.one(c.StartTurn), 5, finish=FinishReason.STOP)
    assert not core.scheduler.turns.live
    assert not core.scheduler.turns.trajectories


def test_a_pause_holds_what_waits_and_lets_go_on_what_runs(core: CoreHarness) -> None:
    core.worker()
    core.request("0/0/0")
    running = core.one(c.StartTurn)
    core.tell(e.TurnsHeld(held=True))
    core.request("0/1/0")
    assert not core.sent(c.StartTurn)
    core.tokens(running, 2)
    assert core.sent(c.AcceptTokens)
    core.tell(e.TurnCut(turn="0/1/0#0", kept=0, aborted=True))
    assert core.one(c.FinishTurn).turn == "0/1/0#0", "what is held can be ended"
    core.request("0/2/0")
    core.tell(e.TurnsHeld(held=False))
    assert core.one(c.StartTurn).turn == "0/2/0#0"


def test_no_wait_ends_such_a_run(core: CoreHarness) -> None:
    core.request("0/0/0")
    core.wait(10 * SMALL_LIMITS.queue_timeout_ns / NS_PER_S, beating=("trainer",))
    assert core.scheduler.phase is Phase.RUNNING
    assert "0/0/0#0" in core.scheduler.turns.live, "whoever waits for capacity waits"
    offered(core, "a")
    core.wait(3 * SMALL_LIMITS.train_timeout_ns / NS_PER_S, beating=("trainer",))
    assert core.scheduler.phase is Phase.RUNNING
    core.worker()
    core.lease_ended("trainer-1")
    core.wait(SMALL_LIMITS.train_timeout_ns / NS_PER_S)
    assert core.scheduler.phase is Phase.RUNNING


def test_an_importer_that_fails_is_replaced_and_its_offer_may_come_again(core: CoreHarness) -> None:
    offered(core, "a")
    core.tell(e.TrainerFailed(worker="trainer", epoch=1, error="no space left on device"))
    answer = core.one(c.AnswerOffer)
    assert (answer.look, answer.version, answer.again) == ("a", 0, True)
    assert "no space left on device" in answer.refused
    assert core.one(c.FenceWorker).worker == "trainer"
    assert core.one(c.ReleaseLease).lease == "trainer-1"
    assert core.scheduler.phase is Phase.RUNNING


def test_an_update_goes_on_at_the_importers_successor(core: CoreHarness) -> None:
    offered(core, "a")
    core.lease_ended("trainer-1")
    core.wait(SMALL_LIMITS.retry_max_ns / NS_PER_S)
    core.grant("trainer-2", workers=("second",))
    core.join("second", 0)
    core.tell(e.WorkerSlept(worker="second", epoch=1))
    assert core.one(c.UpdateWeights).source == "at a"
    core.tell(e.WeightsPublished(worker="second", epoch=1, version=1))
    assert core.one(c.AnswerOffer) == c.AnswerOffer(look="a", version=1)


class Lulls(CoreHarness):
    """A run whose leases may go back while nothing is requested, with one provider of one worker."""

    READY_S = 3.0

    def __init__(self, *, holding: bool, idle_s: int) -> None:
        super().__init__(seeding=FixedWindow(0), **PLAN)
        plan = Plan(group_size=2, idle_ns=idle_s * NS_PER_S, **PLAN)
        self.scheduler = Scheduler(plan, SMALL_LIMITS, policies(WorldSettings(plan=plan, holding=holding)), 0)
        with_importer(self)
        self.asked = 0
        self.coming: dict[str, float] = {}
        """By lease, when its worker is ready."""
        self.offer("spot")
        self.quiet(2 * self.READY_S)

    def quiet(self, seconds: float) -> None:
        """Nothing is requested. What was asked for is ready a while later, and what is given back is gone at once."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            for lease in list(self.scheduler.leases.leases.values()):
                if lease.state is LeaseState.REQUESTED:
                    self.grant(lease.id, workers=(lease.id,))
                    self.coming[lease.id] = self.now_s + self.READY_S
                elif lease.goes:
                    self.lease_ended(lease.id, EndCause.RELEASED)
                    self.offer("spot")
            for lease_id in [lease_id for lease_id, ready_s in self.coming.items() if ready_s <= self.now_s]:
                del self.coming[lease_id]
                self.join(lease_id, 0)
                self.beat(lease_id)
            self.wait(min(0.25, end_s - self.now_s), beating=("trainer", *self.workers))

    @property
    def workers(self) -> list[str]:
        workers = self.scheduler.fleet.workers.values()
        return [worker.id for worker in workers if worker.id != "trainer" and worker.epoch]

    @property
    def held(self) -> bool:
        """Whether the worker is there."""
        return any(self.scheduler.fleet.workers[worker].state is WorkerState.READY for worker in self.workers)

    def turn(self) -> float:
        """A request, which is ended as soon as it has begun; returns how long that took."""
        began_s = self.now_s
        self.request(f"0/{self.asked}/0")
        self.asked += 1
        begun = self.sent(c.StartTurn)
        while not begun:
            assert self.now_s < began_s + 4 * self.READY_S
            self.quiet(0.25)
            begun = [turn for turn in self.scheduler.turns.live.values() if turn.worker]
        (turn,) = self.scheduler.turns.live.values()
        self.tell(e.TurnCut(turn=turn.id, kept=0))
        return self.now_s - began_s


@pytest.mark.parametrize("holding", [False, True])
def test_leases_go_back_without_requests_and_are_asked_for_with_the_first(holding: bool) -> None:
    run = Lulls(holding=holding, idle_s=20)
    run.turn()
    run.quiet(19)
    assert run.held
    run.quiet(2)
    assert not run.held
    run.quiet(40)
    assert not run.held, "nobody asks for anything"
    assert run.turn() >= run.READY_S
    assert run.held


def test_between_a_last_answer_and_the_next_request_leases_go_back_as_such_gaps_have_taken() -> None:
    run = Lulls(holding=True, idle_s=120)
    run.turn()
    for gap_s in (0.5, 3.0, 40.0, 3.5):
        run.quiet(gap_s)
        assert run.held, "nobody has seen that it takes so long, or it would be too long until it is ready again"
        assert run.turn() == 0
    run.quiet(3.5)
    assert run.held
    run.quiet(1.0)
    assert not run.held, "it is a long gap"
    run.quiet(30.0)
    assert not run.held
    run.quiet(6.0)
    assert run.held
    assert run.turn() == 0, "it was there in time"
    run.quiet(80.0)
    assert run.held, "nobody has seen a gap that takes so long"
    run.quiet(41.0)
    assert not run.held


class Peer(Monkey):
    """A trainer elsewhere: requests, offers, pauses and aborts, while anything happens to workers and the importer."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        plan = Plan(group_size=2, idle_ns=(seed % 2) * NS_PER_S, **PLAN)
        self.settings = WorldSettings(plan=plan, holding=seed % 3 == 0, seeding_ns=0)
        self.scheduler = Scheduler(plan, SMALL_LIMITS, policies(self.settings), 0)
        self.asked = self.looks = 0
        self.floors: dict[str, int] = {}
        """By turn that is not over, the version that had been answered as it was requested."""
        self.answered = 0
        self.waiting: list[str] = []
        """Looks of offers that were not answered."""
        self.served: list[tuple[int, str]] = []
        self.log: list[tuple[int, e.Event]] = []
        self.over = 0

    def tell(self, event: e.Event) -> None:
        self.log.append((self.now_ns, event))
        if isinstance(event, e.TurnRequested) and event.turn not in self.floors:
            self.floors[event.turn] = self.answered
        if isinstance(event, e.VersionOffered):
            self.waiting.append(event.look)
        known = len(self.orders)
        super().tell(event)
        for order in self.orders[known:]:
            match order:
                case c.AcceptTokens():
                    assert isinstance(event, e.TokensReceived)
                    names = order.names(len(event.chunks))
                    for turn, (_, _, count, version) in zip(names, event.chunks.plain, strict=True):
                        assert not (turn and count) or version >= self.floors[turn], "older than was answered"
                case c.AnswerOffer():
                    assert order.look in self.waiting, "nobody asked, or was answered before"
                    self.waiting = [look for look in self.waiting if look != order.look]
                    if not order.refused:
                        assert order.version >= self.answered
                        self.answered = order.version
                        self.served.append((order.version, order.look))
                case c.FinishTurn() | c.FailTurn():
                    self.floors.pop(order.turn)
                    self.over += 1
                case c.CancelTrajectory():
                    self.floors.pop(f"{order.trajectory}/0", None)
                case _:
                    pass
        if self.scheduler.phase is Phase.RUNNING:
            assert self.floors.keys() == self.scheduler.turns.live.keys(), "no request is lost"

    def everyday(self) -> None:
        super().everyday()
        for _ in range(self.rng.randint(0, 2)):
            self.asked += 1
            trajectory = f"{self.scheduler.version or 0}/{self.asked}/0"
            self.tell(self.request(f"{trajectory}/0", trajectory))
        choice = self.rng.random()
        if choice < 0.3:
            self.looks += self.rng.random() < 0.8
            self.offer(f"look {self.looks}")
        elif choice < 0.4:
            self.tell(e.TurnsHeld(held=self.rng.random() < 0.4))
        elif choice < 0.45:
            for turn in list(self.scheduler.turns.live.values()):
                self.tell(e.TurnCut(turn=turn.id, kept=turn.accepted, aborted=True))

    def offer(self, look: str) -> None:
        self.tell(e.VersionOffered(source=f"at {look}", look=look, label=look))

    def answer(self, order: c.Command) -> None:
        trainer = self.scheduler.trainer()
        if not isinstance(order, c.UpdateWeights) or trainer is None:
            super().answer(order)
            return
        worker, epoch, choice = trainer.id, trainer.epoch, self.rng.random()
        if choice < 0.7:
            self.tell(e.WeightsPublished(worker=worker, epoch=epoch, version=order.version))
        elif choice < 0.9:
            self.tell(e.VersionRefused(worker=worker, epoch=epoch, version=order.version, reason="odd"))
        else:
            self.tell(e.TrainerFailed(worker=worker, epoch=epoch, error="it broke"))

    def anything(self) -> e.Event:
        """Nobody stops the run, and requests are the peer's alone."""
        while isinstance(event := super().anything(), e.StopRequested | e.TurnRequested):
            pass
        return event


def peers(count: int) -> Iterator[Peer]:
    for seed in range(count):
        peer = Peer(seed)
        peer.run()
        yield peer


def test_whatever_happens_no_request_is_lost_and_none_is_of_an_older_version_than_was_answered() -> None:
    """Eight worlds of peers, so that enough requests and versions have met."""
    served = over = 0
    for peer in peers(8):
        served += len(peer.served)
        over += peer.over
    assert served > 15
    assert over > 60


def test_a_replay_and_a_saved_state_lead_to_the_same() -> None:
    for peer in peers(2):
        fresh = Scheduler(peer.settings.plan, SMALL_LIMITS, policies(peer.settings), 0)
        for now_ns, event in peer.log:
            fresh.handle(event, now_ns)
        assert digest(fresh) == digest(peer.scheduler)
        restored = Scheduler(peer.settings.plan, SMALL_LIMITS, policies(peer.settings), 0)
        restore(restored, save(peer.scheduler))
        check(restored)
        assert digest(restored) == digest(peer.scheduler)


def asked(core: CoreHarness, number: int, *marks: str) -> str:
    """The worker that is given a request with these marks, and has begun with it."""
    trajectory = f"0/{number}/0"
    core.tell(
        e.TurnRequested(
            turn=f"{trajectory}/0", trajectory=trajectory, prompt_tokens=64, max_new_tokens=8, marks=tuple(marks)
        )
    )
    begun = core.one(c.StartTurn)
    core.tokens(begun, 1)
    return begun.worker


def test_requests_with_a_mark_in_common_come_to_one_worker_while_it_has_its_share() -> None:
    core = with_importer(CoreHarness(seeding=FixedWindow(0), routing=AffinityRouting(hardware=False), **PLAN))
    for _ in range(4):
        core.worker(capacity=8)
    first = asked(core, 0, "session a", "prefix")
    other = asked(core, 1, "session b")
    assert other != first
    assert asked(core, 2, "session a") == first
    assert asked(core, 3, "session b", "prefix") == other, "the strongest mark counts"
    assert asked(core, 4, "unknown", "prefix") == other, "of one mark the last request counts"
    given = [asked(core, number, "session a") for number in range(5, 15)]
    assert given[0] == first
    assert given[-1] != first, "others come first where it has too much"
    check(core.scheduler)


def test_affinity_ends_with_its_worker_and_what_is_known_is_bounded(core: CoreHarness) -> None:
    core.worker(capacity=8)
    first = asked(core, 0, "a")
    core.tell(e.LeaseEnded(lease=core.scheduler.fleet.workers[first].lease, cause=EndCause.LOST))
    second = core.worker(capacity=8)
    assert core.scheduler.turns.live["0/0/0/0"].worker == second
    affinity = Affinity()
    for number in range(2 * MARKS_KEPT):
        affinity.asked(f"{number}", (f"mark {number}",))
        affinity.began(f"{number}", "worker")
        affinity.over(f"{number}")
    last, lost = (f"mark {number}" for number in (2 * MARKS_KEPT - 1, MARKS_KEPT - 1))
    assert (affinity.asked("x", (last,)), affinity.asked("y", (lost,))) == ("worker", None)
