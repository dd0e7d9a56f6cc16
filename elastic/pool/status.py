"""The state of a pool, and where a job would go, for those who ask the pool's process. Pure.

Times are seconds since the pool began or seconds left, money is dollars. docs/jobs.md describes the fields.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from elastic.core.cluster import Cluster, JobRequest
from elastic.core.cluster.policy import PlacementRefusal
from elastic.core.cluster.state import JobRecord, NodeRecord
from elastic.core.cluster.types import (
    NS_PER_HOUR,
    BeyondQuota,
    DeviceAccount,
    GroupName,
    JobId,
    JobState,
    KindName,
    Nanoseconds,
    NodeId,
    NodeKind,
    Permit,
    PhaseKind,
    price_of,
)
from elastic.core.timers import Wait
from elastic.system.devices import DeviceName

NS_PER_S = 1_000_000_000
NANO_USD = 1_000_000_000


class NodeAgentStatus(msgspec.Struct, kw_only=True):
    pid: int = 0
    up: bool = False
    residents: list[JobId] = []


class MachineStatus(msgspec.Struct, kw_only=True):
    """The machine of a node that has joined by ticket, with its ticket's `label`: it has `count` devices, such as
    `device`. `relay`: the one of its site that its workers use, if any."""

    host: str
    label: str
    site: str
    relay: str
    device: str
    count: int
    memory_bytes: int


class NodeStatus(msgspec.Struct, kw_only=True):
    """A node: its kind, with what a GPU of it costs and its site, the job that computes on it, where its time went, the
    host memory that each job's resident takes, and the devices that residents see, all of the machine's if it names
    none. `machine`: of a node that has joined by ticket; one that is `draining` is let go once no job has a place on
    it."""

    name: NodeId
    phase: PhaseKind
    kind: KindName
    site: str
    usd_per_gpu_hour: float
    group: GroupName | None
    account: DeviceAccount
    job: JobId | None
    permit: int | None
    accounts_s: dict[DeviceAccount, float]
    residents: dict[JobId, int]
    node_agent: NodeAgentStatus
    devices: list[DeviceName] = []
    machine: MachineStatus | None = None
    draining: bool = False


class GroupStatus(msgspec.Struct, kw_only=True):
    name: GroupName
    members: list[JobId]
    rollout: list[NodeId]
    train: list[NodeId]
    cycle_s: float
    limit_s: float
    usd_per_hour: float


class PermitStatus(msgspec.Struct, kw_only=True):
    """A permit. `phase` is that of its cycle, or "both"."""

    number: int
    job: JobId
    phase: str
    nodes: list[NodeId]
    since_s: float
    left_s: float
    recalled: bool


class TurnStatus(msgspec.Struct, frozen=True):
    """A job's turn on a node, which is over."""

    node: NodeId
    job: JobId
    since_s: float
    until_s: float


class WaitStatus(msgspec.Struct, kw_only=True):
    """Who (`key`, a job or the pool) waits for what, in words."""

    what: str
    key: str
    since_s: float
    left_s: float


class StoryPart(msgspec.Struct, frozen=True):
    """When a job came to a state, and why."""

    at_s: float
    state: str
    cause: str


class JobStatus(msgspec.Struct, kw_only=True):
    """A job, which may have left the cluster. The fields from `directory` on are of its process, not of the cluster."""

    name: JobId
    arrival: int
    state: JobState
    reason: str
    since_s: float
    story: list[StoryPart]
    slo: float
    steps: int
    steps_done: int
    how: str
    group: GroupName | None
    rollout: list[NodeId]
    train: list[NodeId]
    solo_s: float
    cycle_s: float
    planned_slowdown: float | None
    permit: int | None
    asked: str | None
    moves: int
    resubmissions: int
    usd: float
    saved_if_left_usd_per_hour: float
    over: bool
    usd_alone: float = 0.0
    """What its steps would have cost so far on nodes of its own, by its plan."""
    queue_place: int | None = None
    """The job's place, from 1: among those beyond the same quota, or in the order in which others are considered."""
    beyond_quota: bool = False
    """Whether it is queued for its quota, as `reason` says."""
    directory: str = ""
    logs: str = ""
    script: bool = False
    pid: int | None = None
    restarts: int = 0
    host_bytes: dict[NodeId, int] = {}


class PoolStatus(msgspec.Struct, kw_only=True):
    """How a pool stands: all of it that people and programs are told.

    - `jobs`: the first of them. `jobs_over` counts all that are over, `jobs_left_out` those that go on and are not
      among `jobs`.
    - `set_aside`: devices that no node gets, each with the reason.
    - `asked_for`: nodes that are asked of a cluster and are not up, each with what is known of it.
    - `events`, `digest`: how many events the journal has, and the digest of the cluster after them.
    """

    now_s: float
    usd: float
    usd_unbilled: float
    usd_per_hour: float
    nodes: list[NodeStatus]
    groups: list[GroupStatus]
    jobs: list[JobStatus]
    permits: list[PermitStatus]
    waits: list[WaitStatus]
    events: int = 0
    digest: str = ""
    stopping: bool = False
    set_aside: dict[DeviceName, str] = {}
    asked_for: dict[NodeId, str] = {}
    jobs_over: int = 0
    jobs_left_out: int = 0


class PlacementStatus(msgspec.Struct, kw_only=True):
    """A place for a job: in a group with its members, or in a new group if `group` is None."""

    group: GroupName | None
    how: str
    rollout: list[NodeId]
    new_rollout: int
    new_train: int
    usd_per_hour: float
    cycle_s: float
    planned_slowdown: float
    members: list[JobId]


class PlacementPlan(msgspec.Struct, kw_only=True):
    """Where a job would go now, and why it cannot join each other group.

    `placement` is None if the job would be queued (`why` says for what), or if its phases are not known yet. A cold
    start of its rollouts takes `cold_s`: once in a placement, or before every rollout unless the engine `parks`.
    """

    job: JobId
    slo: float
    placement: PlacementStatus | None = None
    refusals: list[PlacementRefusal] = []
    why: str = ""
    cold_s: float = 0.0
    parks: bool = True


def pool_status(
    cluster: Cluster, now_ns: Nanoseconds | None = None, jobs: Iterable[JobRecord] | None = None
) -> PoolStatus:
    """Return nodes, groups, jobs, permits, waits and bills at `now_ns`, or at the cluster's last event.

    `jobs` are those to show; without it all are shown that have not left the cluster.
    """
    now_ns = cluster.now_ns if now_ns is None else max(now_ns, cluster.now_ns)
    billed, places = bills(cluster, now_ns), queue_places(cluster)
    paid = cluster.books.paid(now_ns)
    shown = cluster.jobs.values() if jobs is None else jobs
    return PoolStatus(
        now_s=now_ns / NS_PER_S,
        usd=usd(paid),
        usd_unbilled=usd(paid - cluster.state.forgotten_billed - sum(billed.values())),
        usd_per_hour=cluster.price_per_hour() / NANO_USD,
        nodes=[_node(node, cluster.kind(node.id), now_ns) for node in cluster.state.nodes.values()],
        groups=[
            GroupStatus(
                name=group.name,
                members=list(group.members),
                rollout=list(group.rollout),
                train=list(group.train),
                cycle_s=group.cycle_ns / NS_PER_S,
                limit_s=group.limit_ns / NS_PER_S,
                usd_per_hour=group.price(cluster.kind) / NANO_USD,
            )
            for group in cluster.groups.values()
        ],
        jobs=[
            job_status(cluster, record, billed[record.request.id], places.get(record.request.id)) for record in shown
        ],
        permits=[_permit(permit, now_ns) for permit in cluster.permits.values()],
        waits=[_wait(cluster, wait, now_ns) for wait in cluster.waits],
    )


_WAITS_FOR = {
    "profile": "its profile",
    "queue": "a place",
    "start": "its processes to start",
    "stop": "its processes to end",
    "regroup": "its next look at the groups",
    "permit": "the end of its permit",
    "yield": "the end of its permit, which was recalled",
}


def _wait(cluster: Cluster, wait: Wait, now_ns: Nanoseconds) -> WaitStatus:
    """Who waits is a job, also of a permit by its number, or the pool itself."""
    permit = cluster.permits.get(int(wait.key)) if wait.what in ("permit", "yield") else None
    return WaitStatus(
        what=_WAITS_FOR.get(wait.what, f"its {wait.what}"),
        key=(wait.key or "the pool") if permit is None else permit.job,
        since_s=wait.since_ns / NS_PER_S,
        left_s=max(0, wait.until_ns - now_ns) / NS_PER_S,
    )


def turns_of(cluster: Cluster) -> list[TurnStatus]:
    """Return the last turns on each node that are over, as far as the pool's process has seen them begin."""
    return [
        TurnStatus(one.node, one.job, one.since_ns / NS_PER_S, one.until_ns / NS_PER_S) for one in cluster.books.turns
    ]


def plan_of(cluster: Cluster, request: JobRequest, quota: BeyondQuota | None = None) -> PlacementPlan:
    """Return where a job would go now, at what marginal cost and planned slowdown; nowhere yet, if it is beyond its
    quota. Raises `ClusterError` for a job that would be rejected."""
    found = PlacementPlan(job=request.id, slo=request.slo)
    if quota is not None:
        cluster.refuse(request)
        found.why = f"it would wait for its quota: {quota.reason}"
        return found
    if request.plan is None:
        found.why = "its phases are not known yet: a few steps of it would be timed first"
        return found
    found.cold_s, found.parks = request.plan.rollout_cold_ns / NS_PER_S, request.plan.rollout_parks
    choice, refusals = cluster.dry_run(request)
    found.refusals = list(refusals)
    if choice is None:
        found.why = cluster.short_of(request)
        return found
    found.placement = PlacementStatus(
        group=choice.group,
        how=choice.how,
        rollout=list(choice.rollout),
        new_rollout=choice.new_rollout,
        new_train=choice.new_train,
        usd_per_hour=choice.marginal_nano_usd_per_hour / NANO_USD,
        cycle_s=choice.cycle_ns / NS_PER_S,
        planned_slowdown=choice.cycle_ns / request.plan.solo_ns,
        members=list(cluster.groups[choice.group].members) if choice.group else [],
    )
    return found


def bills(cluster: Cluster, now_ns: Nanoseconds) -> dict[JobId, int]:
    """Return what every job owes until now, in nano-dollars times nanoseconds per hour. Settles nothing."""
    found = {job: record.billed for job, record in cluster.jobs.items()}
    for name in cluster.groups:
        owed, _ = cluster.books.owed(name, now_ns)
        for job, more in owed.items():
            found[job] += more
    return found


def saved_if_left(cluster: Cluster, record: JobRecord) -> int:
    """Return how much cheaper an hour of the pool would be without the job, in nano-dollars: the nodes that no other
    member needs."""
    job = record.request.id
    if record.seat is None:
        return 0
    group = cluster.groups[record.seat.group]
    others = [member for name, member in group.members.items() if name != job]
    if not others:
        return group.price(cluster.kind)
    pinned = {node for member in others for node in member.nodes}
    return price_of(cluster.kind(node) for node in record.seat.rollout if node not in pinned)


def usd(owed: int) -> float:
    return owed / NS_PER_HOUR / NANO_USD


def _node(node: NodeRecord, kind: NodeKind, now_ns: Nanoseconds) -> NodeStatus:
    accounts = dict(node.accounts_ns)
    accounts[node.account] = accounts.get(node.account, 0) + now_ns - node.settled_ns
    return NodeStatus(
        name=node.id,
        phase=node.phase,
        kind=node.kind,
        site=kind.site,
        usd_per_gpu_hour=kind.nano_usd_per_hour / kind.gpus / NANO_USD,
        group=node.group,
        account=node.account,
        job=node.user,
        permit=node.permit,
        accounts_s={account: length_ns / NS_PER_S for account, length_ns in accounts.items()},
        residents=dict(node.residents),
        node_agent=NodeAgentStatus(),
        draining=node.draining,
    )


def story_of(record: JobRecord) -> list[StoryPart]:
    return [StoryPart(chapter.at_ns / NS_PER_S, chapter.state.value, chapter.cause) for chapter in record.story]


def queue_places(cluster: Cluster) -> dict[JobId, int]:
    """Return the place of each queued job: in the queue for room, or in that of its quota."""
    queues, places = Counter[str](), dict[JobId, int]()
    for job, record in cluster.jobs.items():
        if record.state is JobState.QUEUED:
            queue = "" if record.quota is None else f"quota {record.quota.whose}"
            queues[queue] += 1
            places[job] = queues[queue]
    return places


def job_status(cluster: Cluster, record: JobRecord, billed: int, queue_place: int | None = None) -> JobStatus:
    """Return what the cluster knows of one job. It owes `billed` nano-dollars times nanoseconds per hour."""
    request, seat, story = record.request, record.seat, story_of(record)
    cycle_ns = cluster.groups[seat.group].cycle_ns if seat is not None else 0
    solo_ns = request.plan.solo_ns if request.plan is not None else 0
    alone = cluster.spec.price_alone(request) if seat is None else cluster.books.price_alone(seat.group, request.id)
    return JobStatus(
        name=request.id,
        arrival=record.arrival,
        state=record.state,
        reason=record.reason,
        since_s=story[-1].at_s if story else 0.0,
        story=story,
        slo=request.slo,
        steps=request.steps,
        steps_done=record.steps_done,
        how=record.how,
        group=seat.group if seat is not None else None,
        rollout=list(seat.rollout) if seat is not None else [],
        train=list(cluster.groups[seat.group].train) if seat is not None else [],
        solo_s=solo_ns / NS_PER_S,
        cycle_s=cycle_ns / NS_PER_S,
        planned_slowdown=cycle_ns / solo_ns if cycle_ns and solo_ns else None,
        permit=record.permit,
        asked="both" if record.asked_both else record.asked,
        moves=record.moves,
        resubmissions=record.resubmissions,
        usd=usd(billed),
        saved_if_left_usd_per_hour=saved_if_left(cluster, record) / NANO_USD,
        over=record.over,
        usd_alone=usd(record.steps_done * solo_ns * alone),
        queue_place=queue_place,
        beyond_quota=record.quota is not None,
    )


def _permit(permit: Permit, now_ns: Nanoseconds) -> PermitStatus:
    return PermitStatus(
        number=permit.number,
        job=permit.job,
        phase="both" if permit.both else permit.phase,
        nodes=list(permit.nodes),
        since_s=permit.since_ns / NS_PER_S,
        left_s=max(0, permit.deadline_ns - now_ns) / NS_PER_S,
        recalled=permit.recalled,
    )
