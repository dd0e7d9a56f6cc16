"""Jobs at the grain of plans, each at the pace of its group's planned cycle: costs, admissions and planned slowdowns of
weeks in seconds.

Whose turn it is does not show; that is `elastic.simulation.jobs.phases`, whose steps last as long on average.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import msgspec

from elastic.core.cluster import ClusterPolicies, PoolSpec
from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.groups import PlannedMember
from elastic.core.cluster.types import JobId, JobState, Nanoseconds, PhaseKind
from elastic.simulation.jobs.phases import Arrival
from elastic.simulation.jobs.world import JobsWorld

NS_PER_H = 3_600_000_000_000
LOOKED_AT_NS = NS_PER_H
PhaseShares: TypeAlias = Callable[[JobId, float], tuple[float, float]]


class PlanStretch(msgspec.Struct, frozen=True):
    """A time in which nothing changed: who was active, and what an hour of the groups cost then."""

    begun_ns: Nanoseconds
    ended_ns: Nanoseconds
    jobs: frozenset[JobId]
    nano_usd_per_hour: int
    rollout_nodes: int
    train_nodes: int
    rollout_busy: float
    train_busy: float
    """Node-equivalents that compute, on average over a cycle."""


class JobOutcome(msgspec.Struct, frozen=True):
    """How a job fared. `slowdown` is its time from placement to end over that of its steps alone, restarts included;
    None for a job that did not finish."""

    job: JobId
    state: JobState
    slo: float
    slowdown: float | None
    how: str
    moves: int
    usd: float

    @property
    def met(self) -> bool:
        return self.slowdown is not None and self.slowdown <= self.slo * (1 + 1e-6)


class PlanWorld(JobsWorld):
    """One policy and one workload, from the first arrival until everything has ended.

    With `shares` phases take other times than planned: so much of the plan that came with the job, for rollouts and for
    training, once so much of all its steps is done. They are looked at anew, and told to the cluster, every
    `LOOKED_AT_NS`. A job's slowdown is over what its steps alone would so have taken.
    """

    def __init__(
        self,
        spec: PoolSpec,
        policies: ClusterPolicies,
        arrivals: Sequence[Arrival],
        *,
        shares: PhaseShares | None = None,
    ) -> None:
        super().__init__(spec, policies)
        self._shares = shares
        self._cycles_ns: dict[tuple[str, ...], Nanoseconds] = {}
        self._alone_ns: Counter[JobId] = Counter()
        self._passed_ns: Nanoseconds = 0
        """Until when steps are counted."""
        self._waits = 0
        self._looked_ns: Nanoseconds = -LOOKED_AT_NS
        self._arrivals = {arrival.request.id: arrival for arrival in arrivals}
        self._steps: dict[JobId, float] = {}
        """Steps done by those that run, parts of steps included."""
        self._kept: dict[JobId, float] = {}
        """The same of those that restart elsewhere."""
        self._ended_ns: dict[JobId, Nanoseconds] = {}
        self._accepted_ns: dict[JobId, Nanoseconds] = {}
        self.stretches: list[PlanStretch] = []
        self.commands: Counter[str] = Counter()
        for arrival in arrivals:
            self.loop.at(arrival.at_ns, partial(self.submit, arrival.request, self))

    def obey(self, command: c.ClusterCommand) -> None:
        self.commands[type(command).__name__] += 1
        match command:
            case c.StartJob(job=job, placement=placement, restart=restart):
                self._accepted_ns.setdefault(job, self.loop.now_ns)
                request = self.cluster.request(job)
                after_ns = request.moving_ns if restart else request.first_ns
                self.loop.after(after_ns, partial(self._started, job, placement))
            case c.StopJob(job=job):
                self.loop.after(0, partial(self._stopped, job))
            case _:
                pass

    def tell(self, event: e.ClusterEvent) -> None:
        self._pass()
        if not isinstance(event, e.JobProgressed):
            for job, done in self._steps.items():
                # At the time that the cluster knows, so that nothing falls due by it.
                self.cluster.handle(e.JobProgressed(job=job, steps_done=int(done)), self.cluster.now_ns)
        super().tell(event)
        self._await_next()

    def outcomes(self) -> list[JobOutcome]:
        found: list[JobOutcome] = []
        for job, record in self.cluster.jobs.items():
            slowdown = None
            if record.state is JobState.FINISHED:
                plan = record.request.plan
                assert plan is not None
                took_ns = self._ended_ns[job] - self._accepted_ns[job]
                alone_ns = self._alone_ns[job] if self._shares else plan.solo_ns * record.request.steps
                slowdown = took_ns / alone_ns
            found.append(
                JobOutcome(
                    job=job,
                    state=record.state,
                    slo=record.request.slo,
                    slowdown=slowdown,
                    how=record.how,
                    moves=record.moves,
                    usd=record.billed / NS_PER_H / 1e9,
                )
            )
        return found

    def _cycle_ns(self, job: JobId) -> Nanoseconds:
        """Return the cycle at the present phases. A group's cycle is computed once per membership and hour."""
        seat = self.cluster.jobs[job].seat
        assert seat is not None
        group = self.cluster.groups[seat.group]
        if self._shares is None:
            return group.cycle_ns
        key = (seat.group, *group.members)
        if key not in self._cycles_ns:
            members = [self._as_it_is(member) for member in group.members.values()]
            self._cycles_ns[key] = self.cluster.policies.placement.cycle(members)
        return self._cycles_ns[key]

    def _phases_ns(self, job: JobId) -> tuple[Nanoseconds, Nanoseconds]:
        assert self._shares is not None
        request = self._arrivals[job].request
        done = self._steps.get(job, self._kept.get(job, 0.0)) / request.steps
        rollout, train = self._shares(job, done)
        assert request.plan is not None
        return max(1, int(request.plan.rollout_ns * rollout)), max(1, int(request.plan.train_ns * train))

    def _as_it_is(self, member: PlannedMember) -> PlannedMember:
        request = self._arrivals[member.job].request
        rollout_ns, train_ns = self._phases_ns(member.job)
        assert request.plan is not None
        return msgspec.structs.replace(
            member,
            rollout_ns=rollout_ns + request.plan.switching_ns(PhaseKind.ROLLOUT),
            train_ns=train_ns + request.plan.switching_ns(PhaseKind.TRAIN),
        )

    def _await_next(self) -> None:
        """Wait for the next job's end, and until phases are looked at anew. What happens before is waited from anew."""
        now_ns = self.loop.now_ns
        self._waits += 1
        times = [
            now_ns + int(max(0.0, self.cluster.request(job).steps - done) * self._cycle_ns(job)) + 1
            for job, done in self._steps.items()
        ]
        if self._shares is not None and times:
            times.append(max(now_ns, self._looked_ns + LOOKED_AT_NS))
        if times:
            self.loop.at(min(times), partial(self._look, self._waits))

    def _look(self, waits: int) -> None:
        if waits != self._waits:
            return
        self._pass()
        now_ns = self.loop.now_ns
        for job in [job for job, done in self._steps.items() if done >= self.cluster.request(job).steps - 1e-6]:
            del self._steps[job]
            self._ended_ns[job] = now_ns
            self.tell(e.JobFinished(job=job))
        if self._shares is not None and now_ns >= self._looked_ns + LOOKED_AT_NS:
            self._tell_phases()
        self._await_next()

    def _tell_phases(self) -> None:
        self._looked_ns = self.loop.now_ns
        self._cycles_ns.clear()
        for job in list(self._steps):
            if job in self._steps:  # Who strays is stopped at once.
                rollout_ns, train_ns = self._phases_ns(job)
                done = int(self._steps[job])
                self.tell(e.JobProgressed(job=job, steps_done=done, rollout_ns=rollout_ns, train_ns=train_ns))

    def _pass(self) -> None:
        """Count the steps until now."""
        passed_ns = self.loop.now_ns - self._passed_ns
        if passed_ns > 0:
            self._note(self.loop.now_ns)
            steps = {job: passed_ns / self._cycle_ns(job) for job in self._steps}
            for job, done in steps.items():
                if self._shares is not None:
                    plan = self._arrivals[job].request.plan
                    assert plan is not None
                    self._alone_ns[job] += round(done * (sum(self._phases_ns(job)) + plan.sync_ns))
                self._steps[job] += done
            self._passed_ns = self.loop.now_ns

    def _note(self, until_ns: Nanoseconds) -> None:
        groups = self.cluster.groups.values()
        self.stretches.append(
            PlanStretch(
                self._passed_ns,
                until_ns,
                frozenset(job for group in groups for job in group.members),
                self.cluster.price_per_hour(),
                sum(len(group.rollout) for group in groups),
                sum(len(group.train) for group in groups),
                sum(sum(group.rollout_ns.values()) / group.cycle_ns for group in groups),
                sum(len(group.train) * group.train_ns / group.cycle_ns for group in groups),
            )
        )

    def _started(self, job: JobId, placement: int) -> None:
        self.tell(e.JobStarted(job=job, placement=placement))
        self._steps[job] = max(float(self.cluster.jobs[job].steps_done), self._kept.pop(job, 0.0))
        self._await_next()

    def _stopped(self, job: JobId) -> None:
        self._pass()
        self._kept[job] = self._steps.pop(job)
        self.tell(e.JobStopped(job=job, steps_done=int(self._kept[job])))
