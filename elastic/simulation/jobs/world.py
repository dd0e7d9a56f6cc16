"""Many jobs on one pool on virtual time, where nothing goes wrong: the real `Cluster`, and jobs that do as it commands.

How closely a job is modelled is its own affair: phase by phase (`elastic.simulation.jobs.phases`), at the pace of its
group's plan (`elastic.simulation.jobs.plans`), or token by token (`elastic.simulation.performance.pool`).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from elastic.core.cluster import Cluster, ClusterPolicies, JobRequest, PoolSpec, WaitLimits
from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.cluster import NO_ROOM
from elastic.core.cluster.history import ClusterEntry, ClusterOpening, encode
from elastic.core.cluster.types import JobId, JobState, Nanoseconds, NodeId, PhaseKind
from elastic.simulation.loop import EventLoop

S = 1_000_000_000


class JobsWorldFailed(AssertionError):
    """The world came to no end, or to a wrong one."""


class JobProcess(Protocol):
    """A job, as its pool sees it."""

    def obey(self, command: c.ClusterCommand) -> None: ...


@dataclass(slots=True)
class PhaseSeen:
    """A slice, from its grant until its devices were free."""

    job: JobId
    phase: PhaseKind
    nodes: tuple[NodeId, ...]
    began_ns: Nanoseconds
    ended_ns: Nanoseconds = 0
    finished: bool = False
    """Whether the phase was complete, so that it needed no further slice."""


class JobsWorld:
    """One world. `run` lives through it; what it has seen may be read afterwards. `handled` is told of each event once
    the cluster's commands are carried out."""

    def __init__(
        self,
        spec: PoolSpec,
        policies: ClusterPolicies,
        limits: WaitLimits | None = None,
        *,
        handled: Callable[[Cluster, e.ClusterEvent], None] = lambda _, __: None,
    ) -> None:
        limits = limits or WaitLimits()
        self.loop = EventLoop()
        self.cluster = Cluster(spec, policies, limits, 0)
        self.journal = [encode(ClusterOpening(0, spec, limits))]
        self.phases: list[PhaseSeen] = []
        self._handled = handled
        self._jobs: dict[JobId, JobProcess] = {}
        self._open: dict[int, PhaseSeen] = {}
        self._finished: set[JobId] = set()
        """Those that have said so."""
        self._events = deque[e.ClusterEvent]()

    def submit(self, request: JobRequest, job: JobProcess) -> None:
        self._jobs[request.id] = job
        self.tell(e.JobSubmitted(request=request))

    def tell(self, event: e.ClusterEvent) -> None:
        """Journal the event, give it to the cluster, and have its commands carried out, one event after the other."""
        self._events.append(event)
        if len(self._events) == 1:
            while self._events:
                self._handle(self._events[0])
                self._events.popleft()

    def send(self, event: e.ClusterEvent, after_ns: Nanoseconds = 0) -> None:
        """Tell of the event then."""
        self.loop.after(after_ns, lambda: self.tell(event))

    def run(self, horizon_ns: Nanoseconds = 10**19) -> Self:
        """Live until nothing is left to happen. A wake-up comes before events of the same time. Raises
        `JobsWorldFailed`."""
        while True:
            wakeup_ns, at_ns = self.cluster.next_wakeup_ns(), self.loop.next_ns()
            if wakeup_ns is not None and (at_ns is None or wakeup_ns <= at_ns):
                self.loop.pass_to(wakeup_ns)
                self.tell(e.TimePassed())
            elif at_ns is not None:
                self.loop.step()
            else:
                break
            if self.loop.now_ns > horizon_ns:
                raise JobsWorldFailed(f"not over after {horizon_ns / S:g} s: {self.cluster.waits[:5]}")
        self._check_end()
        return self

    def _handle(self, event: e.ClusterEvent) -> None:
        now_ns = self.loop.now_ns
        self.journal.append(encode(ClusterEntry(now_ns, event)))
        if isinstance(event, e.PermitYielded) and event.permit in self._open:
            self._open[event.permit].finished = event.finished
        if isinstance(event, e.JobFinished):
            self._finished.add(event.job)
        for command in self.cluster.handle(event, now_ns):
            if isinstance(command, c.ReleaseNode):  # Of drained nodes: nobody drains one here.
                continue
            if isinstance(command, c.GrantPermit) and command.permit.number not in self._open:
                permit = command.permit
                seen = self._open[permit.number] = PhaseSeen(permit.job, permit.phase, permit.nodes, now_ns)
                self.phases.append(seen)
            self._jobs[command.job].obey(command)
        for number in [number for number in self._open if number not in self.cluster.permits]:
            self._open.pop(number).ended_ns = now_ns
        self._handled(self.cluster, event)

    def _check_end(self) -> None:
        cluster = self.cluster
        left = [job for job, record in cluster.jobs.items() if not record.over]
        if left:
            raise JobsWorldFailed(f"nothing happens any more, and {', '.join(left)} have not ended")
        if cluster.groups or cluster.permits or cluster.waits:
            raise JobsWorldFailed("all jobs have ended, and not everything was given back")
        for job, record in cluster.jobs.items():
            if record.state is JobState.FINISHED and job not in self._finished:
                raise JobsWorldFailed(f"{job} is finished, and has not said so")
            if record.state is JobState.FAILED and not record.reason.startswith(NO_ROOM):
                raise JobsWorldFailed(f"{job} failed, and nobody had killed it: {record.reason}")
