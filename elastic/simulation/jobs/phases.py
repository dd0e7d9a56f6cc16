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
        self.arrival = arrival
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
            self._loop.at(arrival.at_ns, self._teller(e.JobSubmitted(request=arrival.request)))

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

    def _teller(self, event: e.ClusterEvent) -> Callable[[], None]:
        return lambda: self.tell(event)

    def _send(self, event: e.ClusterEvent, after_ns: Nanoseconds = 0) -> None:
        self._loop.after(after_ns, self._teller(event))

    # What the cluster wants.

    def _carry_out(self, command: c.ClusterCommand) -> None:
        job = self._jobs[command.job]
        match command:
            case c.ProfileJob():
                assert job.arrival.profile is not None
                self._send(e.JobProfiled(job=command.job, plan=job.arrival.profile), job.arrival.profile.solo_ns)
            case c.StartJob():
                self._start(command.job, command.placement, restart=command.restart)
            case c.StopJob():
                job.stopping = True
                if job.between_steps:
                    job.step_began_ns = None
                    self._stop(command.job)
            case c.EndJob():
                self._close_slices(command.job)
                job.life += 1
                job.permit, job.left_ns, job.stopping, job.step_began_ns = None, None, False, None
                job.phase = _ROLLOUT
            case c.GrantPermit():
                self._granted(command.job, command.permit)
            case c.RecallPermit():
                self._recalled(command.job, command.permit.number)
            case c.MoveTail():
                self._send(e.TailMoved(job=command.job, permit=command.permit.number), S)
            case c.KillResident():
                if job.permit is not None and command.node in job.nodes:
                    self._close_slices(command.job)
                    job.permit = None
            case c.StartResident():
                self._later(command.job, 30 * S, self._ask)
            case c.RejectJob():
                pass

    def _later(self, job: JobId, after_ns: Nanoseconds, act: Callable[[JobId], None]) -> None:
        """Only if the process lives that long."""
        life = self._jobs[job].life

        def do() -> None:
            if self._jobs[job].life == life:
                act(job)

        self._loop.after(after_ns, do)

    def _start(self, job: JobId, placement: int, *, restart: bool) -> None:
        state = self._jobs[job]
        state.life += 1
        state.placement = placement
        state.permit, state.left_ns, state.stopping, state.phase = None, None, False, _ROLLOUT
        state.step_began_ns = None
        after_ns = state.arrival.request.restart_ns if restart else 0

        def up(job: JobId) -> None:
            self._send(e.JobStarted(job=job, placement=placement))
            self._begin_step(job)

        self._later(job, after_ns, up)
        groups = self.cluster.groups.values()
        self.cycles = {group.name: (group.cycle_ns, ", ".join(group.members)) for group in groups}

    def _begin_step(self, job: JobId) -> None:
        self._jobs[job].step_began_ns = self.now_ns
        self._jobs[job].phase, self._jobs[job].syncing = _ROLLOUT, False
        self._ask(job)

    def _ask(self, job: JobId) -> None:
        state = self._jobs[job]
        if state.permit is None and state.step_began_ns is not None and not state.syncing:
            record = self.cluster.jobs[job]
            both = state.arrival.both and state.phase is _TRAIN
            self._send(e.PhaseAsked(job=job, phase=state.phase, placement=state.placement, both=both))
            if record.state is not JobState.RUNNING:
                self._later(job, 60 * S, self._ask)  # Asked again until it is heard.

    def _granted(self, job: JobId, permit: Permit) -> None:
        state, phase, number = self._jobs[job], permit.phase, permit.number
        if state.permit == number:
            self._close_slices(job)
            state.nodes, state.began_ns = permit.nodes, self.now_ns
            return
        request = self.cluster.request(job)
        assert request.plan is not None
        switch_ns = request.plan.rollout_switch_ns if phase is _ROLLOUT else request.plan.train_switch_ns
        if state.step_began_ns is None or state.syncing or state.phase is not phase:
            self._send(e.PermitYielded(job=job, permit=number, finished=False))
            return
        if state.left_ns is None:
            state.left_ns = self._drawn_ns(job, phase)
        state.permit, state.nodes, state.began_ns = number, permit.nodes, self.now_ns

        def over(job: JobId) -> None:
            if self._jobs[job].permit == number:
                self._yield(job, switch_ns, finished=True)

        self._later(job, switch_ns + state.left_ns, over)

    def _drawn_ns(self, job: JobId, phase: PhaseKind) -> Nanoseconds:
        state = self._jobs[job]
        record = self.cluster.jobs[job]
        request, plan = record.request, record.request.plan
        assert plan is not None
        assert record.seat is not None
        train = len(self.cluster.groups[record.seat.group].train)
        planned_ns = plan.rollout_ns if phase is _ROLLOUT else request.train_ns(train)
        shortest, longest = state.arrival.shortest, state.arrival.longest
        drawn = shortest + (longest - shortest) * self._rng.random() ** 0.5 if shortest < longest else longest
        own_ns = planned_ns if phase is _ROLLOUT else plan.train_ns
        self.alone_ns[job] += int(own_ns * drawn)
        return max(1, int(planned_ns * drawn))

    def _recalled(self, job: JobId, permit: int) -> None:
        state = self._jobs[job]
        if state.permit != permit:
            return
        assert state.left_ns is not None
        state.left_ns = max(1, state.left_ns - (self.now_ns - state.began_ns))
        self._yield(job, 0, finished=False)

    def _yield(self, job: JobId, switch_ns: Nanoseconds, *, finished: bool) -> None:
        state = self._jobs[job]
        assert state.permit is not None
        self._close_slices(job)
        permit, state.permit = state.permit, None
        self._send(e.PermitYielded(job=job, permit=permit, finished=finished, switch_ns=switch_ns))
        if not finished:
            self._ask(job)
            return
        state.left_ns = None
        if state.phase is _ROLLOUT:
            state.phase = _TRAIN
            self._ask(job)
            return
        plan = self.cluster.request(job).plan
        assert plan is not None
        state.syncing = True
        self._later(job, plan.sync_ns, self._end_step)

    def _end_step(self, job: JobId) -> None:
        state = self._jobs[job]
        assert state.step_began_ns is not None
        self.steps.append(StepTaken(job, state.step_began_ns, self.now_ns))
        first = self.taken.get(job, self.steps[-1])
        self.taken[job] = StepTaken(job, first.begun_ns, self.now_ns)
        plan = self.cluster.request(job).plan
        self.alone_ns[job] += 0 if plan is None else plan.sync_ns
        state.steps_done += 1
        state.step_began_ns = None
        self._send(e.JobProgressed(job=job, steps_done=state.steps_done))
        if state.steps_done >= self.cluster.request(job).steps:
            self._finish(job)
        elif state.stopping:
            self._stop(job)
        else:
            self._begin_step(job)

    def _finish(self, job: JobId) -> None:
        self._send(e.JobFinished(job=job))

    def _stop(self, job: JobId) -> None:
        self._send(e.JobStopped(job=job, steps_done=self._jobs[job].steps_done))

    def _close_slices(self, job: JobId) -> None:
        state = self._jobs[job]
        if state.permit is not None and not self._checked:
            for node in state.nodes:
                self.slices.append(SliceSeen(node, job, state.phase, state.began_ns, self.now_ns))
