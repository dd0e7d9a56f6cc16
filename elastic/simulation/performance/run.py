"""One run on virtual time: the real core, with models of everything around it.

Models of workers, providers, environments and the trainer carry out the core's commands; the results return as events
when their time has passed. Nothing here decides anything that the core decides in a live run.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ledger import NANO_USD_PER_USD
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, LeaseId, Nanoseconds, WeightMode, WorkerId, WorkerRole
from elastic.runtime.journal import JournalWriter
from elastic.runtime.ports import OneIncarnation, Ports, UnsharedDevice, WorkerOrder
from elastic.runtime.recorder import JournalRecorder
from elastic.runtime.run import Run
from elastic.simulation.loop import EventLoop, VirtualClock
from elastic.simulation.performance.engine import Job
from elastic.simulation.performance.environments import Environments, EnvironmentSettings, ModelledTurn, Trajectory
from elastic.simulation.performance.episodes import Episodes
from elastic.simulation.performance.launchers import Launcher, launcher_of
from elastic.simulation.performance.lending import LentShareModel
from elastic.simulation.performance.pool import PoolMember, SharedTrainerMarket, SliceLauncher, SliceMarket
from elastic.simulation.performance.profile import Device
from elastic.simulation.performance.relay import RelayModel
from elastic.simulation.performance.truth import Acts
from elastic.simulation.performance.worker import WorkerModel
from functions.base import Call
from providers.base import Provider, ProviderSettings
from providers.markets import TrainerMarket

PATIENCE = 4
"""Multiple of the core's longest wait after which a run without progress is given up."""
WAITS_NAMED = 8
COLLECTED_AFTER = 100_000
"""Objects made between two searches for garbage. A simulated run makes next to no cycles, so searches are a waste."""


class SimulationError(Exception):
    """The simulated run cannot end. The message says what it waits for."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings that a live run takes from its configuration, outside of the core; times in nanoseconds."""

    heartbeat_ns: Nanoseconds
    flush_ns: Nanoseconds
    horizon_ns: Nanoseconds
    environments: EnvironmentSettings
    weight_mode: WeightMode = WeightMode.FINISH


POOL = "pool"
"""The name of the provider of a job's rollout slices."""


@dataclass(frozen=True, slots=True)
class SharedPool:
    """The pool of a run that is a job.

    `settings` describe its slices, with `per_node` workers on each node; a turn comes within `within_s`. The run calls
    `ended` when it is over.
    """

    loop: EventLoop
    member: PoolMember
    settings: ProviderSettings
    per_node: int
    within_s: float
    ended: Callable[[], None]


class SimulatedRun(OneIncarnation):
    """A simulated run; `live` carries it to its end. `providers` maps names to kinds and live settings, `trainer`
    has the settings of the trainer's device.

    `devices` describes each provider's workers. The profile of the trainer's device also covers what a run has once,
    such as environments and the relay.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        settings: RunSettings,
        devices: Mapping[str, Device],
        trainer: ProviderSettings,
        providers: Mapping[str, tuple[type[Provider], ProviderSettings]],
        episodes: Episodes,
        journal: JournalWriter,
        shared: "SharedPool | None" = None,
    ) -> None:
        name = scheduler.plan.trainer_provider
        profile = devices[name].profile
        self.loop = EventLoop() if shared is None else shared.loop
        self.scheduler = scheduler
        self._shared = shared
        self.relay = RelayModel(self.loop, profile)
        self.heartbeat_ns = settings.heartbeat_ns
        self.flush_ns = settings.flush_ns
        self.weight_mode = settings.weight_mode
        self.message_ns = round(profile.message_s * NS_PER_S)
        self.recorder = JournalRecorder(scheduler, journal)
        self.acts = Acts()
        self._settings = settings
        self._profile = profile
        self._train_tokens_per_s = profile.train_tokens_per_s * trainer.gpus_per_worker
        self._workers: dict[WorkerId, WorkerModel] = {}
        self._launcher_of: dict[LeaseId, Launcher] = {}
        self._epochs: dict[WorkerId, int] = {}
        self._refused: set[WorkerId] = set()
        self._trained_version = 0
        self._over = False
        self._slices: SliceLauncher | None = None
        self._busy_until_ns: Nanoseconds = 0
        """Until when something is known to go on: the trainer, an environment; or the last token's time."""
        self._patience_ns = PATIENCE * max(
            getattr(scheduler.limits, limit) for limit in scheduler.limits.__struct_fields__ if limit.endswith("_ns")
        )
        self._episodes = episodes
        self._run = Run(scheduler, self._connect)
        self.feed = self._run.feed
        self.launchers: dict[str, Launcher] = {}
        if shared is None:
            self.launchers[name] = Launcher(TrainerMarket(name, trainer), devices[name], self)
        else:
            shared.member.feed = self.feed
            self.launchers[name] = Launcher(SharedTrainerMarket(name, trainer, shared.within_s), devices[name], self)
            slices = SliceMarket(POOL, shared.settings, shared.per_node, shared.within_s)
            self._slices = self.launchers[POOL] = SliceLauncher(slices, devices[POOL], self, shared.member)
        self.launchers |= {name: launcher_of(name, *one, devices[name], self) for name, one in providers.items()}

    def _connect(self, run: Run) -> Ports:
        self.environments = Environments(
            self.loop,
            self._settings.environments,
            self._profile,
            self._episodes,
            run.feed,
            self._called,
            self._busy,
        )
        return Ports(
            clock=VirtualClock(self.loop),
            journal=self.recorder,
            workers=self,
            leases=self,
            trajectories=self.environments,
            rewards=self.environments,
            trainer=self,
            owner=self,
            pool=UnsharedDevice() if self._shared is None else self._shared.member,
        )

    # The whole

    def live(
        self,
        *,
        told: Sequence[e.Event] = (),
        sample: Callable[[], None] = lambda: None,
        sample_ns: Nanoseconds = NS_PER_S // 2,
    ) -> str:
        """Run to the end, after feeding the core the events `told`; returns the cause of failure, or an empty string.

        Raises `SimulationError`.
        """
        self.begin(told=told, sample=sample, sample_ns=sample_ns)
        with rare_collections():
            self.loop.run(self._settings.horizon_ns)
        if not self._over:
            self._give_up(f"no end within {self._settings.horizon_ns / NS_PER_S:g} s of virtual time")
        return self._run.failed

    def begin(
        self,
        *,
        told: Sequence[e.Event] = (),
        sample: Callable[[], None] = lambda: None,
        sample_ns: Nanoseconds = NS_PER_S // 2,
    ) -> None:
        """Start the run on its loop, which other runs may share."""
        for event in told:
            self.feed(event)
        self._bill_functions()
        for launcher in self.launchers.values():
            self.loop.after(0, launcher.start)
        self._sample_every(sample, sample_ns, 0)

    @property
    def over(self) -> bool:
        return self._over

    @property
    def failed(self) -> str:
        """The cause of failure after the run's end; empty if it succeeded."""
        return self._run.failed

    def _give_up(self, found: str) -> None:
        waits = sorted(self.scheduler.timers.waits(), key=lambda wait: wait.since_ns)
        named = [f"{wait.what} of {wait.key} since {wait.since_ns / NS_PER_S:.1f} s" for wait in waits[:WAITS_NAMED]]
        more = f", and {len(waits) - WAITS_NAMED} more" if len(waits) > WAITS_NAMED else ""
        raise SimulationError(f"{found}; the run waits for: {', '.join(named) or 'nothing'}{more}")

    def _check_progress(self) -> None:
        """Give up a run that repeats itself without progress."""
        if self.loop.now_ns - self._busy_until_ns > self._patience_ns:
            since_s = self._busy_until_ns / NS_PER_S
            self._give_up(f"nothing has come of the run since {since_s:.1f} s: no token, and nothing trained")

    def _busy(self, until_ns: Nanoseconds) -> None:
        if until_ns > self._busy_until_ns:
            self._busy_until_ns = until_ns

    def _called(self, call: Call) -> None:
        self.recorder.called(self.loop.now_ns, call)
        self._bill_functions()

    def _bill_functions(self) -> None:
        if self.scheduler.controls.budget_usd is not None and self._settings.environments.reward_usd:
            self.feed(
                e.FunctionsBilled(
                    nano_usd=math.ceil(self.recorder.function_usd * NANO_USD_PER_USD),
                    call_nano_usd=math.ceil(self._settings.environments.reward_usd * NANO_USD_PER_USD),
                )
            )

    def stop(self, reason: str) -> None:
        """Give everything back and end. For calls from within `sample`."""
        self._run.stop(reason)

    def _sample_every(self, sample: Callable[[], None], interval_ns: Nanoseconds, taken: int) -> None:
        """Sample at an interval that doubles after each thousand samples, so that long runs keep few."""

        def take() -> None:
            if self._over:
                return
            sample()
            self._check_progress()
            self._sample_every(sample, interval_ns * (1 + ((taken + 1) % 1000 == 0)), taken + 1)

        self.loop.after(interval_ns, take)

    @property
    def events(self) -> int:
        """The number of events fed to the core."""
        return self.recorder.events

    # What the run sees: its workers, its leases, its owner

    def start_turn(self, order: c.StartTurn, prompt: ModelledTurn) -> None:
        self.order(order)

    def order(self, order: WorkerOrder) -> None:
        self.acts.note(order, self._workers, self.scheduler)
        worker = self._workers.get(order.worker)
        if worker is not None:
            worker.hear(order)

    def fence(self, worker: WorkerId, reason: str) -> None:
        self.acts.note_fence(worker, self._workers, self.scheduler)
        self._refused.add(worker)

    def blame(self, worker: WorkerId, reason: str) -> None:
        """Nobody is shown it."""

    def acquire(self, lease: LeaseId, provider: str, workers: int) -> None:
        launcher = self._launcher_of[lease] = self.launchers[provider]
        launcher.acquire(lease)

    def release(self, lease: LeaseId, provider: str, reason: str) -> None:
        self.launchers[provider].release(lease)

    def bar(self, lease: LeaseId, provider: str) -> None:
        """Does nothing: workers of performance worlds never lie."""

    def ended(self) -> None:
        self._over = True
        if self._shared is None:
            self.loop.stop()
        else:
            self._shared.ended()

    def keep(self, version: int) -> None:
        """There are no checkpoints of a modelled trainer."""

    def broken(self, event: e.Event | None, error: Exception) -> None:
        raise error

    # What workers and providers see

    def worker(self, worker: WorkerId) -> WorkerModel:
        return self._workers[worker]

    def next_epoch(self, worker: WorkerId) -> int | None:
        if worker in self._refused:
            return None
        self._epochs[worker] = self._epochs.get(worker, 0) + 1
        return self._epochs[worker]

    def job(self, command: c.StartTurn) -> Job | None:
        return self.environments.job(command)

    def tell(self, event: e.Event, payload: Any = None) -> None:
        self.loop.after(self.message_ns, partial(self.feed, event, payload))

    def boot_worker(
        self, worker: WorkerId, lease: LeaseId, role: WorkerRole, boot_ns: Nanoseconds, share: LentShareModel | None
    ) -> None:
        device = self._launcher_of[lease].device
        born = self._workers[worker] = WorkerModel(self, worker, lease, role, device, share)
        resident = self._launcher_of[lease].resident_version
        version = self._trained_version if role is WorkerRole.TRAINER else resident
        self.loop.after(boot_ns, lambda: born.join(version))

    def kill_worker(self, worker: WorkerId) -> None:
        killed = self._workers.pop(worker, None)
        if killed is not None:
            killed.die()

    def worker_left(self, worker: WorkerId) -> None:
        left = self._workers.pop(worker, None)
        if left is not None:
            self._launcher_of[left.lease].worker_left(left.lease, worker)

    # The trainer

    def _on_trainer(self, work_s: float, then: Callable[[WorkerModel], None]) -> None:
        record = self.scheduler.trainer()
        trainer = self._workers.get(record.id) if record is not None else None
        if trainer is not None:
            work_ns = round(work_s * NS_PER_S)
            self._busy(self.loop.now_ns + work_ns)
            trainer.train(work_ns, lambda: then(trainer))

    def train(self, order: c.TrainGroup, batch: Sequence[Trajectory]) -> None:
        tokens = sum(trajectory.context for trajectory in batch)
        work_s = self._profile.train_group_s + tokens / self._train_tokens_per_s
        self._on_trainer(work_s, lambda t: self.tell(e.GroupTrained(worker=t.id, epoch=t.epoch, group=order.group)))

    def skip(self, order: c.DropGroup, dropped: None) -> None:
        pass

    def update(self, order: c.UpdateWeights) -> None:
        def publish(trainer: WorkerModel) -> None:
            self._trained_version = order.version
            assert trainer.engine is not None
            trainer.engine.use_version(order.version)
            if self._slices is not None:
                self._slices.follow(order.version, self.relay)
            self.tell(e.WeightsPublished(worker=trainer.id, epoch=trainer.epoch, version=order.version))

        self._on_trainer(self._profile.update_s, publish)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(COLLECTED_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
