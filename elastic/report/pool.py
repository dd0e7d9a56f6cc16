"""What a pool's journal tells beyond its last state: every turn, what each admission cost, how long cycles took.

The events are replayed to the cluster, and the cluster is looked at after each: a simulated pool and a live one have
the same history.
"""

import copy
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from elastic.core.cluster import Cluster, ClusterPolicies
from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.history import ClusterEntry, decoded
from elastic.core.cluster.policy import BillShare
from elastic.core.cluster.state import JobRecord, NodeRecord
from elastic.core.cluster.types import (
    NS_PER_HOUR,
    DeviceAccount,
    JobId,
    JobState,
    Nanoseconds,
    NodeId,
    Permit,
    PhaseKind,
    PoolSpec,
)
from elastic.pool.journal import NotedDeath
from elastic.pool.status import NANO_USD, bills, saved_if_left, story_of, usd
from elastic.report.jobs import GroupCycle, NodeSlice, PooledJob, PooledKind, PooledNode, PoolMark, PoolReport, shares

NS_PER_S = 1_000_000_000
_ROLLOUT = PhaseKind.ROLLOUT
_OFTEN = (e.PhaseAsked, e.PermitYielded, e.JobProgressed, e.RolloutProgressed, e.TailMoved, e.ResidencyMeasured)
"""Events that place no job."""
_STEPS = (e.JobProgressed, e.JobFinished)
_LOST = (JobState.FAILED, JobState.CANCELLED, JobState.REJECTED)


class JobTimeline(msgspec.Struct, kw_only=True):
    """Times of a job that the cluster does not keep. `alone_ns`: its phases without switching. Its start began at
    `started_ns` (alone it takes as long), and the job was up at `begun_ns`. `phase_switch_ns`: a switch for each
    finished phase, which a job has on nodes of its own, too."""

    begun_ns: Nanoseconds | None = None
    started_ns: Nanoseconds | None = None
    stepped_ns: Nanoseconds | None = None
    alone_ns: Nanoseconds = 0
    switch_ns: Nanoseconds = 0
    phase_switch_ns: Nanoseconds = 0
    cold_ns: Nanoseconds = 0
    switches: int = 0
    phases_ns: dict[PhaseKind, list[Nanoseconds]] = {}
    cycles_ns: list[Nanoseconds] = []
    planned: int = 0
    """What its steps would have cost at its groups' planned cycles, in nano-dollars times nanoseconds per hour."""
    marginal: int | None = None
    alone_price: int | None = None
    """Of an hour of as many nodes as it asks for, of those that it had last, in nano-dollars."""


class TurnUnderWay(msgspec.Struct, kw_only=True):
    job: JobId
    phase: PhaseKind
    since_ns: Nanoseconds
    nodes: dict[NodeId, Nanoseconds]


class PoolTimeline:
    """The history of a pool, event by event; `cluster` is its last state."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.slices: list[NodeSlice] = []
        self.marks: list[PoolMark] = []
        self.jobs: defaultdict[JobId, JobTimeline] = defaultdict(JobTimeline)
        self.forgotten: dict[JobId, JobRecord] = {}
        """Jobs that have left the cluster, as they were then."""
        self.gone: list[tuple[NodeRecord, Nanoseconds]] = []
        """Nodes that were lost, as they were then, and how long each was of a group."""
        self.cycles: list[GroupCycle] = []
        """The groups as they were when the last job had joined."""
        self._turns: dict[int, TurnUnderWay] = {}
        self._goes_on: dict[tuple[JobId, PhaseKind], Nanoseconds] = {}
        """Phases that were not finished in their last slice, and how long they have taken."""
        self._rollout_ns: dict[JobId, Nanoseconds] = {}

    @property
    def spec(self) -> PoolSpec:
        return self.cluster.spec

    def take(self, entry: ClusterEntry) -> None:
        event, cluster = entry.event, self.cluster
        if isinstance(event, e.NodeLost) and event.node in cluster.state.nodes:
            node = cluster.state.nodes[event.node]
            self.gone.append((_settled(node, entry.now_ns), _grouped_ns(node, entry.now_ns)))
        if isinstance(event, e.JobsForgotten):
            self.forgotten |= {job: cluster.jobs[job] for job in event.jobs if job in cluster.jobs}
        if isinstance(event, e.ResubmitRequested):
            self.forgotten.pop(event.job, None)
        often = isinstance(event, _OFTEN)
        before = set[NodeId]() if often else self._grouped()
        running = self._runs(event)
        record = cluster.jobs.get(getattr(event, "job", "")) if isinstance(event, _STEPS) else None
        stepped, planned = (0, 0) if record is None else (record.steps_done, self._planned(record))
        commands = cluster.handle(event, entry.now_ns)
        if record is not None:
            self.jobs[record.request.id].planned += planned * (record.steps_done - stepped)
        now_ns = cluster.now_ns
        self._close(event, now_ns)
        for command in commands:
            self._command(command, before, now_ns)
        if isinstance(event, e.JobStarted) and self._runs(event) and not running:
            seen = self.jobs[event.job]
            seen.begun_ns = now_ns if seen.begun_ns is None else seen.begun_ns
            self._rollout_ns.pop(event.job, None)
        if isinstance(event, e.JobProgressed) and event.job in cluster.jobs:
            self.jobs[event.job].stepped_ns = now_ns
        self._mark(event, now_ns)

    def _grouped(self) -> set[NodeId]:
        return {name for name, node in self.cluster.state.nodes.items() if node.group is not None}

    def _planned(self, record: JobRecord) -> int:
        """Return what a cycle of the job's group costs it as planned, in nano-dollars times nanoseconds per hour."""
        if record.seat is None:
            return 0
        group, books = self.cluster.groups[record.seat.group], self.cluster.books
        train = sum(map(self._price, group.train))
        shares = [
            BillShare(
                job=job,
                used=member.rollout_ns * sum(map(self._price, member.nodes)) + member.train_ns * train,
                alone=books.price_alone(group.name, job) * group.cycle_ns,
            )
            for job, member in group.members.items()
        ]
        cost = group.price(self.cluster.kind) * group.cycle_ns
        return self.cluster.policies.charging.bills(shares, cost)[record.request.id]

    def _runs(self, event: e.ClusterEvent) -> bool:
        record = self.cluster.jobs.get(event.job) if isinstance(event, e.JobStarted) else None
        return record is not None and record.state is JobState.RUNNING

    def _command(self, command: c.ClusterCommand, before: set[NodeId], now_ns: Nanoseconds) -> None:
        match command:
            case c.StartJob():
                new = [node for node in (*command.seat.rollout, *command.train) if node not in before]
                before.update(new)
                seen = self.jobs[command.job]
                seen.started_ns = now_ns if seen.started_ns is None else seen.started_ns
                train_nodes = self.cluster.request(command.job).train_nodes_of(self.cluster.kind(command.train[0]))
                seen.alone_price = sum(map(self._price, command.seat.rollout))
                seen.alone_price += train_nodes * self._price(command.train[0])
                if seen.marginal is None:
                    seen.marginal = sum(map(self._price, new))
                self.cycles = self._groups()
            case c.GrantPermit():
                self._granted(command.permit, now_ns)
            case c.KillResident():
                what = f"{command.reason}; it is killed, and starts anew"
                self.marks.append(PoolMark(now_ns / NS_PER_S, command.node, command.job, what))
            case _:
                pass

    def _groups(self) -> list[GroupCycle]:
        return [
            GroupCycle(
                group=group.name,
                cycle_s=group.cycle_ns / NS_PER_S,
                limit_s=group.limit_ns / NS_PER_S,
                members=", ".join(group.members),
            )
            for group in self.cluster.groups.values()
        ]

    def _price(self, node: NodeId) -> int:
        return self.cluster.kind(node).nano_usd_per_hour

    def _granted(self, permit: Permit, now_ns: Nanoseconds) -> None:
        turn = self._turns.get(permit.number)
        if turn is None:
            turn = TurnUnderWay(job=permit.job, phase=permit.phase, since_ns=now_ns, nodes={})
            self._turns[permit.number] = turn
            if permit.phase is _ROLLOUT and (permit.job, permit.phase) not in self._goes_on:
                last_ns = self._rollout_ns.get(permit.job)
                if last_ns is not None:
                    self.jobs[permit.job].cycles_ns.append(now_ns - last_ns)
                self._rollout_ns[permit.job] = now_ns
        for node in permit.nodes:
            turn.nodes.setdefault(node, now_ns)

    def _close(self, event: e.ClusterEvent, now_ns: Nanoseconds) -> None:
        """Turns that are over, or have left nodes."""
        permits = self.cluster.permits
        for number in [*(self._turns.keys() - permits.keys())]:
            yielded = event if isinstance(event, e.PermitYielded) and event.permit == number else None
            self._end(self._turns.pop(number), yielded, now_ns)
        if isinstance(event, e.TailMoved) and (turn := self._turns.get(event.permit)) is not None:
            for node in [node for node in turn.nodes if node not in permits[event.permit].nodes]:
                self._slice(turn, node, now_ns, 0, finished=True)

    def _end(self, turn: TurnUnderWay, yielded: e.PermitYielded | None, now_ns: Nanoseconds) -> None:
        length_ns = now_ns - turn.since_ns
        switch_ns = 0 if yielded is None else min(yielded.switch_ns, length_ns)
        finished = yielded is not None and yielded.finished
        for node in [*turn.nodes]:
            self._slice(turn, node, now_ns, switch_ns, finished=finished)
        seen, key = self.jobs[turn.job], (turn.job, turn.phase)
        seen.alone_ns += length_ns - switch_ns
        seen.switch_ns += switch_ns
        seen.cold_ns += 0 if yielded is None else min(yielded.cold_ns, length_ns)
        seen.switches += 1
        took_ns = self._goes_on.pop(key, 0) + length_ns - switch_ns
        if finished:
            seen.phase_switch_ns += switch_ns
            seen.phases_ns.setdefault(turn.phase, []).append(took_ns)
        else:
            self._goes_on[key] = took_ns

    def _slice(
        self, turn: TurnUnderWay, node: NodeId, now_ns: Nanoseconds, switch_ns: Nanoseconds, *, finished: bool
    ) -> None:
        begun_ns = turn.nodes.pop(node)
        if now_ns > begun_ns:
            self.slices.append(
                NodeSlice(
                    node,
                    turn.job,
                    begun_ns / NS_PER_S,
                    now_ns / NS_PER_S,
                    turn.phase.value,
                    switch_ns / NS_PER_S,
                    finished,
                )
            )

    def _mark(self, event: e.ClusterEvent, now_ns: Nanoseconds) -> None:
        at_s = now_ns / NS_PER_S
        match event:
            case e.ResidentLost():
                node = self.cluster.state.nodes.get(event.node)
                process = "its trainer" if node is not None and node.phase is PhaseKind.TRAIN else "its resident"
                self.marks.append(PoolMark(at_s, event.node, event.job, f"{process} died: {event.cause}"))
            case e.NodeLost():
                self.marks.append(PoolMark(at_s, event.node, "", "the node was lost; its jobs are placed anew"))
            case e.JobFailed():
                self.marks.append(PoolMark(at_s, "", event.job, event.cause))
            case _:
                pass

    def note_deaths(self, deaths: Iterable[NotedDeath]) -> None:
        """Add the deaths that are no events of the cluster's."""
        noted = [PoolMark(death.at_ns / NS_PER_S, death.node, death.job, death.what) for death in deaths]
        self.marks = sorted([*self.marks, *noted], key=lambda mark: mark.at_s)

    def open_slices(self, now_ns: Nanoseconds) -> list[NodeSlice]:
        """Turns under way, as far as they are."""
        return [
            NodeSlice(node, turn.job, since_ns / NS_PER_S, now_ns / NS_PER_S, turn.phase.value, 0.0, True)
            for turn in self._turns.values()
            for node, since_ns in turn.nodes.items()
        ]


def history_of(records: Iterable[bytes], policies: ClusterPolicies) -> PoolTimeline:
    """Raises as `elastic.core.cluster.history.decoded`."""
    opening, entries = decoded(records)
    history = PoolTimeline(Cluster(opening.spec, policies, opening.limits, opening.now_ns))
    for entry in entries:
        history.take(entry)
    return history


def _settled(node: NodeRecord, now_ns: Nanoseconds) -> NodeRecord:
    """The node with its account up to now; it is a copy."""
    found = copy.deepcopy(node)
    passed_ns = max(0, now_ns - found.settled_ns)
    found.accounts_ns[found.account] = found.accounts_ns.get(found.account, 0) + passed_ns
    return found


def _grouped_ns(node: NodeRecord, now_ns: Nanoseconds) -> Nanoseconds:
    """How long the node was of a group."""
    own_ns = node.own_ns + (now_ns - node.own_since_ns if node.group is None else 0)
    return now_ns - node.opened_ns - own_ns


def pool_report(
    history: PoolTimeline,
    policy: str,
    *,
    now_ns: Nanoseconds | None = None,
    alone_ns: Mapping[JobId, Nanoseconds] | None = None,
    name: str = "",
) -> PoolReport:
    """The pool as it stands at `now_ns`, else at its journal's last record. `alone_ns` tells how long each job's steps
    would have taken alone where that is known better than from its turns."""
    cluster = history.cluster
    now_ns = cluster.now_ns if now_ns is None else max(now_ns, cluster.now_ns)
    billed = bills(cluster, now_ns)
    there_were = sorted([*history.forgotten.values(), *cluster.jobs.values()], key=lambda record: record.arrival)
    jobs = [
        _job(history, record, billed.get(record.request.id, record.billed), now_ns, alone_ns) for record in there_were
    ]
    living = [(_settled(node, now_ns), _grouped_ns(node, now_ns)) for node in cluster.state.nodes.values()]
    nodes: list[PooledNode] = []
    spent = {phase: [0, 0] for phase in PhaseKind}
    cost = 0
    for node, whole_ns in sorted([*history.gone, *living], key=lambda each: each[0].id):
        if not whole_ns:
            continue
        used_ns = sum(length for account, length in node.accounts_ns.items() if account is not DeviceAccount.IDLE)
        accounts = dict(node.accounts_ns) | {DeviceAccount.IDLE: max(0, whole_ns - used_ns)}
        found = shares(accounts, whole_ns)
        spent[node.phase][0] += accounts[DeviceAccount.IDLE]
        spent[node.phase][1] += whole_ns
        kind = cluster.spec.kinds[node.kind]
        cost += whole_ns * kind.nano_usd_per_hour
        nodes.append(
            PooledNode(
                name=node.id,
                phase=node.phase.value,
                kind=kind.name,
                site=kind.site,
                usd_per_gpu_hour=kind.nano_usd_per_hour / kind.gpus / 1e9,
                hours=whole_ns / NS_PER_HOUR,
                usd=usd(whole_ns * kind.nano_usd_per_hour),
                slice_share=found["slice"],
                switching_share=found["switching"],
                idle_share=found["idle"],
                down_share=found["down"],
            )
        )
    hours, spent_usd = now_ns / NS_PER_HOUR, usd(cost)
    switch_ns = sum(seen.switch_ns for seen in history.jobs.values())
    return PoolReport(
        policy=policy,
        name=name,
        hours=hours,
        usd=spent_usd,
        usd_paid=usd(cluster.books.paid(now_ns)),
        usd_per_hour=spent_usd / hours if hours else 0.0,
        usd_unbilled=spent_usd - sum(job.usd for job in jobs),
        usd_alone=sum(job.usd_alone for job in jobs),
        slo_met_share=sum(job.met for job in jobs) / len(jobs) if jobs else 1.0,
        rejected=sum(job.state == JobState.REJECTED for job in jobs),
        moves=sum(job.moves for job in jobs),
        idle_share={phase.value: idle / whole if whole else 0.0 for phase, (idle, whole) in spent.items()},
        admissions=dict(Counter(job.how for job in jobs if job.how)),
        switches=sum(seen.switches for seen in history.jobs.values()),
        switch_s=switch_ns / NS_PER_S,
        cycles=[_measured(cycle, jobs) for cycle in history.cycles],
        jobs=jobs,
        nodes=nodes,
        kinds=_kinds(nodes),
        marks=history.marks,
    )


def _kinds(nodes: Iterable[PooledNode]) -> list[PooledKind]:
    """The nodes of each kind together, in the order of their names."""
    found: defaultdict[str, list[PooledNode]] = defaultdict(list)
    for node in nodes:
        found[node.kind].append(node)
    return [
        PooledKind(
            name=name,
            site=of_kind[0].site,
            usd_per_gpu_hour=of_kind[0].usd_per_gpu_hour,
            nodes=len(of_kind),
            hours=sum(node.hours for node in of_kind),
            usd=sum(node.usd for node in of_kind),
        )
        for name, of_kind in sorted(found.items())
    ]


def _measured(cycle: GroupCycle, jobs: list[PooledJob]) -> GroupCycle:
    """The group's cycle with how long it has lasted, by its members' median."""
    members = cycle.members.split(", ")
    lasted = [job.cycle_s for job in jobs if job.name in members and job.cycle_s is not None]
    return msgspec.structs.replace(cycle, measured_s=statistics.median(lasted) if lasted else None)


def _job(
    history: PoolTimeline,
    record: JobRecord,
    billed: int,
    now_ns: Nanoseconds,
    known_ns: Mapping[JobId, Nanoseconds] | None,
) -> PooledJob:
    cluster, request = history.cluster, record.request
    seen, plan, steps = history.jobs[request.id], request.plan, record.steps_done
    sync_ns = 0 if plan is None else plan.sync_ns * steps
    alone_ns = seen.alone_ns + sync_ns if known_ns is None else known_ns.get(request.id, 0)
    planned: float | None = None
    actual: float | None = None
    if seen.begun_ns is not None and seen.stepped_ns is not None and steps and plan is not None:
        took_ns = seen.stepped_ns - seen.begun_ns
        planned = took_ns / (steps * plan.solo_ns)
        actual = took_ns / alone_ns if alone_ns else None
    alone = cluster.spec.price_alone(request) if seen.alone_price is None else seen.alone_price
    up_ns = now_ns if seen.begun_ns is None else seen.begun_ns
    starting_ns = 0 if seen.started_ns is None else up_ns - seen.started_ns
    cycle_s = statistics.median(seen.cycles_ns) / NS_PER_S if seen.cycles_ns else None
    turned_s = sum(len(phases) for phases in seen.phases_ns.values()) / len(PhaseKind) * (cycle_s or 0.0)
    return PooledJob(
        name=request.id,
        state=record.state.value,
        reason=record.reason,
        how=record.how,
        group=record.seat.group if record.seat is not None else "",
        steps=steps,
        steps_wanted=request.steps,
        slo=request.slo,
        planned_slowdown=planned,
        slowdown=actual,
        met=planned is not None and record.state not in _LOST and planned <= request.slo * (1 + 1e-9),
        moves=record.moves,
        resubmissions=record.resubmissions,
        usd=usd(billed),
        usd_planned=usd(seen.planned),
        usd_alone=usd((starting_ns + alone_ns + seen.phase_switch_ns) * alone),
        alone_usd_per_hour=alone / NANO_USD,
        marginal_usd_per_hour=None if seen.marginal is None else seen.marginal / NANO_USD,
        saved_if_left_usd_per_hour=saved_if_left(cluster, record) / NANO_USD,
        phases_s={
            phase.value: statistics.median(lengths) / NS_PER_S for phase, lengths in seen.phases_ns.items() if lengths
        },
        cycle_s=cycle_s,
        switches=seen.switches,
        switch_s=seen.switch_ns / NS_PER_S,
        cold_s=seen.cold_ns / NS_PER_S,
        switch_share=seen.switch_ns / NS_PER_S / turned_s if turned_s else None,
        story=story_of(record),
    )
