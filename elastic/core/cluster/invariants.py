"""Invariants of a cluster, checked after every event by walking the whole state, in tests and worlds of faults."""

from collections.abc import Iterator

from elastic.core.cluster.cluster import Cluster
from elastic.core.cluster.types import JobState, PhaseKind
from elastic.core.timers import Wait

HOLDING = (JobState.PLACED, JobState.RUNNING)
NAMED_WAITS = {"profile": JobState.PROFILING, "queue": JobState.QUEUED, "start": JobState.PLACED}


class ClusterInvariantBroken(AssertionError):
    """An invariant does not hold: always a bug of Elastic."""


def check(cluster: Cluster, *, slos: bool = True) -> None:
    """Raise `ClusterInvariantBroken` with every violation. Pass `slos=False` for policies that keep no SLOs."""
    problems = [
        *_permits(cluster),
        *_nodes(cluster),
        *_seats(cluster),
        *_waits(cluster),
        *_books(cluster),
        *(_slos(cluster) if slos else ()),
    ]
    if problems:
        raise ClusterInvariantBroken("; ".join(problems))


def _permits(cluster: Cluster) -> Iterator[str]:
    """At most one job computes on a device, by a permit that the job knows of and that has a deadline."""
    state = cluster.state
    for number, permit in state.permits.items():
        record = state.jobs[permit.job]
        if record.permit != number:
            yield f"permit {number} is not the one that job {permit.job} has"
        for node in permit.nodes:
            if node not in state.nodes or state.nodes[node].permit != number:
                yield f"permit {number} is for {node}, which is not held under it"
        if record.state is not JobState.RUNNING:
            yield f"job {permit.job} is {record.state} and has a permit"
        if not (cluster.timers.waiting("permit", str(number)) or cluster.timers.waiting("yield", str(number))):
            yield f"permit {number} has no deadline"
        if number > state.permit_numbers:
            yield f"permit {number} was never given"
        if permit.both and record.seat is not None:
            needed = {*record.seat.rollout, *state.groups[record.seat.group].train}
            if permit.phase is not PhaseKind.TRAIN or set(permit.nodes) != needed:
                yield f"permit {number} is for both pools and has {permit.nodes} of {sorted(needed)}"
    for node in state.nodes.values():
        if node.permit is not None and (
            node.permit not in state.permits or node.id not in state.permits[node.permit].nodes
        ):
            yield f"{node.id} is held under permit {node.permit}, which is not for it"
        if (node.permit is None) != (node.user is None):
            yield f"{node.id}: the holder of its permit is its user"


def _nodes(cluster: Cluster) -> Iterator[str]:
    """A node belongs to one group or is free. The states on it fit its host memory, and workers its GPUs."""
    state = cluster.state
    for node in state.nodes.values():
        free = node.id in state.free[node.kind]
        group = state.groups.get(node.group) if node.group is not None else None
        listed = group is not None and node.id in (group.rollout if node.phase is PhaseKind.ROLLOUT else group.train)
        if free == listed:
            yield f"{node.id} is {'both free and' if free else 'neither free nor'} of a group"
        if free and (node.residents or node.group is not None):
            yield f"{node.id} is free and {'has residents' if node.residents else 'says it is of a group'}"
        if node.draining and node.group is None:
            yield f"{node.id} is drained, of no group, and still there"
        memory = cluster.kind(node.id).memory_bytes
        if sum(node.residents.values()) > memory:
            yield f"{node.id} has {sum(node.residents.values())} bytes of states; its host memory is {memory}"
        if node.phase is PhaseKind.ROLLOUT:
            for job in node.residents:
                if (needed := cluster.request(job).rollout_gpus) > (gpus := cluster.kind(node.id).gpus):
                    yield f"a worker of job {job} takes {needed} GPUs; {node.id} has {gpus}"
    for group in state.groups.values():
        if not group.members:
            yield f"{group.name} has no member"
        if not group.train:
            yield f"{group.name} has no training node"
        if len(kinds := {state.nodes[node].kind for node in group.train}) > 1:
            yield f"{group.name} has training nodes of {len(kinds)} kinds"
        for node in (*group.rollout, *group.train):
            if state.nodes[node].group != group.name:
                yield f"{node} is listed in {group.name} and is not of it"


def _seats(cluster: Cluster) -> Iterator[str]:
    """Exactly the running jobs have a place. A member's plan names the nodes to which the member is pinned."""
    state = cluster.state
    seats: dict[tuple[str, str], tuple[str, ...]] = {}
    for job, record in state.jobs.items():
        if (record.seat is not None) != (record.state in HOLDING):
            yield f"job {job} is {record.state} and has {'a' if record.seat else 'no'} place"
        if record.reserved is not None and not record.stopping:
            yield f"a place is kept for job {job}, which was not told to stop"
        for seat in (record.seat, record.reserved):
            if seat is not None:
                seats[seat.group, job] = seat.rollout
    members = {
        (group.name, job): member.nodes for group in state.groups.values() for job, member in group.members.items()
    }
    if members != seats:
        yield f"members are {members}, places {seats}"
    for (name, job), nodes in members.items():
        group = state.groups[name]
        for node in (*nodes, *group.train):
            if job not in state.nodes[node].residents:
                yield f"job {job} is pinned to {node} without a state there"
    for node in state.nodes.values():
        for job in node.residents:
            if node.group is None or (node.group, job) not in members:
                yield f"job {job} has a state on {node.id}, where it is no member"


def _waits(cluster: Cluster) -> Iterator[str]:
    """Every wait has a name and a bound. A job waits for a time slice only behind jobs whose time is bounded."""
    over = {job for job, record in cluster.state.jobs.items() if record.over}
    if over != cluster.state.over.keys():
        yield f"jobs over are {sorted(over)}; noted as over are {sorted(cluster.state.over)}"
    for job, record in cluster.state.jobs.items():
        if record.asked_both and record.asked is not PhaseKind.TRAIN:
            yield f"job {job} waits for both pools and asked for {record.asked}"
        if record.quota is not None and record.state is not JobState.QUEUED:
            yield f"job {job} is {record.state}, beyond the quota of {record.quota.whose}"
        for what, state in NAMED_WAITS.items():
            if record.state is state and not cluster.timers.waiting(what, job):
                yield f"job {job} is {state} without a deadline"
        if record.stopping and not cluster.timers.waiting("stop", job):
            yield f"job {job} is to stop without a deadline"
    if gone := [name for name in cluster.state.changed if name not in cluster.state.groups]:
        yield f"moves are to be looked for in {', '.join(gone)}, which are gone"
    for wait in cluster.timers.waits():
        if not _is_true(cluster, wait):
            yield f"{wait.key} is waited for ({wait.what}), and nobody needs it"
    for group in cluster.state.groups.values():
        there = [
            (job, record)
            for job in group.members
            if (record := cluster.state.jobs[job]).slices
            and record.seat is not None
            and record.seat.group == group.name
        ]
        asking = [job for job, record in there if record.asked is not None]
        moving = any(record.permit is not None or cluster.timers.waiting("time slice", job) for job, record in there)
        if asking and not moving:
            yield f"{', '.join(asking)} in {group.name} wait for a time slice that nobody has"


def _is_true(cluster: Cluster, wait: Wait) -> bool:
    """Return whether the awaited thing has not come yet."""
    if wait.what == "regroup":
        return True
    if wait.what in ("permit", "yield"):
        permit = cluster.state.permits.get(int(wait.key))
        return permit is not None and permit.recalled == (wait.what == "yield")
    record = cluster.state.jobs[wait.key]
    if wait.what == "time slice":
        return bool(record.slices) and record.permit is None and record.asked is None
    if wait.what == "stop":
        return record.stopping
    return record.state is NAMED_WAITS[wait.what]


def _books(cluster: Cluster) -> Iterator[str]:
    """Accounts sum to each node's time. Bills sum to what the pool pays."""
    state, now_ns, unbilled = cluster.state, cluster.now_ns, 0
    for node in state.nodes.values():
        if sum(node.accounts_ns.values()) != node.settled_ns - node.opened_ns:
            yield f"the accounts of {node.id} are not its time"
        if any(value < 0 for value in node.accounts_ns.values()):
            yield f"an account of {node.id} is below zero"
        price = cluster.kind(node.id).nano_usd_per_hour
        since_ns = node.own_since_ns if node.group is None else state.billed_ns[node.group]
        unbilled += price * (now_ns - since_ns)
    billed = state.pool_billed + state.forgotten_billed + sum(record.billed for record in state.jobs.values())
    if billed + unbilled != cluster.books.paid(now_ns):
        yield f"bills are {billed} and {unbilled} to come, the pool pays {cluster.books.paid(now_ns)}"


def _slos(cluster: Cluster) -> Iterator[str]:
    """Every member accepts the planned cycle of its group."""
    for group in cluster.state.groups.values():
        expected_ns = cluster.policies.placement.cycle(list(group.members.values()))
        if group.cycle_ns != expected_ns:
            yield f"the cycle of {group.name} is {group.cycle_ns}; of its members it is {expected_ns}"
        for member in group.members.values():
            if group.cycle_ns > member.limit_ns:
                yield f"the cycle of {group.name} is {group.cycle_ns}; job {member.job} bears {member.limit_ns}"
