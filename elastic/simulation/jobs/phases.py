"""Many jobs on one pool on virtual time, at the grain of phases: the real `Cluster`, jobs that are drawn durations.

A job's script is that of every run: its residents start, then rollout, training and synchronisation follow one another
until all steps are done. Nothing goes wrong here; a world of faults is `elastic.testing.faults.pool`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from elastic.core.cluster import Cluster, ClusterPolicies, JobRequest, PhasePlan, PoolSpec, WaitLimits
from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.cluster import NO_ROOM
from elastic.core.cluster.history import ClusterEntry, ClusterOpening, encode
from elastic.core.cluster.invariants import check
from elastic.core.cluster.types import JobId, JobState, Nanoseconds, NodeId, Permit, PhaseKind
from elastic.simulation.loop import EventLoop

S = 1_000_000_000
_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


class JobsWorldFailed(AssertionError):
    """An invariant did not hold, or the world came to no end; the message begins with the seed."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A job that comes at a time. Its phases last `shortest` to `longest` of the plan, drawn anew for every step;
    `longest` is beyond 1 where not the worst case was planned."""

    at_ns: Nanoseconds
    request: JobRequest
    shortest: float = 1.0
    longest: float = 1.0
    profile: PhasePlan | None = None
    """Return what a timed step shows, for a request without a plan."""
    both: bool = False
    """Whether the job trains with the nodes of both pools."""


class StepTaken(msgspec.Struct, frozen=True):
    job: JobId
    begun_ns: Nanoseconds
    ended_ns: Nanoseconds


class SliceSeen(msgspec.Struct, frozen=True):
    node: NodeId
    job: JobId
    phase: PhaseKind
    begun_ns: Nanoseconds
    ended_ns: Nanoseconds


class _SimulatedJob:
    """The process of one job: its present phase, and how much of that is left."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival, self.id = arrival, arrival.request.id
        self.life = 0
        self.steps_done = 0
        self.phase = _ROLLOUT
        self.left_ns: Nanoseconds | None = None
        self.permit: int | None = None
        self.began_ns = 0
        self.nodes: tuple[NodeId, ...] = ()
        self.stopping = False
        self.step_began_ns: Nanoseconds | None = None
        self.syncing = False
        self.placement = 0
        self.cold = True
        """Whether its residents have started since its last rollout."""

    @property
    def between_steps(self) -> bool:
        """Whether no part of the next step has been done."""
        begun = self.permit is not None or self.left_ns is not None or self.phase is _TRAIN or self.syncing
        return self.step_began_ns is None or not begun


class JobsWorld:
    """One world. `run` lives through it; what it has seen may be read afterwards."""

    def __init__(
        self,
        spec: PoolSpec,
        policies: ClusterPolicies,
        arrivals: Sequence[Arrival],
        *,
        limits: WaitLimits | None = None,
        seed: int = 0,
        checked: bool = False,
    ) -> None:
        self.limits = limits or WaitLimits()
        self.cluster = Cluster(spec, policies, self.limits, 0)
        self._rng, self._seed, self._checked = Random(seed), seed, checked
        self._journal: list[bytes] = [encode(ClusterOpening(0, spec, self.limits))]
        self._loop = EventLoop()
        self._jobs = {arrival.request.id: _SimulatedJob(arrival) for arrival in arrivals}
        self.events = 0
        self.steps: list[StepTaken] = []
        self.slices: list[SliceSeen] = []
        self.taken: dict[JobId, StepTaken] = {}
        """Each job's time from its first step's begin to its last one's end."""
        self.alone_ns: Counter[JobId] = Counter()
        """How long each job's steps would have taken alone."""
        self.cycles: dict[str, tuple[Nanoseconds, str]] = {}
        """The groups as they were when the last job had joined."""
        for arrival in arrivals:
            self._send(e.JobSubmitted(request=arrival.request), arrival.at_ns)

    @property
    def now_ns(self) -> Nanoseconds:
        return self._loop.now_ns

    @property
    def grouped_ns(self) -> dict[NodeId, Nanoseconds]:
        """How long each node was of a group."""
        found: dict[NodeId, Nanoseconds] = {}
        for name, node in self.cluster.state.nodes.items():
            own_ns = node.own_ns + (self.now_ns - node.own_since_ns if node.group is None else 0)
            found[name] = self.now_ns - node.opened_ns - own_ns
        return found

    @property
    def journal(self) -> Sequence[bytes]:
        return self._journal

    def run(self, horizon_ns: Nanoseconds = 10**19) -> None:
        """Run until no event is left. A wake-up comes before events of the same time. Raises `JobsWorldFailed`."""
        while True:
            wakeup_ns, at_ns = self.cluster.next_wakeup_ns(), self._loop.next_ns()
            if wakeup_ns is not None and (at_ns is None or wakeup_ns <= at_ns):
                self._loop.pass_to(wakeup_ns)
                self.tell(e.TimePassed())
            elif at_ns is not None:
                self._loop.step()
            else:
                break
            if self.now_ns > horizon_ns:
                raise JobsWorldFailed(f"seed {self._seed}: not over after {horizon_ns / S} s: {self.cluster.waits[:5]}")
        left = [
            job for job, record in self.cluster.jobs.items() if not record.ended and record.state != JobState.FAILED
        ]
        if left:
            raise JobsWorldFailed(f"seed {self._seed}: nothing happens any more, and {', '.join(left)} have not ended")
        if self.cluster.groups or self.cluster.permits or self.cluster.waits:
            raise JobsWorldFailed(f"seed {self._seed}: all jobs have ended, and not everything was given back")
        for job, record in self.cluster.jobs.items():
            done, cause = self._jobs[job].steps_done, record.reason
            if record.state is JobState.FINISHED and done < record.request.steps:
                raise JobsWorldFailed(f"seed {self._seed}: {job} is finished after {done} of its steps")
            if record.state is JobState.FAILED and not cause.startswith(NO_ROOM):
                raise JobsWorldFailed(f"seed {self._seed}: {job} failed, and nobody had killed it: {cause}")

    def tell(self, event: e.ClusterEvent) -> None:
        """Journals the event, hands it to the cluster, and carries out the cluster's commands."""
        self._journal.append(encode(ClusterEntry(self.now_ns, event)))
        self.events += 1
        commands = self.cluster.handle(event, self.now_ns)
        if self._checked:
            try:
                check(self.cluster)
            except AssertionError as error:
                raise JobsWorldFailed(f"seed {self._seed}: after {self.events} events: {event}: {error}") from error
        for command in commands:
            self._carry_out(command)

    def _send(self, event: e.ClusterEvent, after_ns: Nanoseconds = 0) -> None:
        self._loop.after(after_ns, lambda: self.tell(event))

    # What the cluster wants.

    def _carry_out(self, command: c.ClusterCommand) -> None:
        if isinstance(command, c.ReleaseNode):  # Of drained nodes: nobody drains one here.
            return
        job = self._jobs[command.job]
        match command:
            case c.ProfileJob():
                assert job.arrival.profile is not None
                self._send(e.JobProfiled(job=job.id, plan=job.arrival.profile), job.arrival.profile.solo_ns)
            case c.StartJob(placement=placement, restart=restart):
                self._start(job, placement, restart=restart)
            case c.StopJob():
                job.stopping = True
                if job.between_steps:
                    job.step_began_ns = None
                    self._stop(job)
            case c.EndJob():
                self._close_slices(job)
                job.life += 1
                job.permit, job.left_ns, job.stopping, job.step_began_ns = None, None, False, None
                job.phase = _ROLLOUT
            case c.GrantPermit(permit=permit):
                self._granted(job, permit)
            case c.RecallPermit(permit=permit) if job.permit == permit.number:
                assert job.left_ns is not None
                job.left_ns = max(1, job.left_ns - (self.now_ns - job.began_ns))
                self._yield(job, 0, finished=False)
            case c.MoveTail(permit=permit):
                self._send(e.TailMoved(job=job.id, permit=permit.number), S)
            case c.KillResident(node=node) if job.permit is not None and node in job.nodes:
                self._close_slices(job)
                job.permit = None
            case c.StartResident():
                self._later(job, 30 * S, lambda: self._ask(job))
            case _:
                pass

    def _later(self, job: _SimulatedJob, after_ns: Nanoseconds, act: Callable[[], None]) -> None:
        """Only if the process lives that long."""
        life = job.life
        self._loop.after(after_ns, lambda: act() if job.life == life else None)

    def _start(self, job: _SimulatedJob, placement: int, *, restart: bool) -> None:
        job.life += 1
        job.placement, job.cold = placement, True
        job.permit, job.left_ns, job.stopping, job.phase = None, None, False, _ROLLOUT
        job.step_began_ns = None

        def up() -> None:
            self._send(e.JobStarted(job=job.id, placement=placement))
            self._begin_step(job)

        self._later(job, job.arrival.request.restart_ns if restart else 0, up)
        groups = self.cluster.groups.values()
        self.cycles = {group.name: (group.cycle_ns, ", ".join(group.members)) for group in groups}

    def _begin_step(self, job: _SimulatedJob) -> None:
        job.step_began_ns = self.now_ns
        job.phase, job.syncing = _ROLLOUT, False
        self._ask(job)

    def _ask(self, job: _SimulatedJob) -> None:
        if job.permit is None and job.step_began_ns is not None and not job.syncing:
            both = job.arrival.both and job.phase is _TRAIN
            self._send(e.PhaseAsked(job=job.id, phase=job.phase, placement=job.placement, both=both))
            if self.cluster.jobs[job.id].state is not JobState.RUNNING:
                self._later(job, 60 * S, lambda: self._ask(job))  # Asked again until it is heard.

    def _plan(self, job: _SimulatedJob) -> PhasePlan:
        plan = self.cluster.request(job.id).plan
        assert plan is not None
        return plan

    def _granted(self, job: _SimulatedJob, permit: Permit) -> None:
        phase, number = permit.phase, permit.number
        if job.permit == number:
            self._close_slices(job)
            job.nodes, job.began_ns = permit.nodes, self.now_ns
            return
        if job.step_began_ns is None or job.syncing or job.phase is not phase:
            self._send(e.PermitYielded(job=job.id, permit=number, finished=False))
            return
        plan = self._plan(job)
        cold_ns = plan.rollout_cold_ns if phase is _ROLLOUT and (job.cold or not plan.rollout_parks) else 0
        switch_ns = cold_ns + (plan.rollout_switch_ns if phase is _ROLLOUT else plan.train_switch_ns)
        job.cold = job.cold and phase is not _ROLLOUT
        if job.left_ns is None:
            job.left_ns = self._drawn_ns(job, phase)
        job.permit, job.nodes, job.began_ns = number, permit.nodes, self.now_ns

        def over() -> None:
            if job.permit == number:
                self._yield(job, switch_ns, cold_ns=cold_ns, finished=True)

        self._later(job, switch_ns + job.left_ns, over)

    def _drawn_ns(self, job: _SimulatedJob, phase: PhaseKind) -> Nanoseconds:
        record, plan = self.cluster.jobs[job.id], self._plan(job)
        assert record.seat is not None
        train = len(self.cluster.groups[record.seat.group].train)
        planned_ns = plan.rollout_ns if phase is _ROLLOUT else record.request.train_ns(train)
        shortest, longest = job.arrival.shortest, job.arrival.longest
        drawn = shortest + (longest - shortest) * self._rng.random() ** 0.5 if shortest < longest else longest
        own_ns = planned_ns if phase is _ROLLOUT else plan.train_ns
        self.alone_ns[job.id] += int(own_ns * drawn)
        return max(1, int(planned_ns * drawn))

    def _yield(self, job: _SimulatedJob, switch_ns: Nanoseconds, *, cold_ns: Nanoseconds = 0, finished: bool) -> None:
        assert job.permit is not None
        self._close_slices(job)
        permit, job.permit = job.permit, None
        self._send(e.PermitYielded(job=job.id, permit=permit, finished=finished, switch_ns=switch_ns, cold_ns=cold_ns))
        if finished:
            job.left_ns = None
        if finished and job.phase is _TRAIN:
            job.syncing = True
            self._later(job, self._plan(job).sync_ns, lambda: self._end_step(job))
            return
        job.phase = _TRAIN if finished else job.phase
        self._ask(job)

    def _end_step(self, job: _SimulatedJob) -> None:
        assert job.step_began_ns is not None
        step = StepTaken(job.id, job.step_began_ns, self.now_ns)
        self.steps.append(step)
        self.taken[job.id] = StepTaken(job.id, self.taken.get(job.id, step).begun_ns, self.now_ns)
        self.alone_ns[job.id] += self._plan(job).sync_ns
        job.steps_done += 1
        job.step_began_ns = None
        self._send(e.JobProgressed(job=job.id, steps_done=job.steps_done))
        if job.steps_done >= self.cluster.request(job.id).steps:
            self._send(e.JobFinished(job=job.id))
        elif job.stopping:
            self._stop(job)
        else:
            self._begin_step(job)

    def _stop(self, job: _SimulatedJob) -> None:
        self._send(e.JobStopped(job=job.id, steps_done=job.steps_done))

    def _close_slices(self, job: _SimulatedJob) -> None:
        if job.permit is not None and not self._checked:
            for node in job.nodes:
                self.slices.append(SliceSeen(node, job.id, job.phase, job.began_ns, self.now_ns))
