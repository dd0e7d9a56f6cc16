"""`Run` with light ports: what the core commands is done in order, late clocks blame nobody, and an end is an end."""

import errno
import os
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.compose.scheduling import limits, policies
from elastic.config import Config
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, Chunks, Offer, Plan, PolicyFault, WorkerRole
from elastic.runtime.ports import Ports
from elastic.runtime.run import LATE_WAKEUP_NS, LATE_WAKEUPS_MAX, Alarm, Run

MS = NS_PER_S // 1000


class ManualClock:
    """Time is what the test says. Timers ring in `ring`, as late as the test likes."""

    def __init__(self) -> None:
        self.time_ns = self.suspended_ns = 0
        self.timers: list[tuple[int, Callable[[], None]]] = []

    def now_ns(self) -> int:
        return self.time_ns

    def slept_ns(self) -> int:
        return self.suspended_ns

    def at(self, when_ns: int, action: Callable[[], None]) -> None:
        self.timers.append((max(when_ns, self.time_ns), action))

    def ring(self, at_ns: int) -> int:
        """It is `at_ns` now, and whatever is due rings; how many did."""
        self.time_ns = at_ns
        due = [timer for timer in self.timers if timer[0] <= at_ns]
        self.timers = [timer for timer in self.timers if timer[0] > at_ns]
        for _, action in due:
            action()
        return len(due)


class Scripted:
    """A core that answers events as it was told to, and wants to be woken at `wakeup_ns`."""

    def __init__(self) -> None:
        self.answers: dict[type[e.Event], list[c.Command]] = {}
        self.heard: list[tuple[int, e.Event]] = []
        self.wakeup_ns: int | None = None
        self.failed = ""
        self.turns = SimpleNamespace(live={})

    def handle(self, event: e.Event, now_ns: int) -> list[c.Command]:
        self.heard.append((now_ns, event))
        if self.wakeup_ns is not None and self.wakeup_ns <= now_ns:
            self.wakeup_ns = None
        return self.answers.get(type(event), [])

    def next_wakeup_ns(self) -> int | None:
        return self.wakeup_ns


class Recorder:
    """Every port but the clock and the journal: notes each call by its name."""

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self._log = log
        self.failures: dict[str, Exception] = {}
        """What calls of these names raise."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name in self.failures:
                raise self.failures[name]
            self._log.append((name, *arguments))
            return self.result(name, *arguments)

        return call

    def result(self, name: str, *arguments: Any) -> Any:
        return {"prompt": "its prompt", "take": "its batch", "finished": "its tokens", "drop": 7}.get(name)


class World:
    """A run of a scripted core. `log` has the calls of its ports, the journal's among them."""

    def __init__(self, scheduler: Any = None) -> None:
        self.clock = ManualClock()
        self.core = Scripted()
        self.log: list[tuple[Any, ...]] = []
        self.errors: list[Exception] = []
        self.awaited: list[Callable[[], None]] = []
        self.run = Run(scheduler or self.core, self._connect)

    def _connect(self, run: Run) -> Ports:
        recorder: Any = Recorder(self.log)
        self.ports = recorder
        return Ports(
            clock=self.clock,
            journal=self,
            workers=recorder,
            leases=recorder,
            trajectories=recorder,
            rewards=recorder,
            trainer=recorder,
            owner=self,
        )

    def record(self, now_ns: int, event: e.Event, payload: Any, commands: Sequence[c.Command]) -> None:
        self.log.append(("record", now_ns, event))

    def recalled(self, now_ns: int, event: e.Event, commands: Sequence[c.Command]) -> None:
        self.log.append(("recalled", now_ns, event))

    def durable(self, then: Callable[[], None]) -> None:
        self.log.append(("durable",))
        self.awaited.append(then)

    def commit(self) -> None:
        """What was recorded so far is durable now."""
        while self.awaited:
            self.awaited.pop(0)()

    def ended(self) -> None:
        self.log.append(("ended",))

    def broken(self, event: e.Event | None, error: Exception) -> None:
        self.errors.append(error)

    def called(self) -> list[tuple[Any, ...]]:
        """The calls, but for the journal's."""
        return [call for call in self.log if call[0] != "record"]


JOINED = e.WorkerSlept(worker="w", epoch=1)
BEAT = e.WorkerAwoke(worker="w", epoch=1)


def test_an_event_is_recorded_before_anything_comes_of_it() -> None:
    world = World()
    world.core.answers = {e.WorkerAwoke: [c.FinishTurn(turn="t")]}
    world.run.feed(BEAT)
    assert world.log == [("record", 0, BEAT), ("finish_turn", "t")]


def test_an_event_that_breaks_the_core_is_recorded() -> None:
    world = World()
    world.core.handle = lambda event, now_ns: 1 / 0  # type: ignore[assignment]
    world.run.feed(BEAT)
    assert world.log[0] == ("record", 0, BEAT)


def test_commands_are_carried_out_in_order_and_what_comes_of_them_is_heard_after_them() -> None:
    world = World()
    fence, abort = c.FenceWorker(worker="w", reason="late"), c.AbortTurn(worker="v", epoch=1, turn="t", attempt=1)
    world.core.answers = {e.WorkerSlept: [fence, abort], e.WorkerAwoke: [c.FinishTurn(turn="t")]}

    def fence_worker(worker: str, reason: str) -> None:
        world.log.append(("fence", worker))
        world.run.feed(BEAT)

    world.ports.__dict__["fence"] = fence_worker
    world.run.feed(JOINED)
    assert world.errors == []
    assert world.called() == [("fence", "w"), ("order", abort), ("finish_turn", "t")]


def test_a_payload_goes_from_its_event_to_whom_the_accepted_chunks_belong() -> None:
    world = World()
    frame = e.TokensReceived(worker="w", epoch=1, chunks=Chunks.of([]))
    accepted = c.AcceptTokens(chunks=(0, 2), turns=("a", "b"))
    world.core.answers = {e.TokensReceived: [accepted]}
    world.run.feed(frame, "the chunks")
    assert world.called() == [("accept", frame, accepted, "the chunks")]


TRAIN = c.TrainGroup(group="0/0", trajectories=("0/0/0",), step=0, slot=0)
SCORE = c.ScoreTrajectory(trajectory="0/0/1", attempt=1)
SKIP = c.DropGroup(group="0/1", trajectories=("0/1/0",), step=0, slot=1, reason="stale")
UPDATE = c.UpdateWeights(step=0, version=1)
RELEASE = c.ReleaseLease(lease="spot-1", provider="spot", reason="its time is over")
FINAL: dict[c.Command, tuple[Any, ...]] = {
    RELEASE: ("release", "spot-1", "spot", "its time is over"),
    TRAIN: ("train", TRAIN, "its batch"),
    SKIP: ("skip", SKIP, 7),
    SCORE: ("score", SCORE, "its tokens"),
    UPDATE: ("update", UPDATE),
}
"""What cannot be taken back, and the call that does it."""


def test_what_cannot_be_taken_back_is_done_in_order_once_it_is_durable() -> None:
    world = World()
    fence = c.FenceWorker(worker="w", reason="late")
    world.core.answers = {e.WorkerAwoke: [*FINAL, fence]}
    world.run.feed(BEAT)
    done = [call for call in world.called() if call in (*FINAL.values(), ("fence", "w", "late"))]
    assert done == [("fence", "w", "late")], "what can be taken back does not wait"
    assert ("take", TRAIN.trajectories) not in world.log, "it may have to be read from the journal"
    world.commit()
    assert [call for call in world.called() if call in FINAL.values()] == list(FINAL.values())


@pytest.mark.parametrize("command", FINAL)
def test_what_was_not_durable_when_the_run_was_closed_is_not_done(command: c.Command) -> None:
    world = World()
    world.core.answers = {e.WorkerAwoke: [command]}
    world.run.feed(BEAT)
    world.run.close()
    world.commit()
    assert FINAL[command] not in world.log


@pytest.mark.parametrize("slot", [None, 3])
def test_a_dropped_group_leaves_its_slot_empty_if_it_has_one(slot: int | None) -> None:
    world = World()
    drop = c.DropGroup(group="0/0", trajectories=("0/0/0",), step=0, slot=slot, reason="stale")
    world.core.answers = {e.WorkerAwoke: [drop]}
    world.run.feed(BEAT)
    world.commit()
    calls = [call for call in world.called() if call[0] not in ("durable", "remember")]
    assert calls == [("drop", ("0/0/0",)), ("skip", drop, 7)][: 2 if slot is not None else 1]


@pytest.mark.parametrize("stands", [True, False])
def test_a_turn_goes_to_its_worker_once_its_environment_is_there(monkeypatch: pytest.MonkeyPatch, stands: bool) -> None:
    world = World()
    start = c.StartTurn(worker="w", epoch=1, turn="t", attempt=1, slot=0, start=0)
    world.core.answers = {e.WorkerAwoke: [start]}
    with monkeypatch.context() as nobody:
        nobody.setattr(Recorder, "result", lambda *_: None)
        world.run.feed(BEAT)
    assert world.called() == [("prompt", "t")]
    world.core.turns.live["t"] = SimpleNamespace(worker="w", attempt=1 if stands else 2)
    world.run.prompted("t")
    world.run.prompted("t")
    assert world.called()[1:] == [("prompt", "t"), ("start_turn", start, "its prompt")] * stands


# From one incarnation to the next


def test_what_is_recalled_is_remembered_and_not_done() -> None:
    world = World()
    frame = e.TokensReceived(worker="w", epoch=1, chunks=Chunks.of([]))
    accepted = c.AcceptTokens(chunks=(0,), turns=("a",))
    group = c.StartGroup(group="0/0", step=0, index=0, trajectories=("0/0/0",))
    world.core.answers = {e.TokensReceived: [accepted, *FINAL, group]}
    world.run.recall(5, frame, "the chunks")
    world.commit()
    assert world.core.heard == [(5, frame)]
    assert {call[0] for call in world.log} == {"recalled", "remember", "accept"}
    assert ("accept", frame, accepted, "the chunks") in world.log
    for order in (TRAIN, SKIP, UPDATE):
        assert ("remember", order) in world.log, "the trainer's port knows its orders"
    assert ("recalled", frame, group) in world.log


# The clock


def test_the_core_is_woken_when_it_asked_to_be() -> None:
    world = World()
    world.core.wakeup_ns = 100 * MS
    world.run.feed(BEAT)
    world.core.wakeup_ns = 300 * MS  # put off by a later event
    world.run.feed(BEAT)
    assert world.clock.ring(100 * MS) == 1
    assert not any(isinstance(event, e.Tick) for _, event in world.core.heard)
    world.clock.ring(300 * MS)
    assert world.core.heard[-1] == (300 * MS, e.Tick())


def test_an_earlier_deadline_takes_the_place_of_a_later_one() -> None:
    world = World()
    world.core.wakeup_ns = 300 * MS
    world.run.feed(BEAT)
    world.core.wakeup_ns = 100 * MS
    world.run.feed(BEAT)
    world.clock.ring(100 * MS)
    assert world.core.heard[-1] == (100 * MS, e.Tick())
    assert world.clock.ring(300 * MS) == 1
    assert len(world.core.heard) == 3, "the later one is superseded"


def test_the_core_is_told_first_that_its_machine_slept() -> None:
    world = World()
    world.core.wakeup_ns = 100 * MS
    world.run.feed(BEAT)
    world.clock.time_ns, world.clock.suspended_ns = 5000 * MS, 4950 * MS
    world.core.wakeup_ns = 5050 * MS
    world.run.feed(BEAT)
    assert world.core.heard[-2:] == [(5000 * MS, e.Suspended(for_ns=4950 * MS)), (5000 * MS, BEAT)]
    world.clock.ring(5050 * MS)
    assert world.core.heard[-1] == (5050 * MS, e.Tick())


def test_what_is_heard_late_counts_as_heard_before_the_deadline_that_has_passed() -> None:
    """The process was held up past a deadline; the heartbeat that it now finds in its socket had come in time."""
    world = World()
    world.core.wakeup_ns = 100 * MS
    world.run.feed(BEAT)
    world.clock.time_ns = 900 * MS
    world.run.feed(BEAT)
    assert world.core.heard[-1] == (100 * MS - 1, BEAT)
    world.core.wakeup_ns = 2000 * MS
    world.run.feed(BEAT)
    world.run.feed(BEAT)
    assert world.core.heard[-1] == (900 * MS, BEAT), "no deadline is left that has passed"


def test_a_late_wake_up_reads_first() -> None:
    world = World()
    world.core.wakeup_ns = 100 * MS
    world.run.feed(BEAT)
    late_ns = 100 * MS + LATE_WAKEUP_NS + 1
    world.clock.ring(late_ns)
    assert len(world.core.heard) == 1, "sockets are read before the deadline passes"
    world.clock.ring(late_ns + LATE_WAKEUP_NS // 2)
    assert world.core.heard[-1] == (late_ns + LATE_WAKEUP_NS // 2, e.Tick())


def test_a_deadline_that_was_put_off_while_the_process_was_late_does_not_pass() -> None:
    world = World()
    world.core.wakeup_ns = 100 * MS
    world.run.feed(BEAT)
    world.clock.ring(900 * MS)
    world.core.wakeup_ns = 5000 * MS
    world.run.feed(BEAT)
    world.clock.ring(900 * MS + LATE_WAKEUP_NS)
    assert all(event == BEAT for _, event in world.core.heard)
    world.clock.ring(5000 * MS)
    assert world.core.heard[-1] == (5000 * MS, e.Tick())


def test_a_process_that_is_always_late_is_overloaded_and_deadlines_pass() -> None:
    world = World()
    world.core.wakeup_ns = 100 * MS
    world.run.feed(BEAT)
    rings = 0
    while len(world.core.heard) == 1:
        rings += world.clock.ring(world.clock.time_ns + NS_PER_S)
    assert rings == LATE_WAKEUPS_MAX + 1


def ticks(world: World) -> int:
    return sum(isinstance(event, e.Tick) for _, event in world.core.heard)


@pytest.mark.parametrize("meanwhile", [False, True], ids=["of before", "that comes meanwhile"])
def test_no_deadline_passes_while_a_run_is_held(meanwhile: bool) -> None:
    """However long, and though each of its wake-ups was on time."""
    world = World()
    world.core.wakeup_ns = 100 * MS
    if not meanwhile:
        world.run.feed(BEAT)
    world.run.hold(True)
    if meanwhile:
        world.run.feed(BEAT)
    for at_ms in range(100, 3000, 5):
        world.clock.ring(at_ms * MS)
    assert ticks(world) == 0
    world.run.hold(False)
    world.clock.ring(3000 * MS + LATE_WAKEUP_NS // 2)
    assert ticks(world) == 0, "sockets are read before the deadline passes"
    world.clock.ring(3000 * MS + LATE_WAKEUP_NS)
    assert ticks(world) == 1


def test_what_was_said_while_a_run_was_held_puts_its_deadline_off() -> None:
    world = World()
    world.core.wakeup_ns = 100 * MS
    world.run.feed(BEAT)
    world.run.hold(True)
    for at_ms in range(100, 3000, 5):
        world.clock.ring(at_ms * MS)
    world.run.hold(False)
    world.core.wakeup_ns = 5000 * MS
    world.run.feed(BEAT)
    assert world.core.heard[-1] == (100 * MS - 1, BEAT), "it counts as heard in time"
    for at_ms in range(3000, 5000, 5):
        world.clock.ring(at_ms * MS)
    assert ticks(world) == 0
    for at_ms in range(5000, 6000, 5):
        world.clock.ring(at_ms * MS)
    assert ticks(world) == 1, "once the core's time has made up for the hold"


def test_an_alarm_for_a_time_that_has_passed_is_not_late_by_that() -> None:
    clock, woken = ManualClock(), list[int]()
    clock.time_ns = 10 * NS_PER_S
    alarm = Alarm(clock, lambda: NS_PER_S, lambda: woken.append(clock.time_ns))
    alarm.arm()
    clock.ring(10 * NS_PER_S)
    assert woken == [10 * NS_PER_S]


# Ends


def test_a_core_that_breaks_ends_the_run_with_its_cause() -> None:
    world = World()
    world.core.answers = {e.WorkerAwoke: [c.FinishTurn(turn="t"), c.FinishTurn(turn="u")]}
    world.ports.failures["finish_turn"] = ZeroDivisionError("division by zero")
    world.run.feed(BEAT)
    assert world.run.failed == "internal error: ZeroDivisionError: division by zero"
    assert [type(error) for error in world.errors] == [ZeroDivisionError]
    assert world.called() == [("ended",)]
    world.core.answers = {e.WorkerAwoke: [c.AbortTurn(worker="v", epoch=1, turn="t", attempt=1)]}
    world.run.feed(BEAT)
    assert world.called() == [("ended",)], "nothing more is carried out"


def test_a_policy_that_breaks_ends_the_run_with_what_it_did() -> None:
    world = World()
    world.core.answers = {e.WorkerAwoke: [c.FinishTurn(turn="t")]}
    world.ports.failures["finish_turn"] = PolicyFault("routing.last of the package theirs 1: route returned 'w'")
    world.run.feed(BEAT)
    assert world.run.failed == "routing.last of the package theirs 1: route returned 'w'"
    assert world.called() == [("ended",)]


@pytest.mark.parametrize(
    ("code", "says"), [(errno.EMFILE, "no file descriptor was left.*ulimit -n"), (errno.ENOSPC, "make room")]
)
def test_a_run_without_means_to_read_its_journal_says_which(code: int, says: str) -> None:
    """It is no internal error: once there are more it can be resumed."""
    world = World()
    world.core.answers = {e.WorkerAwoke: [c.FinishTurn(turn="t")]}
    world.ports.failures["finish_turn"] = OSError(code, os.strerror(code), "/runs/r/journal.sqlite")
    world.run.feed(BEAT)
    assert re.search(f"/runs/r/journal.sqlite could not be read.*{says}", world.run.failed)
    assert not world.errors
    assert world.called() == [("ended",)]


def test_a_broken_run_raises_where_its_owner_wants_it_to() -> None:
    class Raising(World):
        def broken(self, event: e.Event | None, error: Exception) -> None:
            raise error

    world = Raising()
    world.core.answers = {e.WorkerAwoke: [c.FinishTurn(turn="t")]}
    world.ports.failures["finish_turn"] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        world.run.feed(BEAT)


def test_a_closed_run_is_told_but_does_nothing_any_more() -> None:
    world = World()
    world.core.wakeup_ns = 100 * MS
    world.core.answers = {e.WorkerAwoke: [c.FinishTurn(turn="t")]}
    world.run.feed(JOINED)
    world.run.close()
    world.run.feed(BEAT)
    world.clock.ring(100 * MS)
    assert [event for _, event in world.core.heard] == [JOINED, BEAT]
    assert world.called() == []
    assert world.log[-1] == ("record", 0, BEAT)


def test_the_end_has_the_cores_cause_and_a_kill_its_own() -> None:
    world = World()
    world.core.answers = {e.StopRequested: [c.EndRun(failed="asked to")]}
    world.run.stop("asked to")
    assert (world.run.failed, world.called()) == ("asked to", [("ended",)])
    killed = World()
    killed.run.kill("interrupted")
    assert (killed.run.failed, killed.called()) == ("interrupted", [("ended",)])
    ending = World()
    ending.core.failed = "no capacity"
    ending.run.kill("interrupted")
    assert ending.run.failed == "no capacity"


def test_a_lease_is_asked_for_once_that_is_durable_with_as_many_workers_as_were_offered() -> None:
    config = Config.model_validate({"model": {"checkpoint": "."}})
    plan = Plan(steps=1, groups=1, group_size=2)
    world = World(Scheduler(plan, limits(config), policies(config), 0))
    offer = Offer(provider="trainer", role=WorkerRole.TRAINER, available=1, usd_per_gpu_hour=1.0, workers_per_lease=2)
    world.run.feed(e.OfferChanged(offer=offer))
    assert world.called() == [("durable",)]
    world.commit()
    assert world.called() == [("durable",), ("acquire", "trainer-1", "trainer", 2)]
