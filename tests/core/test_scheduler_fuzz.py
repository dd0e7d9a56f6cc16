"""Any event at any time: the scheduler never raises, and its state is right after each."""

from random import Random

import msgspec
import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.invariants import check
from elastic.core.scheduler import Phase, Scheduler
from elastic.core.types import (
    Account,
    Capabilities,
    Chunk,
    ChunkPrompt,
    Chunks,
    EndCause,
    FinishReason,
    InfrastructureCause,
    Offer,
    Plan,
    WorkerRole,
)
from elastic.testing.faults.core.incarnation import policies
from elastic.testing.faults.core.settings import MS, SMALL_LIMITS, WorldSettings
from tests.seeds import seeds

CAPABILITIES = Capabilities(engine="test", replayable_sampling=True, max_context_tokens=64, device="none")
EVENTS = 250
WAITED = (InfrastructureCause.CAPACITY, InfrastructureCause.PROGRESS)
TRAINERS = (c.SleepWorker, c.WakeWorker, c.TrainGroup, c.UpdateWeights)


class Monkey:
    """Says mostly what would be expected, often about the wrong thing or at the wrong time."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        plan = Plan(steps=3, groups=2, group_size=2, staleness_bound=seed % 3)
        settings = WorldSettings(plan=plan, dynamic_most=seed % 2 * 3.0)
        self.scheduler = Scheduler(settings.plan, SMALL_LIMITS, policies(settings), 0)
        self.orders: list[c.Command] = []
        self.said: list[e.Event] = [
            e.OfferChanged(offer=Offer(provider="trainer", role=WorkerRole.TRAINER, available=1, usd_per_gpu_hour=1)),
            e.OfferChanged(offer=Offer(provider="spot", role=WorkerRole.ELASTIC, available=2, usd_per_gpu_hour=1)),
        ]
        self.now_ns = 0
        self.seen: set[str] = set()

    def run(self) -> None:
        for event in list(self.said):
            self.tell(event)
        for _ in range(EVENTS):
            self.now_ns += self.rng.choice((0, 0, MS, 30 * MS, 300 * MS, 1200 * MS))
            self.keep_the_trainer()
            choice = self.rng.random()
            if choice < 0.15:
                self.tell(self.rng.choice(self.said))
            elif choice < 0.25:
                self.tell(self.anything())
            elif choice < 0.6 and self.orders:
                self.answer(self.orders.pop(self.rng.randrange(len(self.orders))))
            else:
                self.everyday()

    def keep_the_trainer(self) -> None:
        """Without its trainer a run is soon over: mostly, it does as it is told."""
        trainer = self.scheduler.trainer()
        if trainer is not None and self.rng.random() < 0.95:
            self.tell(self.report(trainer.id, trainer.epoch))
        for order in list(self.orders):
            of_trainer = isinstance(order, TRAINERS) or getattr(order, "provider", "") == "trainer"
            if of_trainer and self.rng.random() < 0.5:
                self.orders.remove(order)
                self.answer(order)

    def tell(self, event: e.Event) -> None:
        self.said = [*self.said[-40:], event]
        self.orders += self.scheduler.handle(event, self.now_ns)
        self.seen |= {self.scheduler.phase, f"step {len(self.scheduler.history)}"}
        check(self.scheduler)

    def everyday(self) -> None:
        """Hearts beat, turns are asked for and answered, time passes."""
        workers = list(self.scheduler.fleet.workers.values())
        for worker in workers:
            self.tell(self.report(worker.id, worker.epoch))
        for turn in list(self.scheduler.turns.live.values()):
            if turn.worker is not None and self.rng.random() < 0.4:
                worker = self.scheduler.fleet.workers[turn.worker]
                finish = self.rng.choice((None, None, *FinishReason))
                count = self.rng.randint(0, 3)
                chunk = Chunk(turn.slot, turn.accepted, count, self.scheduler.version or 0, finish)
                self.tell(e.TokensReceived(worker=worker.id, epoch=worker.epoch, chunks=Chunks.of([chunk])))
        step = self.scheduler.step
        for group in list(step.groups.values()) if step else ():
            for trajectory in group.unfinished:
                if self.rng.random() < 0.3:
                    turn_id = f"{trajectory}#{self.rng.randint(0, 3)}"
                    self.tell(self.request(turn_id, trajectory))
                elif self.rng.random() < 0.1:
                    self.tell(e.TrajectoryFinished(trajectory=trajectory, reward=self.rng.random(), tokens=1))
                elif self.rng.random() < 0.1:
                    self.tell(e.RewardRequested(trajectory=trajectory, tokens=1))

    def answer(self, order: c.Command) -> None:
        rng, version = self.rng, self.rng.choice((None, 0, self.scheduler.version, 7))
        match order:
            case c.AcquireLease():
                expires_at_ns = rng.choice((None, self.now_ns + rng.randint(0, 9000) * MS))
                workers = tuple(f"{order.lease}/{n}" for n in range(rng.choice((0, 1, 1, 2))))
                if order.provider == "trainer":
                    workers, expires_at_ns, version = ("trainer",), None, 0
                self.tell(e.LeaseGranted(lease=order.lease, workers=workers, expires_at_ns=expires_at_ns))
                for worker in workers:
                    self.tell(self.joined(worker, 1, version))
            case c.ReleaseLease():
                self.tell(e.LeaseEnded(lease=order.lease, cause=EndCause.RELEASED))
            case c.LoadWeights():
                self.tell(e.WeightsApplied(worker=order.worker, epoch=order.epoch, version=order.version))
            case c.SleepWorker():
                self.tell(e.WorkerSlept(worker=order.worker, epoch=order.epoch))
            case c.WakeWorker():
                self.tell(e.WorkerAwoke(worker=order.worker, epoch=order.epoch))
            case c.ScoreTrajectory():
                self.tell(self.scored(order.trajectory, order.attempt))
            case c.TrainGroup():
                self.tell(e.GroupTrained(worker="trainer", epoch=1, group=order.group))
            case c.UpdateWeights():
                self.tell(e.WeightsPublished(worker="trainer", epoch=1, version=order.version))
            case _:
                pass

    def anything(self) -> e.Event:
        """An event about anything there is, was, or never has been."""
        rng, scheduler = self.rng, self.scheduler
        worker = rng.choice([*scheduler.fleet.workers, "spot-1/0", "nobody", "trainer"])
        if worker == "trainer" and rng.random() < 0.8:
            worker = "nobody"
        record = scheduler.fleet.workers.get(worker)
        epoch = (record.epoch if record else 0) + rng.randint(-1, 1)
        leases = [lease for lease in scheduler.leases.leases if not lease.startswith("trainer")]
        lease = rng.choice([*leases, "spot-1", "spot-99", "nothing"])
        trajectory = rng.choice(["0/0/0", "0/1/1", "1/0/0", "nowhere"])
        turn = rng.choice([*scheduler.turns.live, f"{trajectory}#0", "no turn"])
        version = rng.choice((-1, 0, 1, 2, 9))
        cause = rng.choice(list(EndCause))
        chunk = Chunk(rng.randint(0, 5), rng.randint(0, 5), rng.randint(0, 30), version, None)
        return rng.choice(
            [
                e.Tick(),
                e.LeaseGranted(lease=lease, workers=(worker, f"{lease}/0")),
                e.LeaseRefused(lease=lease, reason="full"),
                e.LeaseNotice(lease=lease, deadline_ns=self.now_ns + rng.randint(-1, 4000) * MS, reason="notice"),
                e.LeaseEnded(lease=lease, cause=cause),
                self.joined(worker, epoch, rng.choice((None, version))),
                self.report(worker, epoch),
                e.WorkerSlept(worker=worker, epoch=epoch),
                e.WorkerAwoke(worker=worker, epoch=epoch),
                e.WorkerDisconnected(worker=worker, epoch=epoch, goodbye=rng.random() < 0.5),
                e.WeightsApplied(worker=worker, epoch=epoch, version=version),
                e.WeightsFailed(worker=worker, epoch=epoch, version=version, reason="torn"),
                e.TokensReceived(worker=worker, epoch=epoch, chunks=Chunks.of([chunk, chunk])),
                self.request(turn, trajectory),
                e.TrajectoryFinished(trajectory=trajectory, reward=rng.choice((0.0, 1.0, float("nan"))), tokens=0),
                e.TrajectoryFailed(trajectory=trajectory, cause=""),
                e.RewardRequested(trajectory=trajectory, tokens=0),
                self.scored(trajectory, rng.randint(0, 3)),
                e.WorkerBarred(worker=worker, epoch=epoch, cause="lies"),
                e.GroupTrained(worker=worker, epoch=epoch, group=rng.choice(("0/0", "1/1", "none"))),
                e.GroupTrained(worker="trainer", epoch=1, group=rng.choice(("0/0", "1/1", "none"))),
                e.WeightsPublished(worker=worker, epoch=epoch, version=version),
                e.WeightsPublished(worker="trainer", epoch=1, version=version),
                e.Resumed(),
                *([e.StopRequested(reason="enough")] if rng.random() < 0.02 else ()),
            ]
        )

    def scored(self, trajectory: str, attempt: int) -> e.Event:
        helps, reward = self.rng.random() < 0.7, self.rng.choice((0.0, 0.5, 1.0, float("inf")))
        if self.rng.random() < 0.3:
            return e.RewardFailed(trajectory=trajectory, attempt=attempt, cause="", retry_helps=helps)
        return e.RewardScored(trajectory=trajectory, attempt=attempt, reward=reward)

    def joined(self, worker: str, epoch: int, version: int | None) -> e.WorkerJoined:
        return e.WorkerJoined(worker=worker, epoch=epoch, capabilities=CAPABILITIES, weights_version=version)

    def request(self, turn: str, trajectory: str) -> e.TurnRequested:
        return e.TurnRequested(
            turn=turn, trajectory=trajectory, prompt_tokens=5, max_new_tokens=self.rng.choice((0, 1, 12))
        )

    def report(self, worker: str, epoch: int) -> e.WorkerReported:
        rng = self.rng
        return e.WorkerReported(
            worker=worker,
            epoch=epoch,
            capacity_turns=rng.choice((0, 2, 2, 2)),
            pending=0,
            executing=0 if worker == "trainer" else rng.randint(0, 2),
            progress=rng.choice((1, self.now_ns)),
            accounts_ns={account: rng.randrange(1, 10**10) for account in rng.sample(list(Account), 3)},
            decoded_tokens=rng.randint(0, 100),
        )


class Twin(Monkey):
    """Tells a second scheduler the same, and of each chunk that its prompt cost nothing: so none goes the short way.

    Turns of a worker come in one frame, most of them for the second time or later.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        run, _ = self.scheduler.pieces
        self.long_way = Scheduler(run.plan, run.limits, run.policies, 0)
        self.went_on = 0

    def tell(self, event: e.Event) -> None:
        told = event
        if isinstance(event, e.TokensReceived):
            prompts = [ChunkPrompt(place, 0, 0) for place, _ in enumerate(event.chunks.slots)]
            told = msgspec.structs.replace(event, chunks=msgspec.structs.replace(event.chunks, prompts=prompts))
        self.long_way.handle(told, self.now_ns)
        super().tell(event)
        assert digest(self.long_way) == digest(self.scheduler)

    def everyday(self) -> None:
        super().everyday()
        for worker in 2 * list(self.scheduler.fleet.workers.values()):
            turns = [self.scheduler.turns.live[turn] for turn in worker.turns]
            chunks = [Chunk(turn.slot, turn.accepted, 1, turn.version or 0) for turn in turns]
            self.went_on += sum(turn.accepted > turn.start for turn in turns)
            if chunks:
                self.tell(e.TokensReceived(worker=worker.id, epoch=worker.epoch, chunks=Chunks.of(chunks)))


class Outside(Monkey):
    """Agents drive the trajectories: answers end where these say, and now and then nobody can take a turn for long."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        run, _ = self.scheduler.pieces
        plan = msgspec.structs.replace(run.plan, driven_outside=True)
        self.scheduler = Scheduler(plan, run.limits, run.policies, 0)
        self.cut_turns: set[str] = set()

    def tell(self, event: e.Event) -> None:
        known = len(self.orders)
        super().tell(event)
        told = self.orders[known:]
        waited = [o for o in told if isinstance(o, c.FailTurn) and o.cause.startswith(WAITED)]
        assert not self.scheduler.failed.startswith(WAITED)
        assert not any(order.turn in self.scheduler.turns.live for order in waited)
        assert not any(isinstance(order, c.StartTurn) and order.turn in self.cut_turns for order in told)

    def everyday(self) -> None:
        super().everyday()
        live = list(self.scheduler.turns.live.values())
        if live and self.rng.random() < 0.6:
            turn = self.rng.choice(live)
            self.cut(turn.id, turn.accepted, self.rng.randint(0, turn.accepted + 1))
        if self.cut_turns and self.rng.random() < 0.1:
            self.cut(self.rng.choice(sorted(self.cut_turns)), 0, 0)
        if self.rng.random() < 0.02:
            self.now_ns += SMALL_LIMITS.queue_timeout_ns
            self.tell(e.Tick())

    def cut(self, turn: str, accepted: int, kept: int) -> None:
        """End the turn there; it finishes once, if it is live and has so many tokens, and its room is free again."""
        live, known = turn in self.scheduler.turns.live, len(self.orders)
        lost = (("spot-1/0", accepted - kept),) if kept < accepted else ()
        self.tell(e.TurnCut(turn=turn, kept=kept, lost=lost))
        ends = live and kept <= accepted
        finished = [order for order in self.orders[known:] if isinstance(order, c.FinishTurn) and order.turn == turn]
        assert len(finished) == ends
        if ends:
            self.cut_turns.add(turn)
            assert turn not in self.scheduler.turns.live
            assert not any(turn in worker.turns for worker in self.scheduler.fleet.workers.values())


def test_agents_cut_turns_and_no_wait_for_capacity_ends_their_run() -> None:
    """Five worlds, so that enough turns were cut."""
    cut = 0
    for seed in range(5):
        outside = Outside(seed)
        outside.run()
        cut += len(outside.cut_turns)
    assert cut > 15


@pytest.mark.parametrize("histories", [1, pytest.param(12, marks=pytest.mark.nightly)])
def test_the_short_way_of_a_chunk_leads_where_the_long_one_does(histories: int) -> None:
    """After every event of every history the two are in the same state."""
    went_on = 0
    for seed in range(histories):
        twin = Twin(seed)
        twin.run()
        went_on += twin.went_on
    assert went_on > 8 * histories


@pytest.mark.parametrize("seed", seeds(8, 60))
def test_no_event_breaks_the_scheduler(seed: int) -> None:
    Monkey(seed).run()


def test_monkeys_see_every_phase() -> None:
    """The fuzzing above is worth something only if it gets deep into runs."""
    seen: set[str] = set()
    for seed in range(30):
        monkey = Monkey(seed)
        monkey.run()
        seen |= monkey.seen
        if seen >= {*Phase, "step 0", "step 3"}:
            return
    pytest.fail(f"they saw {seen} alone")
