"""The trainer's device goes and comes back, at any event of a run: nothing is lost, nothing is trained twice."""

import heapq
import itertools
from collections.abc import Callable, Iterable
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.invariants import check
from elastic.core.scheduler import Phase, Scheduler, TrainerMode
from elastic.core.types import (
    NS_PER_S,
    Account,
    Capabilities,
    Chunk,
    Chunks,
    EndCause,
    FinishReason,
    GroupState,
    Offer,
    Plan,
    WorkerRole,
    WorkerState,
)
from elastic.testing.faults.core.incarnation import policies
from elastic.testing.faults.core.settings import MS, SMALL_LIMITS, WorldSettings
from tests.core.conftest import CoreHarness
from tests.seeds import examples

CAPABILITIES = Capabilities(engine="test", replayable_sampling=True, max_context_tokens=64, device="none")
LONGEST_S = 600
TOKENS = 4
Order = c.TrainGroup | c.UpdateWeights


class Process:
    """A worker's process. The trainer's has learnt `done` orders, each once, however often it was told."""

    def __init__(self, worker: str, version: int | None, done: Iterable[Order] = ()) -> None:
        self.worker = worker
        self.version = version
        self.done = list(done)
        self.epoch = 0
        self.connected = False
        self.alive = True


class Play:
    """A run in which everybody does as told, but for the trainer's device, which is `taken` away at some events."""

    def __init__(self, bound: int, helpers: int, taken: dict[int, str], seed: int = 0) -> None:
        plan = Plan(steps=3, groups=2, group_size=2, staleness_bound=bound)
        self.settings = WorldSettings(plan=plan)
        self.scheduler = self.fresh()
        self.rng = Random(seed)
        self.taken = taken
        self.helpers = helpers
        self.now_ns = 0
        self.log: list[tuple[int, e.Event]] = []
        self.orders: list[Order] = []
        self.trained: list[str] = []
        self.dropped: dict[str, str] = {}
        self.published: list[int] = []
        self.modes: set[str] = set()
        self.ended: str | None = None
        self.processes: dict[str, Process] = {}
        self._held: dict[str, str] = {}
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._sequence = 0

    def fresh(self) -> Scheduler:
        return Scheduler(self.settings.plan, SMALL_LIMITS, policies(self.settings), 0)

    def after(self, ms: int, action: Callable[[], object]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_ns + ms * MS, self._sequence, action))

    def run(self) -> "Play":
        for provider, role in (("trainer", WorkerRole.TRAINER), ("spot", WorkerRole.ELASTIC)):
            available = self.helpers if provider == "spot" else 1
            offer = Offer(provider=provider, role=role, available=available, usd_per_gpu_hour=1)
            self.tell(e.OfferChanged(offer=offer))
        while self.ended is None:
            due_ns = self.scheduler.next_wakeup_ns()
            if self._heap and (due_ns is None or self._heap[0][0] <= due_ns):
                self.now_ns, _, action = heapq.heappop(self._heap)
                action()
            else:
                assert due_ns is not None
                self.now_ns = max(self.now_ns, due_ns)
                self.tell(e.Tick())
            assert self.now_ns < LONGEST_S * NS_PER_S, [wait[:2] for wait in self.scheduler.timers.waits()]
        return self

    def tell(self, event: e.Event) -> None:
        if self.ended is not None:
            return
        before = self.scheduler.trainer_order
        self.log.append((self.now_ns, event))
        commands = self.scheduler.handle(event, self.now_ns)
        check(self.scheduler)
        self._note(event, before)
        for command in commands:
            self.obey(command)
        way = self.taken.get(len(self.log))
        if way is not None:
            self.modes.add(self.scheduler.trainer_mode)
            self.after(0, getattr(self, way))

    def _note(self, event: e.Event, before: Order | None) -> None:
        """What has been done is what it was told to do, and the core has heard of it."""
        if before is not None and self.scheduler.trainer_order is not before:
            if isinstance(event, e.GroupTrained):
                self.trained.append(event.group)
            elif isinstance(event, e.WeightsPublished):
                self.published.append(event.version)

    # Everybody does as told

    def obey(self, command: c.Command) -> None:
        worker = self.processes.get(getattr(command, "worker", ""))
        match command:
            case c.AcquireLease():
                self.after(100, lambda: self._grant(command))
            case c.ReleaseLease():
                self.after(50, lambda: self._end_lease(command.lease, EndCause.RELEASED))
            case c.StartGroup():
                for trajectory in command.trajectories:
                    self.after(self.rng.randint(1, 400), lambda t=trajectory: self._request(t))
            case c.FinishTurn():
                trajectory = command.turn.partition("#")[0]
                reward = float(trajectory.endswith("/1"))
                self.after(1, lambda: self.tell(e.TrajectoryFinished(trajectory=trajectory, reward=reward, tokens=1)))
            case c.TrainGroup() | c.UpdateWeights():
                self._order(command)
            case c.DropGroup():
                self.dropped[command.group] = command.reason
            case c.EndRun():
                self.ended = command.failed
            case c.FenceWorker():
                if worker is not None:
                    worker.alive = worker.connected = False
            case _:
                if worker is not None:
                    self._answer_later(worker, command)

    def _answer_later(self, worker: Process, command: c.Command) -> None:
        epoch = worker.epoch

        def answer() -> None:
            if worker.alive and worker.connected and worker.epoch == epoch:
                self._answer(worker, command)

        self.after(self.rng.randint(20, 200), answer)

    def _answer(self, worker: Process, command: c.Command) -> None:
        who, epoch = worker.worker, worker.epoch
        match command:
            case c.StartTurn():
                count = max(0, TOKENS - command.start)
                version = worker.version or 0
                chunk = Chunk(command.slot, command.start, count, version, FinishReason.STOP)
                self.tell(e.TokensReceived(worker=who, epoch=epoch, chunks=Chunks.of([chunk])))
            case c.AbortTurn():
                turn = self.scheduler.turns.live.get(command.turn)
                chunk = Chunk(9 if turn is None else turn.slot, 0, 0, 0, FinishReason.ABORTED)
                self.tell(e.TokensReceived(worker=who, epoch=epoch, chunks=Chunks.of([chunk])))
            case c.LoadWeights():
                worker.version = command.version
                self.tell(e.WeightsApplied(worker=who, epoch=epoch, version=command.version))
            case c.SleepWorker():
                self.tell(e.WorkerSlept(worker=who, epoch=epoch))
            case c.WakeWorker():
                self.tell(e.WorkerAwoke(worker=who, epoch=epoch))
            case c.DrainWorker():
                worker.alive = worker.connected = False
                self.tell(e.WorkerDisconnected(worker=who, epoch=epoch, goodbye=True))
            case _:
                pass

    def _grant(self, command: c.AcquireLease) -> None:
        if command.lease in self._held:
            return
        who = self._held[command.lease] = f"{command.lease}/w"
        trains = command.provider == "trainer"
        # What another process has to catch up with is what its predecessors were told, and have said that they did.
        orders = self._settled_orders() if trains else []
        process = self.processes[who] = Process(who, self._version_of(orders) if trains else None, orders)
        self.tell(e.LeaseGranted(lease=command.lease, workers=(who,)))
        self.after(self.rng.randint(100, 600), lambda: self.join(process))
        self._beat(process)

    def _settled_orders(self) -> list[Order]:
        outstanding = self.scheduler.trainer_order
        return [order for order in dict.fromkeys(self.orders) if order != outstanding]

    def _version_of(self, orders: list[Order]) -> int:
        return sum(isinstance(order, c.UpdateWeights) for order in orders)

    def join(self, process: Process) -> None:
        if not process.alive:
            return
        process.epoch, process.connected = process.epoch + 1, True
        self.tell(
            e.WorkerJoined(
                worker=process.worker,
                epoch=process.epoch,
                capabilities=CAPABILITIES,
                weights_version=process.version,
            )
        )
        self._report(process)

    def _beat(self, process: Process) -> None:
        self._report(process)
        if process.alive:
            self.after(500, lambda: self._beat(process))

    def _report(self, process: Process) -> None:
        if process.connected and process.alive:
            self.tell(
                e.WorkerReported(
                    worker=process.worker,
                    epoch=process.epoch,
                    capacity_turns=2,
                    pending=0,
                    executing=0,
                    progress=0,
                    accounts_ns={Account.IDLE: self.now_ns},
                    decoded_tokens=0,
                )
            )

    def _end_lease(self, lease: str, cause: EndCause) -> None:
        worker = self._held.pop(lease, None)
        if worker is not None:
            process = self.processes[worker]
            process.alive = process.connected = False
            self.tell(e.LeaseEnded(lease=lease, cause=cause))

    def _request(self, trajectory: str) -> None:
        turn = f"{trajectory}#0"
        self.tell(e.TurnRequested(turn=turn, trajectory=trajectory, prompt_tokens=5, max_new_tokens=TOKENS))

    def _order(self, order: Order) -> None:
        """An order is another one than the last only if that has been done."""
        if self.orders and self.orders[-1] != order:
            last = self.orders[-1]
            done = last.group in self.trained if isinstance(last, c.TrainGroup) else last.version in self.published
            assert done, f"{order} after {last}, which was never done"
        self.orders.append(order)
        trainer = self.scheduler.trainer()
        assert trainer is not None
        assert trainer.state is WorkerState.ASLEEP
        process = self.processes[trainer.id]
        self.after(self.rng.randint(50, 400), lambda: self._carry_out(process, order))

    def _carry_out(self, process: Process, order: Order) -> None:
        if not process.alive:
            return
        if order not in process.done:
            process.done.append(order)
        if isinstance(order, c.TrainGroup):
            answer: e.Event = e.GroupTrained(worker=process.worker, epoch=process.epoch, group=order.group)
        else:
            process.version = order.version
            answer = e.WeightsPublished(worker=process.worker, epoch=process.epoch, version=order.version)
        if process.connected:
            self.tell(answer)

    # Ways in which the trainer's device goes

    @property
    def process(self) -> Process | None:
        trainer = self.scheduler.trainer()
        process = self.processes.get(trainer.id) if trainer is not None else None
        return process if process is not None and process.connected else None

    def blip(self) -> None:
        """The connection is lost, and dialled again."""
        if (process := self.process) is not None:
            process.connected = False
            self.tell(e.WorkerDisconnected(worker=process.worker, epoch=process.epoch))
            self.after(self.rng.randint(1, 3000), lambda: self.join(process))

    def redial(self) -> None:
        """A new connection is there before the old one is seen to be broken."""
        if (process := self.process) is not None:
            self.join(process)

    def kill(self) -> None:
        self._end_lease(self._trainers_lease(), EndCause.LOST)

    def _trainers_lease(self) -> str:
        return next((lease for lease in self._held if lease.startswith("trainer")), "")

    def vanish(self) -> None:
        """Not a word more."""
        if (process := self.process) is not None:
            process.alive = process.connected = False

    def leave(self) -> None:
        if (process := self.process) is not None:
            process.alive = process.connected = False
            self.tell(e.WorkerDisconnected(worker=process.worker, epoch=process.epoch, goodbye=True))

    def notice(self) -> None:
        lease = self._trainers_lease()
        if self.process is None:
            return
        deadline_ns = self.now_ns + NS_PER_S
        self.tell(e.LeaseNotice(lease=lease, deadline_ns=deadline_ns, reason="maintenance"))
        self.after(1000, lambda: self._end_lease(lease, EndCause.PREEMPTED))

    def stop(self) -> None:
        self.tell(e.StopRequested(reason="asked to"))


BLIPS = ("blip", "redial")
LOSSES = ("kill", "vanish", "leave", "notice")


def ends_well(play: Play) -> None:
    """Every group was trained once or dropped for a reason, every version published once, in order."""
    assert play.ended == ""
    assert play.published == list(range(1, play.settings.plan.steps + 1))
    assert len(set(play.trained)) == len(play.trained)
    assert not set(play.trained) & set(play.dropped)
    assert len(play.trained) == play.settings.plan.steps * play.settings.plan.groups
    told = list(dict.fromkeys(play.orders))
    assert [order.group for order in told if isinstance(order, c.TrainGroup)] == play.trained
    last = [p for name, p in play.processes.items() if name.startswith("trainer")][-1]
    assert last.done == told
    replay = play.fresh()
    for now_ns, event in play.log:
        replay.handle(event, now_ns)
    assert digest(replay) == digest(play.scheduler)


@pytest.mark.parametrize(
    ("helpers", "bound"),
    [(0, 0), (2, 1), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((0, 1), (2, 0)))],
)
@pytest.mark.parametrize("way", [*BLIPS, *LOSSES])
def test_the_trainer_goes_at_any_event(way: str, helpers: int, bound: int) -> None:
    modes: set[str] = set()
    events = len(Play(bound, helpers, {}).run().log)
    for at in range(1, events, 18):
        play = Play(bound, helpers, {at: way}, seed=at).run()
        ends_well(play)
        modes |= play.modes
    assert modes >= {TrainerMode.AWAKE, TrainerMode.ASLEEP}


def test_it_goes_in_every_mode() -> None:
    """The trainer goes at each of many events, until each mode was met."""
    modes: set[str] = set()
    for at, bound in itertools.product(range(1, 120), (0, 1)):
        modes |= Play(bound, bound, {at: "blip"}).run().modes
        if modes == {*TrainerMode}:
            return
    pytest.fail(f"it went in {modes} alone")


@settings(max_examples=examples(7, 40), deadline=None)
@example(taken={44: "redial"}, lost={}, helpers=1, bound=1, seed=0)
@given(
    taken=st.dictionaries(st.integers(1, 300), st.sampled_from(BLIPS), max_size=12),
    lost=st.dictionaries(st.integers(1, 300), st.sampled_from(LOSSES), max_size=SMALL_LIMITS.trainer_restarts_max),
    helpers=st.integers(0, 2),
    bound=st.integers(0, 2),
    seed=st.integers(0, 9),
)
def test_the_trainer_goes_again_and_again(
    taken: dict[int, str], lost: dict[int, str], helpers: int, bound: int, seed: int
) -> None:
    ends_well(Play(bound, helpers, taken | lost, seed).run())


@settings(max_examples=examples(5, 25), deadline=None)
@given(at=st.integers(1, 200), way=st.sampled_from((*BLIPS, *LOSSES)), soon=st.integers(1, 8), bound=st.integers(0, 1))
def test_a_run_that_is_stopped_while_its_trainer_is_away_ends(at: int, way: str, soon: int, bound: int) -> None:
    play = Play(bound, 1, {at: way, at + soon: "stop"}).run()
    assert play.ended in ("", "asked to")
    assert not play.scheduler.leases.leases
    assert play.scheduler.ledger.imbalance_ns() == 0


@pytest.mark.parametrize("way", LOSSES)
def test_a_trainer_that_is_lost_too_often_fails_the_run_by_name(way: str) -> None:
    most = SMALL_LIMITS.trainer_restarts_max
    play = Play(0, 1, dict.fromkeys(range(40, 10_000, 7), way)).run()
    assert play.ended is not None
    assert play.ended.startswith("the trainer's device was lost: ")
    assert play.ended.endswith(f"(after {most} before)")
    asked = {lease for book in play.scheduler.ledger.books.values() if (lease := book.lease).startswith("trainer")}
    assert len(asked) == most + 1


@pytest.mark.parametrize("at", [3, 4, 5])
def test_a_trainer_lost_before_it_came_is_asked_for_again(at: int) -> None:
    play = Play(0, 1, {at: "kill"})
    ends_well(play.run())
    assert play.scheduler.ledger.books.keys() >= {"trainer-2/w"}


def test_time_for_its_first_words_counts_from_the_last_loss(core) -> None:
    core.offer("trainer", WorkerRole.TRAINER)
    core.wait(3)
    core.grant("trainer-1", workers=("trainer",))
    core.wait(4.5)
    core.lease_ended("trainer-1", EndCause.LOST)
    core.wait(3)
    assert core.scheduler.phase is Phase.STARTING
    core.grant("trainer-2", workers=("another",))
    core.join("another")
    assert core.scheduler.phase is Phase.RUNNING


def test_one_that_is_never_to_be_had_again_fails_the_run(core) -> None:
    core.trainer()
    core.lease_ended("trainer-1", EndCause.LOST)
    limits = SMALL_LIMITS
    most_ns = limits.drain_timeout_ns + 3 * limits.release_timeout_ns + limits.retry_max_ns + limits.acquire_timeout_ns
    core.wait(most_ns / NS_PER_S - 0.1)
    assert core.scheduler.phase is Phase.RUNNING
    core.wait(0.2)
    assert core.scheduler.failed == "the trainer's device was lost, and no other one came in time"


def test_refusals_of_another_one_count(core) -> None:
    core.trainer()
    core.lease_ended("trainer-1", EndCause.LOST)
    for n in range(2, 2 + SMALL_LIMITS.trainer_restarts_max):
        assert core.scheduler.phase is Phase.RUNNING
        assert f"trainer-{n}" in [k.lease for k in core.wait(5) if isinstance(k, c.AcquireLease)]
        core.tell(e.LeaseRefused(lease=f"trainer-{n}", reason="full"))
    assert core.scheduler.failed == "the trainer's device is not to be had: full (after 3 before)"


@pytest.mark.parametrize(
    "answer",
    [
        e.LeaseRefused(lease="trainer-1", reason="withdrawn", withdrawn=True),
        e.LeaseEnded(lease="trainer-1", cause=EndCause.RELEASED),
    ],
    ids=["refused", "ended"],
)
def test_a_request_that_the_run_took_back_counts_for_nothing(core, answer: e.Event) -> None:
    """It was stopped before it had a trainer, and goes on."""
    core.offer("trainer", WorkerRole.TRAINER)
    core.tell(answer)
    assert core.scheduler.failed == ""
    assert "trainer-2" in [k.lease for k in core.wait(5) if isinstance(k, c.AcquireLease)]


@pytest.mark.parametrize("version", [None, 1, 7])
def test_one_that_stands_elsewhere_fails_the_run(core, version: int | None) -> None:
    core.trainer()
    core.tell(e.WorkerDisconnected(worker="trainer", epoch=1))
    core.join("trainer", version, epoch=2)
    assert "the trainer's device came with weights of version" in core.scheduler.failed


def test_one_that_has_made_the_update_says_so_again(make_core) -> None:
    core = make_core(steps=2)
    core.trainer()
    for member in range(2):
        core.tell(e.TrajectoryFinished(trajectory=f"0/0/{member}", reward=float(member), tokens=1))
    core.tell(e.WorkerSlept(worker="trainer", epoch=1))
    core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
    update = core.one(c.UpdateWeights)
    core.tell(e.WorkerDisconnected(worker="trainer", epoch=1))
    core.join("trainer", version=1, epoch=2)
    assert core.scheduler.trainer().version == 0
    assert core.scheduler.trainer_mode is TrainerMode.RESTING
    core.tell(e.WorkerSlept(worker="trainer", epoch=2))
    assert core.one(c.UpdateWeights) == update
    core.tell(e.WeightsPublished(worker="trainer", epoch=2, version=1))
    assert core.scheduler.version == 1


def test_time_without_the_trainer_is_no_time_of_its_own(make_core) -> None:
    core = make_core(steps=2)
    core.trainer()
    for member in range(2):
        core.tell(e.TrajectoryFinished(trajectory=f"0/0/{member}", reward=float(member), tokens=1))
    core.tell(e.WorkerSlept(worker="trainer", epoch=1))
    core.now_s += 1
    core.tell(e.WorkerDisconnected(worker="trainer", epoch=1))
    core.wait(7)
    core.join("trainer", epoch=2)
    core.tell(e.WorkerSlept(worker="trainer", epoch=2))
    core.now_s += 2
    core.tell(e.GroupTrained(worker="trainer", epoch=2, group="0/0"))
    core.tell(e.WeightsPublished(worker="trainer", epoch=2, version=1))
    (record,) = core.scheduler.history
    assert (record.train_ns, record.train_wait_ns) == (3 * NS_PER_S, 0)
    assert core.scheduler.step.count(GroupState.TRAINED) == 0


def test_turns_wait_for_the_trainer_that_is_away(core) -> None:
    """It alone could take them, and its return has a limit of its own."""
    core.trainer()
    core.tell(e.WorkerDisconnected(worker="trainer", epoch=1))
    core.request("0/0/0")
    core.wait(SMALL_LIMITS.boot_timeout_ns / NS_PER_S + SMALL_LIMITS.train_timeout_ns / NS_PER_S - 1)
    assert core.scheduler.phase is Phase.RUNNING
    core.join("trainer", epoch=2)
    core.tell(e.WorkerSlept(worker="trainer", epoch=2))
    assert any(isinstance(k, c.WakeWorker) for k in core.wait(1, beating=("trainer",)))


@pytest.mark.parametrize(("own_loss", "more"), [("", ""), ("losses.py:mine", "; its loss is losses.py:mine")])
def test_a_trainer_that_takes_too_long_is_told_of_with_its_order_and_its_own_loss(
    make_core: Callable[..., CoreHarness], own_loss: str, more: str
) -> None:
    core = make_core(own_loss=own_loss)
    core.trainer()
    for number in range(2):
        core.tell(e.TrajectoryFinished(trajectory=f"0/0/{number}", reward=float(number), tokens=1))
    core.end_seeding()
    assert core.one(c.TrainGroup).group == "0/0"
    core.wait(SMALL_LIMITS.train_timeout_ns / NS_PER_S + 1, beating=("trainer",))
    failed = core.scheduler.pieces[0].failed
    assert failed == f"the trainer did not train group 0/0 within 40 s (trainer.step_timeout_s){more}"
