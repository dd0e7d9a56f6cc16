"""Jobs at the grain of phases, which last as long as is drawn.

A job's script is that of every run: rollout, training and synchronisation follow one another until all steps are done.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random

import msgspec

from elastic.core.cluster import JobRequest, PhasePlan
from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobId, JobState, Nanoseconds, Permit, PhaseKind
from elastic.simulation.jobs.world import JobsWorld, S

_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN
ASKED_AGAIN_NS = 60 * S
"""How long a job that is not heard yet waits before it asks again."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A job that comes at a time. Its phases last `shortest` to `longest` of the plan, drawn anew for every step;
    `longest` is beyond 1 where not the worst case was planned."""

    at_ns: Nanoseconds
    request: JobRequest
    shortest: float = 1.0
    longest: float = 1.0


class StepTaken(msgspec.Struct, frozen=True):
    begun_ns: Nanoseconds
    ended_ns: Nanoseconds


class PhasedJob:
    """The process of one job: its present phase, and how much of that is left."""

    def __init__(self, world: JobsWorld, arrival: Arrival, rng: Random) -> None:
        self._world, self._arrival, self._rng = world, arrival, rng
        self.id = arrival.request.id
        self.steps: list[StepTaken] = []
        self.alone_ns: Nanoseconds = 0
        """How long its steps would have taken alone."""
        self._life = 0
        self._phase = _ROLLOUT
        self._left_ns: Nanoseconds | None = None
        self._permit: int | None = None
        self._began_ns = 0
        self._stopping = False
        self._step_began_ns: Nanoseconds | None = None
        self._syncing = False
        self._placement = 0
        self._cold = True
        """Whether its residents have started since its last rollout."""

    def obey(self, command: c.ClusterCommand) -> None:
        match command:
            case c.StartJob(placement=placement, restart=restart):
                self._start(placement, restart=restart)
            case c.StopJob():
                self._stopping = True
                if self._between_steps:
                    self._step_began_ns = None
                    self._stop()
            case c.GrantPermit(permit=permit):
                self._granted(permit)
            case c.RecallPermit(permit=permit) if self._permit == permit.number:
                assert self._left_ns is not None
                self._left_ns = max(1, self._left_ns - (self._world.loop.now_ns - self._began_ns))
                self._yield(finished=False)
            case _:
                pass

    @property
    def _between_steps(self) -> bool:
        """Whether no part of the next step has been done."""
        begun = self._permit is not None or self._left_ns is not None or self._phase is _TRAIN or self._syncing
        return self._step_began_ns is None or not begun

    @property
    def _plan(self) -> PhasePlan:
        """As the cluster has it by now."""
        plan = self._world.cluster.request(self.id).plan
        assert plan is not None
        return plan

    def _later(self, after_ns: Nanoseconds, act: Callable[[], None]) -> None:
        """Only if the process lives that long."""
        life = self._life
        self._world.loop.after(after_ns, lambda: act() if self._life == life else None)

    def _start(self, placement: int, *, restart: bool) -> None:
        self._life += 1
        self._placement, self._cold = placement, True
        self._permit, self._left_ns, self._stopping, self._phase = None, None, False, _ROLLOUT
        self._step_began_ns = None

        def up() -> None:
            self._world.send(e.JobStarted(job=self.id, placement=placement))
            self._begin_step()

        self._later(self._arrival.request.restart_ns if restart else 0, up)

    def _begin_step(self) -> None:
        self._step_began_ns = self._world.loop.now_ns
        self._phase, self._syncing = _ROLLOUT, False
        self._ask()

    def _ask(self) -> None:
        if self._permit is None and self._step_began_ns is not None and not self._syncing:
            self._world.send(e.PhaseAsked(job=self.id, phase=self._phase, placement=self._placement))
            if self._world.cluster.jobs[self.id].state is not JobState.RUNNING:
                self._later(ASKED_AGAIN_NS, self._ask)

    def _granted(self, permit: Permit) -> None:
        phase, number = permit.phase, permit.number
        if self._step_began_ns is None or self._syncing or self._phase is not phase:
            self._world.send(e.PermitYielded(job=self.id, permit=number, finished=False))
            return
        plan = self._plan
        cold_ns = plan.rollout_cold_ns if phase is _ROLLOUT and (self._cold or not plan.rollout_parks) else 0
        switch_ns = cold_ns + (plan.rollout_switch_ns if phase is _ROLLOUT else plan.train_switch_ns)
        self._cold = self._cold and phase is not _ROLLOUT
        if self._left_ns is None:
            self._left_ns = self._drawn_ns()
        self._permit, self._began_ns = number, self._world.loop.now_ns

        def over() -> None:
            if self._permit == number:
                self._yield(switch_ns, cold_ns, finished=True)

        self._later(switch_ns + self._left_ns, over)

    def _drawn_ns(self) -> Nanoseconds:
        record, plan = self._world.cluster.jobs[self.id], self._plan
        assert record.seat is not None
        train, kind = self._world.cluster.groups[record.seat.group].train, self._world.cluster.kind
        train_ns = record.request.train_ns(len(train), kind(train[0]))
        planned_ns = plan.rollout_ns if self._phase is _ROLLOUT else train_ns
        shortest, longest = self._arrival.shortest, self._arrival.longest
        drawn = shortest + (longest - shortest) * self._rng.random() ** 0.5 if shortest < longest else longest
        self.alone_ns += int((plan.rollout_ns if self._phase is _ROLLOUT else plan.train_ns) * drawn)
        return max(1, int(planned_ns * drawn))

    def _yield(self, switch_ns: Nanoseconds = 0, cold_ns: Nanoseconds = 0, *, finished: bool) -> None:
        assert self._permit is not None
        permit, self._permit = self._permit, None
        self._world.send(
            e.PermitYielded(job=self.id, permit=permit, finished=finished, switch_ns=switch_ns, cold_ns=cold_ns)
        )
        if finished:
            self._left_ns = None
        if finished and self._phase is _TRAIN:
            self._syncing = True
            self._later(self._plan.sync_ns, self._end_step)
            return
        self._phase = _TRAIN if finished else self._phase
        self._ask()

    def _end_step(self) -> None:
        assert self._step_began_ns is not None
        self.steps.append(StepTaken(self._step_began_ns, self._world.loop.now_ns))
        self.alone_ns += self._plan.sync_ns
        self._step_began_ns = None
        self._world.send(e.JobProgressed(job=self.id, steps_done=len(self.steps)))
        if len(self.steps) >= self._arrival.request.steps:
            self._world.send(e.JobFinished(job=self.id))
        elif self._stopping:
            self._stop()
        else:
            self._begin_step()

    def _stop(self) -> None:
        self._world.send(e.JobStopped(job=self.id, steps_done=len(self.steps)))


def phased(world: JobsWorld, arrivals: Sequence[Arrival], seed: int = 0) -> Mapping[JobId, PhasedJob]:
    """Have these jobs come to the world; `seed` is of how long their phases take."""
    rng = Random(seed)
    jobs = {arrival.request.id: PhasedJob(world, arrival, rng) for arrival in arrivals}
    for arrival in arrivals:
        world.loop.at(arrival.at_ns, partial(world.submit, arrival.request, jobs[arrival.request.id]))
    return jobs
