"""The cluster: every event of a pool goes in, commands come out, and `next_wakeup_ns` says when to ask again.

The cluster owns jobs, groups, nodes, residents, permits and the devices' books. Policies decide where a job goes, when
a tail moves, which job has drifted and who pays. Nothing here reads a clock or does I/O: the same events at the same
times always lead to the same state. Sources: RollMux; Weave §4, 5.3.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.books import Books
from elastic.core.cluster.groups import JobGroup, planned
from elastic.core.cluster.policy import ClusterPolicies, PlacementChoice, PlacementRefusal
from elastic.core.cluster.rotation import Rotation
from elastic.core.cluster.state import ClusterState, JobRecord, NodeRecord
from elastic.core.cluster.types import (
    ClusterError,
    GroupName,
    JobId,
    JobRequest,
    JobState,
    KindName,
    Nanoseconds,
    NodeId,
    NodeKind,
    Permit,
    PhaseKind,
    PoolSpec,
    Seat,
    WaitLimits,
)
from elastic.core.timers import Timers, Wait

_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN
NO_ROOM = "no room for it in"
"""How the reason of a job begins that was queued for too long."""
STARTS_IN_VAIN = 5
"""After so many time slices in a row in which its residents did not start a job may fail, and after so many residents
in a row on one node that held more host memory than declared. A busy machine explains fewer."""


class Cluster:
    """The state machine of one pool. Callers change it through `handle` only; everything else is for reading."""

    def __init__(self, spec: PoolSpec, policies: ClusterPolicies, limits: WaitLimits, now_ns: Nanoseconds) -> None:
        self.spec, self.policies, self.limits = spec, policies, limits
        self.state = ClusterState(now_ns=now_ns, free={name: {} for name in spec.kinds})
        self.timers = Timers()
        self._out: list[c.ClusterCommand] = []
        self._left: dict[GroupName, None] = {}
        """Groups that members have just left: time slices may have come."""
        self.books = Books(self.state, spec, policies.charging)
        self._rotation = Rotation(self.state, self.books, self.timers, limits, policies.tail, self._out.append)
        for name, kind in spec.kinds.items():
            for number in range(1, kind.nodes + 1):
                self._add_node(f"{name}-{number}", name)
        self._handlers: Mapping[type[e.ClusterEvent], Callable[[Any], object]] = {
            e.TimePassed: lambda _: None,
            e.PoolSuspended: self._suspended,
            e.NodeJoined: self._node_joined,
            e.NodeLost: self._node_lost,
            e.NodeDrained: self._node_drained,
            e.JobSubmitted: self._submitted,
            e.ResubmitRequested: self._resubmitted,
            e.JobsForgotten: self._forgotten,
            e.RolloutProgressed: self._rotation.progressed,
            e.TailMoved: self._rotation.tail_moved,
        }
        self._of_jobs: Mapping[type[e.ClusterEvent], Callable[[JobRecord, Any], object]] = {
            e.QuotaChanged: self._quota_changed,
            e.JobProfiled: self._profiled,
            e.JobStarted: self._started,
            e.JobProgressed: self._progressed,
            e.JobFinished: lambda record, _: self._over(record, JobState.FINISHED, "all steps are done"),
            e.JobFailed: self._failed,
            e.CancelRequested: lambda record, _: self._over(record, JobState.CANCELLED, "cancelled"),
            e.JobStopped: self._stopped,
            e.PhaseAsked: self._asked,
            e.PermitYielded: self._yielded,
            e.ResidentLost: self._resident_lost,
            e.ResidencyMeasured: self._residency_measured,
        }
        """Events that are for jobs that the cluster has; of others they are ignored."""
        self._due: Mapping[str, Callable[[str], object]] = {
            "profile": lambda job: self._over(self.jobs[job], JobState.FAILED, "its step was not timed in time"),
            "queue": self._queue_overdue,
            "start": lambda job: self._fail(self.jobs[job], "it did not start in time"),
            "stop": self._stop_overdue,
            "time slice": self._rotation.pass_over,
            "permit": self._rotation.recall,
            "yield": self._yield_overdue,
            "regroup": lambda _: self._regroup(),
        }

    def handle(self, event: e.ClusterEvent, now_ns: Nanoseconds) -> list[c.ClusterCommand]:
        """Take one event; returns the commands for the shell, in order. `now_ns` never decreases."""
        self.state.now_ns = max(self.now_ns, now_ns)
        record = self.state.jobs.get(getattr(event, "job", ""))
        if type(event) in self._handlers:
            self._handlers[type(event)](event)
        elif record is not None:
            self._of_jobs[type(event)](record, event)
        for what, key in self.timers.pop_due(self.now_ns):
            self._due[what](key)
        for name in self._left:
            self._rotation.resume(name)
        self._left.clear()
        out = list(self._out)
        self._out.clear()
        return out

    def take_over(self, state: ClusterState, waits: Sequence[Wait]) -> None:
        """Put the cluster into the state of another one, as it was between two events."""
        for name in ClusterState.__struct_fields__:
            setattr(self.state, name, getattr(state, name))
        self._out.clear()
        self._left.clear()
        for wait in self.waits:
            self.timers.clear(wait.what, wait.key)
        for wait in waits:
            self.timers.set(wait.what, wait.key, wait.since_ns, wait.until_ns - wait.since_ns)

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """When to call `handle` with `TimePassed` if nothing else happens before."""
        return self.timers.next_ns()

    # What policies and people may read.

    @property
    def now_ns(self) -> Nanoseconds:
        return self.state.now_ns

    @property
    def groups(self) -> Mapping[GroupName, JobGroup]:
        return self.state.groups

    @property
    def jobs(self) -> Mapping[JobId, JobRecord]:
        return self.state.jobs

    def free(self, kind: KindName) -> int:
        return len(self.state.free[kind])

    def kind(self, node: NodeId) -> NodeKind:
        return self.spec.kinds[self.state.nodes[node].kind]

    @property
    def arrivals(self) -> int:
        return self.state.placements

    @property
    def waits(self) -> Sequence[Wait]:
        """Every wait: who waits for what, since when, until when."""
        return self.timers.waits()

    def request(self, job: JobId) -> JobRequest:
        return self.state.jobs[job].request

    def remaining_ns(self, job: JobId) -> Nanoseconds:
        record = self.state.jobs[job]
        seat = record.reserved or record.seat
        return 0 if seat is None else record.steps_left * self.state.groups[seat.group].cycle_ns

    def steps_left(self, job: JobId) -> int:
        return self.state.jobs[job].steps_left

    def limit_after_restart_ns(self, job: JobId) -> Nanoseconds:
        record = self.state.jobs[job]
        left_ns = record.left_ns(self.now_ns) - record.request.moving_ns
        return min(record.request.limit_ns, max(0, left_ns) // record.steps_left)

    def movable(self, job: JobId) -> bool:
        record = self.state.jobs[job]
        return record.state is JobState.RUNNING and not record.stopping

    def price_per_hour(self) -> int:
        """The price of an hour of all groups' nodes, in nano-dollars."""
        return sum(group.price(self.kind) for group in self.state.groups.values())

    def dry_run(self, request: JobRequest) -> tuple[PlacementChoice | None, Sequence[PlacementRefusal]]:
        """Return where a job would go now, and the reason for each group that it could not join.

        Raises `ClusterError` for a job that would be rejected.
        """
        self.refuse(request)
        return self._choice(request), self.policies.placement.refusals(request, self)

    def refuse(self, request: JobRequest) -> None:
        """Raise `ClusterError` for a job that would be rejected."""
        problem = self._problem(request)
        if problem:
            raise ClusterError(f"job {request.id}: {problem}")

    def _suspended(self, event: e.PoolSuspended) -> None:
        """Put off the deadlines of all who could not be heard. How long a job may queue is a promise to people."""
        self.timers.put_off(event.for_ns, ("queue",))
        for number, permit in self.state.permits.items():
            until_ns = permit.deadline_ns + event.for_ns
            self.state.permits[number] = msgspec.structs.replace(permit, deadline_ns=until_ns)

    # Nodes.

    def _add_node(self, node: NodeId, kind: KindName) -> None:
        phase, now_ns = self.spec.phases[kind], self.now_ns
        self.state.nodes[node] = NodeRecord(
            id=node, phase=phase, kind=kind, opened_ns=now_ns, settled_ns=now_ns, own_since_ns=now_ns
        )
        self.state.free[kind][node] = None

    def _node_joined(self, event: e.NodeJoined) -> None:
        if event.node not in self.state.nodes:
            self._add_node(event.node, event.kind)
            self._nodes_changed()

    def _node_lost(self, event: e.NodeLost) -> None:
        """Remove a node. Jobs with residents on it are placed anew and go on from their checkpoints."""
        node = self.state.nodes.get(event.node)
        if node is None:
            return
        theirs: list[JobRecord] = []
        if node.group is not None:
            group = self.state.groups[node.group]
            theirs = [
                self.state.jobs[job]
                for job, member in group.members.items()
                if event.node in group.train or event.node in member.nodes
            ]
        for record in theirs:
            self._emit(c.EndJob(job=record.request.id))
            self._vacate(record)
            record.to(JobState.SUBMITTED, self.now_ns, f"node {event.node} was lost")
        if event.node in self.state.nodes:
            self._remove(node)
        for record in theirs:
            self._consider(record)
        self._nodes_changed()

    def _nodes_changed(self) -> None:
        self._place_queued()
        for record in self.state.jobs.values():
            if record.state is JobState.QUEUED and record.quota is None:
                record.reason = self.short_of(record.request)

    def _node_drained(self, event: e.NodeDrained) -> None:
        """Have the jobs with places on a node stop, and be placed anew. A job that moves here already is told to stop
        by then; it is placed anew instead."""
        node = self.state.nodes.get(event.node)
        if node is None or node.draining:
            return
        node.draining = True
        if node.group is None:
            self._release(node)
            return
        group = self.state.groups[node.group]
        for job, member in group.members.items():
            record = self.state.jobs[job]
            if event.node in (*member.nodes, *group.train) and not record.stopping:
                self._stop(record)

    def _release(self, node: NodeRecord) -> None:
        self._remove(node)
        self._emit(c.ReleaseNode(node=node.id))

    def _remove(self, node: NodeRecord) -> None:
        """Remove a node of no group."""
        self.books.own(node)
        self.books.lost(node)
        self.state.free[node.kind].pop(node.id)
        del self.state.nodes[node.id]

    def _draining(self, place: Seat | PlacementChoice) -> bool:
        """Whether a node of this place is let go."""
        group = self.state.groups.get(place.group) if place.group is not None else None
        nodes = (*place.rollout, *(() if group is None else group.train))
        return any(self.state.nodes[node].draining for node in nodes)

    def _choice(self, request: JobRequest) -> PlacementChoice | None:
        """Return where the job goes; None if it has to wait, as also for a node to be let go."""
        choice = self.policies.placement.place(request, self)
        return None if choice is None or self._draining(choice) else choice

    def _take(self, kinds: Sequence[KindName], group: GroupName) -> tuple[NodeId, ...]:
        taken: list[NodeId] = []
        for kind in kinds:
            name = next(iter(self.state.free[kind]), None)
            assert name is not None, "a policy may not choose more nodes than are free"
            del self.state.free[kind][name]
            node = self.state.nodes[name]
            self.books.own(node)
            node.group = group
            taken.append(name)
        return tuple(taken)

    def _give_back(self, group: JobGroup, *nodes: NodeId) -> None:
        for name in nodes:
            node = self.state.nodes[name]
            self.books.settle(node)
            node.group, node.own_since_ns, node.used_ns = None, self.now_ns, {}
            self.state.free[node.kind][name] = None
            if node.draining:
                self._release(node)
        group.rollout = tuple(node for node in group.rollout if node not in nodes)
        group.train = tuple(node for node in group.train if node not in nodes)

    # Jobs come.

    def _submitted(self, event: e.JobSubmitted) -> None:
        request = event.request
        if request.id in self.state.jobs:
            return
        self.state.arrivals += 1
        record = JobRecord(request=request, arrival=self.state.arrivals, quota=event.quota)
        self.state.jobs[request.id] = record
        self._consider(record)

    def _quota_changed(self, record: JobRecord, event: e.QuotaChanged) -> None:
        if record.quota is None:
            return
        record.quota = event.quota
        if event.quota is not None:
            record.reason = event.quota.reason
            return
        self.timers.clear("queue", event.job)
        record.to(JobState.SUBMITTED, self.now_ns, "it is within its quota now")
        # Who has waited for room meanwhile goes before it: a flood that waits for one quota keeps no others out.
        self.state.jobs[event.job] = self.state.jobs.pop(event.job)
        self._consider(record)

    def _profiled(self, record: JobRecord, event: e.JobProfiled) -> None:
        if record.state is JobState.PROFILING:
            self.timers.clear("profile", event.job)
            record.request = msgspec.structs.replace(record.request, plan=event.plan)
            self._consider(record)

    def _resubmitted(self, event: e.ResubmitRequested) -> None:
        state, forgotten = self.state, event.forgotten
        if forgotten is not None and event.job not in state.jobs:
            record = state.jobs[event.job] = copy.deepcopy(forgotten)
            record.billed = int(event.billed)
            state.forgotten_billed -= record.billed
        record = state.jobs.get(event.job)
        if record is not None and record.state is JobState.FAILED:
            record.quota = event.quota
            self._resubmit(record, "resubmitted")

    def _resubmit(self, record: JobRecord, cause: str) -> None:
        self.state.over.pop(record.request.id, None)
        record.resubmissions += 1
        record.to(JobState.SUBMITTED, self.now_ns, cause)
        self._consider(record)

    def _forgotten(self, event: e.JobsForgotten) -> None:
        for job in event.jobs:
            if job in self.state.over:
                del self.state.over[job]
                self.state.forgotten_billed += self.state.jobs.pop(job).billed

    def _consider(self, record: JobRecord) -> None:
        """Reject a job that can never run, queue a job beyond its quota, time a job of unknown length, place a job that
        fits, and queue any other."""
        job = record.request.id
        problem = self._problem(record.request)
        if problem:
            self._reject(record, problem)
            return
        if record.quota is not None:
            self._queue(record, record.quota.reason)
            return
        if record.request.plan is None:
            record.to(JobState.PROFILING, self.now_ns, "its phases are not known yet")
            self.timers.set("profile", job, self.now_ns, self.limits.profile_ns)
            self._emit(c.ProfileJob(job=job))
            return
        self.state.placements += 1
        choice = self._choice(record.request)
        if choice is None:
            self._queue(record, self.short_of(record.request))
        else:
            self._place(record, choice)

    def _queue(self, record: JobRecord, reason: str) -> None:
        record.to(JobState.QUEUED, self.now_ns, reason)
        self.timers.set("queue", record.request.id, self.now_ns, self.limits.queue_ns)

    def _queue_overdue(self, job: JobId) -> None:
        record = self.jobs[job]
        beyond = "" if record.quota is None else f"; its quota did not allow it: {record.quota.reason}"
        self._reject(record, f"{NO_ROOM} {self.limits.queue_ns / 3.6e12:.6g} h{beyond}")

    def _problem(self, request: JobRequest) -> str:
        """Return why no pool of this kind can ever take the job; empty if one can."""
        for phase, host_bytes in ((_ROLLOUT, request.rollout_bytes), (_TRAIN, request.train_bytes)):
            memory = max(kind.memory_bytes for kind in self.spec.of(phase))
            if host_bytes > memory:
                return f"it fits no {phase} node: needed {host_bytes} bytes of host memory; largest: {memory}"
        gpus = max(kind.gpus for kind in self.spec.rollout)
        if request.rollout_gpus > gpus:
            return f"it fits no rollout node: needed {request.rollout_gpus} GPUs for a worker; largest: {gpus}"
        most = {kind.name: self._most(kind) for kind in self.spec.kinds.values()}
        rollout = sum(most[kind.name] for kind in self.spec.rollout if request.fits(kind, _ROLLOUT))
        if request.rollout_nodes > rollout:
            return f"it fits no pool of this size: needed {request.rollout_nodes} rollout nodes; largest: {rollout}"
        trains = [kind for kind in self.spec.train if request.fits(kind, _TRAIN)]
        if not any(request.train_nodes_of(kind) <= most[kind.name] for kind in trains):
            needed, what, largest = request.train_nodes, "train nodes", max(most[kind.name] for kind in trains)
            if request.train_gpus > (gpus := max(most[kind.name] * kind.gpus for kind in trains)):
                needed, what, largest = request.train_gpus, "GPUs for its trainer's ranks, on train nodes", gpus
            alike = " of one kind" if len(self.spec.train) > 1 else ""
            if len(trains) < len(self.spec.train):
                alike += f" with {request.train_bytes} bytes of host memory"
            return f"it fits no pool of this size: needed {needed} {what}{alike}; largest: {largest}"
        if request.plan is not None and request.alone_ns > request.limit_ns:
            least = -(-request.alone_ns * 1000 // request.plan.solo_ns) / 1000
            return (
                f"it cannot keep its slo of {request.slo:.6g} even alone, switching included; it could keep {least:.6g}"
            )
        return ""

    def declared_bytes(self, record: JobRecord, phase: PhaseKind) -> int:
        """Return what a node of the job's place may hold of its state of a phase."""
        if phase is _ROLLOUT or record.seat is None:
            return record.request.rollout_bytes if phase is _ROLLOUT else record.request.train_bytes
        return self.groups[record.seat.group].members[record.request.id].train_bytes

    def _most(self, kind: NodeKind) -> int:
        """Return how many nodes of a kind there are, or were at first, if those were more."""
        return max(kind.nodes, sum(node.kind == kind.name for node in self.state.nodes.values()))

    def short_of(self, request: JobRequest) -> str:
        """Return why the job has to wait."""
        there = {node.kind for node in self.state.nodes.values()}
        gone = [kind for kind in self.spec.kinds.values() if kind.name not in there]
        away = ", ".join(f"{kind.name}{f' at site {kind.site}' if kind.site else ''}" for kind in gone)
        rollout = sum(self.free(kind.name) for kind in self.spec.rollout if request.fits(kind, _ROLLOUT))
        trains = [
            (self.free(kind.name), request.train_nodes_of(kind))
            for kind in self.spec.train
            if request.fits(kind, _TRAIN)
        ]
        free, needed = max(trains, key=lambda one: one[0] - one[1], default=(0, request.train_nodes))
        return (
            f"no group takes it, and of {request.rollout_nodes} rollout and {needed} train nodes for one "
            f"of its own {rollout} and {free} are free"
            f"{f'; all nodes are away of {away}' if away else ''}"
        )

    def _place(self, record: JobRecord, choice: PlacementChoice) -> None:
        job = record.request.id
        self.timers.clear("queue", job)
        seat = self._seat(record, choice, None)
        record.seat, record.how = seat, choice.how
        record.accepted_ns, record.accepted_steps = self.now_ns, record.steps_done
        record.to(JobState.PLACED, self.now_ns, f"{choice.how} in {seat.group}")
        self._start(record, restart=record.steps_done > 0)
        self._look_for_moves(seat.group)

    def _seat(self, record: JobRecord, choice: PlacementChoice, limit_ns: Nanoseconds | None) -> Seat:
        """Make the job a member of the group that was chosen for it."""
        state = self.state
        if choice.group is None:
            state.group_numbers += 1
            name = f"group-{state.group_numbers}"
            group = JobGroup(name=name, train=self._take(choice.train, name), rollout=())
            state.groups[name], state.billed_ns[name] = group, self.now_ns
        else:
            name, group = choice.group, state.groups[choice.group]
            self.books.bill(name)
        new = self._take(choice.new, name)
        group.rollout = (*group.rollout, *new)
        nodes = (*choice.rollout, *new)
        member = planned(record.request, len(group.train), self.kind(group.train[0]), nodes, limit_ns)
        group.members[record.request.id] = member
        group.follow(self.policies.placement.cycle)
        for node in nodes:
            state.nodes[node].residents[record.request.id] = record.request.rollout_bytes
        for node in group.train:
            state.nodes[node].residents[record.request.id] = member.train_bytes
        return Seat(name, nodes)

    def _start(self, record: JobRecord, *, restart: bool) -> None:
        assert record.seat is not None
        self.state.placements += 1
        record.placement = self.state.placements
        job = record.request.id
        train = self.state.groups[record.seat.group].train
        self.timers.set("start", job, self.now_ns, self.limits.start_ns + record.request.restart_ns)
        self._emit(c.StartJob(job=job, seat=record.seat, train=train, placement=record.placement, restart=restart))

    def _started(self, record: JobRecord, event: e.JobStarted) -> None:
        if record.state is not JobState.PLACED or record.placement != event.placement:
            return
        self.timers.clear("start", event.job)
        record.to(JobState.RUNNING, self.now_ns, "its residents are up")
        self._rotation.join(record)

    def _place_queued(self) -> None:
        """Place queued jobs in the order of their arrival."""
        for record in list(self.state.jobs.values()):
            if record.state is JobState.QUEUED and record.quota is None:
                choice = self._choice(record.request)
                if choice is not None:
                    self._place(record, choice)

    # Jobs go on.

    def _progressed(self, record: JobRecord, event: e.JobProgressed) -> None:
        if event.steps_done > record.steps_done:
            record.overgrown.clear()
        record.steps_done = max(record.steps_done, min(event.steps_done, record.request.steps))
        if event.rollout_ns is not None and event.train_ns is not None and record.seat is not None:
            record.measured_ns = {_ROLLOUT: event.rollout_ns, _TRAIN: event.train_ns}
            self._watch_drift(record)

    def _asked(self, record: JobRecord, event: e.PhaseAsked) -> None:
        if event.placement in (None, record.placement) and record.state is JobState.RUNNING:
            self._rotation.ask(record, event.phase, both=event.both)

    def _yielded(self, record: JobRecord, event: e.PermitYielded) -> None:
        permit = self.state.permits.get(event.permit)
        if permit is None or permit.job != event.job:
            return
        phase, slice_ns = permit.phase, self._rotation.yielded(permit, event)
        if permit.both:
            return  # A phase with the nodes of both pools is none of the two that are planned.
        if event.cold_ns and phase is _ROLLOUT:
            record.cold_ns = _mean_lately(record.cold_ns or None, event.cold_ns)
            record.parks = record.began_cold or _ROLLOUT in record.cold
        record.phase_ns += max(0, slice_ns - event.switch_ns)
        if event.finished:
            took_ns, record.phase_ns = record.phase_ns, 0
            record.measured_ns[phase] = _mean_lately(record.measured_ns.get(phase), took_ns)
            if phase is _TRAIN:
                self._watch_drift(record)

    def _yield_overdue(self, number: str) -> None:
        """End a permit that was not yielded in time. The job fails if its residents have not started in several time
        slices, and the SLOs of the group's other jobs allow it no longer one."""
        permit = self.permits[int(number)]
        record, took_ns = self.jobs[permit.job], self.now_ns - permit.since_ns
        before_ns = record.patience_ns
        self._rotation.kill(number)
        if record.in_vain >= STARTS_IN_VAIN and record.patience_ns <= before_ns:
            cause = f"its residents did not start in {record.in_vain} time slices, the last of {took_ns / 1e9:.0f} s"
            record.patience_ns = record.in_vain = 0
            self._fail(record, cause)

    def _watch_drift(self, record: JobRecord) -> None:
        assert record.seat is not None
        group = self.state.groups[record.seat.group]
        measured = {
            job: (found[_ROLLOUT] + (0 if member.parks else member.cold_ns), found[_TRAIN])
            for job in group.members
            if len(found := (member := self.state.jobs[job]).measured_ns) == len(PhaseKind)
        }
        job = self.policies.drift.strays(group, measured)
        if job is not None and self.movable(job):
            self._stop(self.state.jobs[job])

    def _stop(self, record: JobRecord) -> None:
        job = record.request.id
        record.stopping = True
        wait_ns = self.limits.stop_ns + 2 * record.request.limit_ns
        self.timers.set("stop", job, self.now_ns, wait_ns)
        self._emit(c.StopJob(job=job))

    def _stop_overdue(self, job: JobId) -> None:
        self._emit(c.EndJob(job=job))
        self._go_on_elsewhere(self.state.jobs[job])

    def _stopped(self, record: JobRecord, event: e.JobStopped) -> None:
        if record.stopping:
            record.steps_done = max(record.steps_done, min(event.steps_done, record.request.steps))
            self._go_on_elsewhere(record)

    def _go_on_elsewhere(self, record: JobRecord) -> None:
        """Move a stopped job to its reserved place. Without one that lasts, it arrives anew with its measured plan."""
        seat = record.reserved
        if seat is None or self._draining(seat):
            cause = "placed anew, as a node of its place is drained"
            if not any(self._draining(each) for each in (record.seat, seat) if each is not None):
                record.request = self._replanned(record)
                cause = "placed anew with the plan that was measured"
            record.measured_ns = {}
            self._vacate(record)
            record.to(JobState.SUBMITTED, self.now_ns, cause)
            self._consider(record)
        else:
            record.reserved = None
            self._vacate(record)
            record.seat = seat
            record.moves += 1
            record.to(JobState.PLACED, self.now_ns, f"moved to {seat.group}")
            self._start(record, restart=True)
        self._place_queued()

    def _replanned(self, record: JobRecord) -> JobRequest:
        """Return the job's request with the times of phases and cold starts lately measured in its group."""
        request, measured = record.request, record.measured_ns
        plan, seat = request.plan, record.seat
        if plan is None or seat is None or len(measured) < len(PhaseKind):
            return request
        train = self.state.groups[seat.group].train
        train_planned_ns = request.train_ns(len(train), self.kind(train[0]))
        replanned = msgspec.structs.replace(
            plan,
            rollout_ns=max(1, measured[_ROLLOUT]),
            train_ns=max(1, plan.train_ns * measured[_TRAIN] // train_planned_ns),
            rollout_cold_ns=record.cold_ns or plan.rollout_cold_ns,
            rollout_parks=record.parks if record.cold_ns else plan.rollout_parks,
        )
        return msgspec.structs.replace(request, plan=replanned)

    # Jobs leave.

    def _failed(self, record: JobRecord, event: e.JobFailed) -> None:
        if event.placement in (None, record.placement):
            self._fail(record, event.cause)

    def _fail(self, record: JobRecord, cause: str) -> None:
        if not self._over(record, JobState.FAILED, cause):
            return
        if record.resubmissions < record.request.max_resubmissions and record.request.plan is not None:
            self._resubmit(record, "resubmitted after a failure")

    def _reject(self, record: JobRecord, reason: str) -> None:
        """Reject a job that has never had a place. One that had, and may have a checkpoint, fails: it can be
        resubmitted."""
        job = record.request.id
        self.timers.clear("queue", job)
        record.quota = None
        state = JobState.FAILED if record.placement else JobState.REJECTED
        record.to(state, self.now_ns, reason)
        self.state.over[job] = None
        if state is JobState.REJECTED:
            self._emit(c.RejectJob(job=job, reason=reason))

    def _over(self, record: JobRecord, state: JobState, cause: str) -> bool:
        """End the job in this cluster, if it has not ended."""
        job = record.request.id
        if record.state is state or record.ended:
            return False
        if state is JobState.FINISHED and record.state is not JobState.RUNNING:
            return False
        if state is JobState.FAILED and record.state in (JobState.QUEUED, JobState.SUBMITTED):
            return False
        if record.state is JobState.FAILED and state is not JobState.SUBMITTED:
            return False
        for what in ("profile", "queue", "start"):
            self.timers.clear(what, job)
        if state is JobState.FINISHED:
            record.steps_done = record.request.steps
        elif record.seat is not None:
            self._emit(c.EndJob(job=job))
        self._vacate(record)
        record.quota = None
        record.to(state, self.now_ns, cause)
        self.state.over[job] = None
        self._place_queued()
        return True

    def _vacate(self, record: JobRecord) -> None:
        """Free everything that the job holds, including a reserved place."""
        job = record.request.id
        for what in ("stop", "start", "time slice"):
            self.timers.clear(what, job)
        record.stopping = False
        seats = [seat for seat in (record.seat, record.reserved) if seat is not None]
        if record.seat is not None:
            self._rotation.leave(record)
        record.seat = record.reserved = None
        for seat in seats:
            self._unseat(job, seat)

    def _unseat(self, job: JobId, seat: Seat) -> None:
        state, group = self.state, self.state.groups[seat.group]
        self.books.bill(seat.group)
        for node in (*group.train, *seat.rollout):
            state.nodes[node].residents.pop(job, None)
        del group.members[job]
        pinned = {node for member in group.members.values() for node in member.nodes}
        self._give_back(group, *(node for node in group.rollout if node not in pinned))
        if group.members:
            group.follow(self.policies.placement.cycle)
            self._left[seat.group] = None
        else:
            self._give_back(group, *group.train)
            del state.groups[seat.group], state.billed_ns[seat.group]
        self._look_for_moves(seat.group)

    # Jobs come together.

    def _look_for_moves(self, group: GroupName) -> None:
        """Schedule a search for moves at the next wake-up. A search never delays an arrival."""
        changed = self.state.changed
        if group not in self.state.groups:
            changed[:] = [name for name in changed if name != group]
        elif group not in changed:
            changed.append(group)
        self.timers.set("regroup", "", self.now_ns, 1)

    def _regroup(self) -> None:
        changed, self.state.changed = self.state.changed, []
        moves = self.policies.placement.relocations(self, changed)
        if any(self._draining(move.to) for move in moves):
            return  # They are looked for again once the node is gone.
        for move in moves:
            record = self.state.jobs[move.job]
            assert self.movable(move.job), "a policy may move only those that run"
            limit_ns = self.limit_after_restart_ns(move.job)
            record.reserved = self._seat(record, move.to, limit_ns)
            self._stop(record)

    # Residents.

    def _resident_lost(self, record: JobRecord, event: e.ResidentLost) -> None:
        """Start the process anew, without a device. A slice that it computed in ends when the job says so, or at its
        deadline."""
        node = self.state.nodes.get(event.node)
        if node is not None and event.job in node.residents:
            self._rotation.chill(record, node.phase)
            self._emit(c.StartResident(job=event.job, node=event.node))

    def _residency_measured(self, record: JobRecord, event: e.ResidencyMeasured) -> None:
        """Record a resident's host memory. A resident that exceeds its declaration is ended; its neighbours are not.
        Its job fails once that has happened several times without a step between."""
        node = self.state.nodes.get(event.node)
        if node is None or event.job not in node.residents:
            return
        declared = self.declared_bytes(record, node.phase)
        if event.host_bytes > declared:
            reason = f"it holds {event.host_bytes} bytes of host memory on {event.node}; declared: {declared}"
            record.overgrown[event.node] = times = record.overgrown.get(event.node, 0) + 1
            if times >= STARTS_IN_VAIN:
                record.overgrown.clear()
                self._fail(record, f"{times} residents in a row were ended, the last because {reason}")
                return
            self._emit(c.KillResident(job=event.job, node=event.node, reason=reason))
            self._rotation.chill(record, node.phase)
            self._emit(c.StartResident(job=event.job, node=event.node))

    def _emit(self, command: c.ClusterCommand) -> None:
        self._out.append(command)

    @property
    def permits(self) -> Mapping[int, Permit]:
        return self.state.permits


def _mean_lately(before_ns: Nanoseconds | None, now_ns: Nanoseconds) -> Nanoseconds:
    return now_ns if before_ns is None else (3 * before_ns + now_ns) // 4
