"""Jobs of a pool token by token: a real `Run` for each.

A job uses the pool as a live job does: rollout slices are leases of a provider, and the trainer computes by permit.
Devices, links, and the times to resume and to park are modelled; no process dies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from elastic.core import events as run_events
from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobId, NodeId, Permit, PhaseKind
from elastic.core.ids import worker_id
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Nanoseconds, Offer, WorkerRole
from elastic.simulation.jobs.world import JobsWorld
from elastic.simulation.performance.launchers import Launcher, ModelledLease
from elastic.simulation.performance.profile import Device
from elastic.simulation.performance.relay import RelayModel
from providers.base import ProviderSettings
from providers.markets import CapacityUnavailable, LeaseEnding, Market, TakenBack, TrainerMarket

if TYPE_CHECKING:
    from elastic.simulation.performance.run import SimulatedRun

_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN
TAIL_NOTICE_NS = 30 * NS_PER_S
"""The notice for the turns of a tail to leave a node."""


@dataclass(frozen=True, slots=True)
class SwitchTimes:
    """The times to resume and to park on a node, in nanoseconds."""

    rollout_resume_ns: Nanoseconds = 0
    rollout_park_ns: Nanoseconds = 0
    train_resume_ns: Nanoseconds = 0
    train_park_ns: Nanoseconds = 0

    @property
    def rollout_ns(self) -> Nanoseconds:
        return self.rollout_resume_ns + self.rollout_park_ns

    @property
    def train_ns(self) -> Nanoseconds:
        return self.train_resume_ns + self.train_park_ns


@dataclass(slots=True)
class _Slice:
    """A permit of a job, from its grant until its devices are free."""

    permit: Permit
    resumed: bool = False
    over: bool = False


class PoolMember:
    """A job's connection to the pool: `elastic.runtime.ports.Pool` for its trainer, and the slices of its rollouts.

    A job asks for one phase at a time, training first. `make` makes the job's run once the job is started.
    """

    def __init__(
        self, world: JobsWorld, job: JobId, switch: SwitchTimes, make: Callable[["PoolMember"], "SimulatedRun"]
    ) -> None:
        self._world, self._job, self._switch, self._make = world, job, switch, make
        self._wanted: set[PhaseKind] = set()
        self._asked: PhaseKind | None = None
        self._held: dict[PhaseKind, _Slice] = {}
        self._step = 0
        self._placement = 0
        self.train_nodes: tuple[NodeId, ...] = ()
        """The training nodes of the group that the job was placed in."""
        self.feed: Callable[[run_events.Event], None] = lambda _: None
        self.slices: SliceLauncher | None = None

    # What the run asks for its trainer.

    def ask_permit(self) -> None:
        self.want(_TRAIN)

    def yield_permit(self, permit: int | None, *, finished: bool) -> None:
        held = self._held.get(_TRAIN)
        if permit is None:
            self._wanted.discard(_TRAIN)
        elif held is not None and held.permit.number == permit and not held.over:
            held.over = True
            self._world.loop.after(self._switch.train_park_ns, partial(self._yield, _TRAIN, finished))

    def report_progress(self, step: int, done: int, of: int) -> None:
        held = self._held.get(_ROLLOUT)
        if held is not None:
            self._world.tell(e.RolloutProgressed(job=self._job, permit=held.permit.number, done=done, of=of))
        if step > self._step:
            self._step = step
            self._world.tell(e.JobProgressed(job=self._job, steps_done=step))

    def take_up(self, permit: int | None, *, asked: bool, last: int) -> None:
        raise AssertionError("a run of one incarnation does not resume")

    # What its slices ask for.

    @property
    def rollout_nodes(self) -> Sequence[NodeId]:
        """Return the nodes of the current slice; none before its state is on the devices, and none once it is to
        end."""
        held = self._held.get(_ROLLOUT)
        return held.permit.usable if held is not None and held.resumed and not held.over else ()

    def want(self, phase: PhaseKind) -> None:
        self._wanted.add(phase)
        self._ask()

    def leave_rollout(self, *, finished: bool) -> None:
        """End the slice. No worker may be left on its nodes."""
        held = self._held.get(_ROLLOUT)
        if held is not None and not held.over:
            held.over = True
            self._world.loop.after(self._switch.rollout_park_ns, partial(self._yield, _ROLLOUT, finished))

    def tail_left(self) -> None:
        held = self._held.get(_ROLLOUT)
        if held is not None:
            self._world.tell(e.TailMoved(job=self._job, permit=held.permit.number))

    # What the pool says.

    def obey(self, command: c.ClusterCommand) -> None:
        match command:
            case c.StartJob(placement=placement, train=train):
                self._placement, self.train_nodes = placement, train
                run = self._make(self)
                self._world.tell(e.JobStarted(job=self._job, placement=placement))
                self._world.loop.after(0, run.begin)
            case c.GrantPermit(permit=permit):
                self._granted(permit)
            case c.RecallPermit(permit=permit):
                self._recalled(permit)
            case c.MoveTail(permit=permit):
                self._move_tail(permit)
            case c.KillResident(node=node, reason=reason):
                self._killed(self._world.cluster.state.nodes[node].phase, reason)
            case c.StartResident() | c.EndJob():
                pass
            case _:
                raise AssertionError(f"{command}: jobs of this grain are not turned away, moved or profiled")

    def _granted(self, permit: Permit) -> None:
        phase = permit.phase
        held = self._held.get(phase)
        if held is not None and held.permit.number == permit.number:
            held.permit = permit
            if held.resumed and self.slices is not None:
                self.slices.open()
            return
        held = self._held[phase] = _Slice(permit)
        self._asked = None
        if phase not in self._wanted:
            held.over = True
            self._yield(phase, True)
            return
        self._wanted.discard(phase)
        switch = self._switch
        resume_ns = switch.rollout_resume_ns if phase is _ROLLOUT else switch.train_resume_ns
        self._world.loop.after(resume_ns, partial(self._resumed, held, phase))

    def _resumed(self, held: _Slice, phase: PhaseKind) -> None:
        if self._held.get(phase) is not held or held.over:
            return
        held.resumed = True
        if phase is _TRAIN:
            permit = held.permit
            self.feed(run_events.PermitGranted(permit=permit.number, deadline_ns=permit.deadline_ns))
        elif self.slices is not None:
            self.slices.open()

    def _recalled(self, permit: Permit) -> None:
        held = self._held.get(permit.phase)
        if held is None or held.permit.number != permit.number:
            return
        held.permit = permit
        until_ns = permit.deadline_ns + self._world.cluster.limits.notice_ns
        if permit.phase is _TRAIN:
            self.feed(run_events.PermitRecalled(permit=permit.number, until_ns=until_ns))
        elif self.slices is not None:
            self.slices.recall(until_ns)

    def _move_tail(self, permit: Permit) -> None:
        held = self._held.get(_ROLLOUT)
        if held is not None and held.permit.number == permit.number and self.slices is not None:
            held.permit = permit
            self.slices.keep_only(permit.tail_nodes)

    def _killed(self, phase: PhaseKind, cause: str) -> None:
        """Note that the phase's residents were killed because they did not give way. Their unfinished work is lost."""
        held = self._held.pop(phase, None)
        if held is None:
            return
        if phase is _TRAIN:
            self.feed(run_events.PermitEnded(permit=held.permit.number, cause=cause))
        elif self.slices is not None:
            self.slices.lose(cause)
        self._ask()

    def _yield(self, phase: PhaseKind, finished: bool) -> None:
        held = self._held.pop(phase, None)
        if held is None:
            return
        switch_ns = self._switch.rollout_ns if phase is _ROLLOUT else self._switch.train_ns
        number = held.permit.number
        self._world.tell(e.PermitYielded(job=self._job, permit=number, finished=finished, switch_ns=switch_ns))
        self._ask()

    def _ask(self) -> None:
        if self._held or not self._wanted:
            return
        phase = _TRAIN if _TRAIN in self._wanted else _ROLLOUT
        if phase is not self._asked:
            self._asked = phase
            self._world.tell(e.PhaseAsked(job=self._job, phase=phase, placement=self._placement))


class SharedTrainerMarket(TrainerMarket):
    """The trainer's device of a job on a pool. The trainer computes there by permit."""

    def __init__(self, name: str, settings: ProviderSettings, within_s: float) -> None:
        super().__init__(name, settings)
        self._within_s = within_s

    def news(self, *, again: bool = False) -> Offer | None:
        offer = super().news(again=again)
        shared = {"by_permit": True, "grant_within_s": self._within_s}
        return None if offer is None else msgspec.structs.replace(offer, **shared)


class SliceMarket(Market[ProviderSettings]):
    """A job's rollout nodes. During the job's turn each node is one lease with `per_node` workers."""

    role = WorkerRole.ELASTIC

    def __init__(self, name: str, settings: ProviderSettings, per_node: int, within_s: float) -> None:
        super().__init__(name, settings)
        self.workers_per_lease = per_node
        self._within_s = within_s

    def news(self, *, again: bool = False) -> Offer | None:
        offer = super().news(again=again)
        return None if offer is None else msgspec.structs.replace(offer, grant_within_s=self._within_s)


class SliceLauncher(Launcher):
    """Rollout slices as leases: requested, granted when the turn begins, and ended by notice or by release.

    Residents are warm, and follow the job's versions while they are parked.
    """

    def __init__(self, market: SliceMarket, device: Device, world: "SimulatedRun", member: PoolMember) -> None:
        super().__init__(market, device, world)
        self._member = member
        self._waiting: list[ModelledLease] = []
        self._on: dict[NodeId, ModelledLease] = {}
        self._kept: Sequence[NodeId] | None = None
        self._version: int | None = None
        member.slices = self

    @property
    def resident_version(self) -> int | None:
        return self._version

    def boot_s(self) -> float:
        return 0.0

    def follow(self, version: int, relay: RelayModel) -> None:
        """Let parked residents pull a published version. The first resident pulls it over the slow link."""
        _, pulled_ns = relay.pull(self._version, version, self.device.profile)

        def pulled() -> None:
            self._version = max(version, self._version or 0)

        self._world.loop.at(pulled_ns, pulled)

    def acquire(self, lease: LeaseId) -> None:
        try:
            self.market.take(lease)
        except CapacityUnavailable as refusal:
            refused = run_events.LeaseRefused(lease=lease, reason=str(refusal))
            self._world.loop.after(0, lambda: self._world.feed(refused))
            return
        workers = [worker_id(lease, number) for number in range(self.market.workers_per_lease)]
        held = self._held[lease] = ModelledLease(lease, "", workers)
        self._waiting.append(held)
        self._world.loop.after(0, self.open)

    def open(self) -> None:
        """Grant waiting requests the nodes of the current slice, or ask for a slice."""
        for node in self._member.rollout_nodes:
            if node not in self._on and self._waiting:
                held = self._waiting.pop(0)
                held.place = node
                self._on[node] = held
                self._grant(held)
        if self._waiting and not self._member.rollout_nodes:
            self._member.want(_ROLLOUT)
        elif not self._on and self._member.rollout_nodes:
            self._leave(finished=True)

    def end(self, lease: LeaseId, ending: LeaseEnding) -> None:
        held = self._held.get(lease)
        super().end(lease, ending)
        if held is None:
            return
        if held in self._waiting:
            self._waiting.remove(held)
            return
        self._on.pop(held.place, None)
        if self._kept is not None and set(self._on) <= set(self._kept):
            self._member.tail_left()
            self._kept = None
        if not self._on:
            self._leave(finished=held.noticed is None and not self._waiting)

    def recall(self, until_ns: Nanoseconds) -> None:
        if not self._on:
            self._leave(finished=False)
        for held in list(self._on.values()):
            self._give_notice(TakenBack(held.id, until_ns, LeaseEnding(EndCause.EXPIRED, "its turn is over")))

    def keep_only(self, nodes: Sequence[NodeId]) -> None:
        """Move the tail to these nodes."""
        self._kept = nodes
        leaving = [held for node, held in self._on.items() if node not in nodes]
        until_ns = self._world.loop.now_ns + TAIL_NOTICE_NS
        for held in leaving:
            self._give_notice(TakenBack(held.id, until_ns, LeaseEnding(EndCause.EXPIRED, "the tail moves together")))

    def lose(self, cause: str) -> None:
        """End all leases, because the residents were killed."""
        for held in list(self._on.values()):
            super().end(held.id, LeaseEnding(EndCause.LOST, cause))
        self._on.clear()

    def _leave(self, *, finished: bool) -> None:
        self._kept = None
        self._member.leave_rollout(finished=finished)
        if self._waiting:
            self._member.want(_ROLLOUT)
