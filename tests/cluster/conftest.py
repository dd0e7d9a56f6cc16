"""Pools as a policy sees them, built by hand, and a cluster that is told one event after the other."""

from typing import NamedTuple

import msgspec

from elastic.core.cluster import Cluster, JobRequest, NodeKind, PhasePlan, PoolSpec, WaitLimits
from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.cycle import cycle_ns
from elastic.core.cluster.groups import JobGroup, planned
from elastic.core.cluster.invariants import check
from elastic.core.cluster.policy import PlacementChoice
from elastic.core.cluster.types import KindName, NodeId, Permit, PhaseKind
from policies.clusters import CLUSTER_POLICIES
from policies.placement import PLACEMENTS

SPEC = PoolSpec.uniform(
    rollout=NodeKind(gpus=8, memory_bytes=3, nano_usd_per_hour=10),
    train=NodeKind(gpus=8, memory_bytes=5, nano_usd_per_hour=30),
    rollout_nodes=9,
    train_nodes=9,
)


def job(name: str, rollout: int, train: int, slo: float = 2.0, **more: object) -> JobRequest:
    plan = PhasePlan(rollout_ns=rollout, train_ns=train)
    return msgspec.structs.replace(JobRequest(id=name, slo=slo, plan=plan, rollout_bytes=1, train_bytes=1), **more)


class View(NamedTuple):
    """A pool as a policy sees it, without a cluster."""

    groups: dict[str, JobGroup]
    requests: dict[str, JobRequest]
    spec: PoolSpec = SPEC
    free_rollout: int = 9
    free_train: int = 9
    arrivals: int = 1

    def request(self, job: str) -> JobRequest:
        return self.requests[job]

    def free(self, kind: KindName) -> int:
        return self.free_rollout if self.spec.phases[kind] is PhaseKind.ROLLOUT else self.free_train

    def kind(self, node: NodeId) -> NodeKind:
        trains = any(node in group.train for group in self.groups.values())
        return self.spec.train[0] if trains else self.spec.rollout[0]

    def remaining_ns(self, job: str) -> int:
        return self.requests[job].steps * 100

    def steps_left(self, job: str) -> int:
        return self.requests[job].steps

    def limit_after_restart_ns(self, job: str) -> int:
        return self.requests[job].limit_ns

    def movable(self, job: str) -> bool:
        return True


def group(name: str, train: int, *pinned: tuple[JobRequest, tuple[str, ...]]) -> JobGroup:
    nodes = tuple(dict.fromkeys(node for _, its in pinned for node in its))
    made = JobGroup(
        name=name,
        train=tuple(f"{name}-t{i}" for i in range(train)),
        rollout=nodes,
        members={request.id: planned(request, train, SPEC.train[0], its) for request, its in pinned},
    )
    made.follow(cycle_ns)
    return made


def view(*groups: JobGroup, requests: tuple[JobRequest, ...] = ()) -> View:
    return View({each.name: each for each in groups}, {request.id: request for request in requests})


def placed(policy: str, request: JobRequest, pool: View) -> PlacementChoice:
    """Where the policy places the job, which it does."""
    choice = PLACEMENTS[policy].place(request, pool)
    assert choice is not None
    return choice


S = 1_000_000_000
THREE_OF_EACH = PoolSpec.uniform(
    rollout=NodeKind(gpus=8, memory_bytes=5, nano_usd_per_hour=2 * S),
    train=NodeKind(gpus=8, memory_bytes=5, nano_usd_per_hour=5 * S),
    rollout_nodes=3,
    train_nodes=3,
)


def timed_job(name: str, rollout_s: float = 100, train_s: float = 100, slo: float = 1.5, **more: object) -> JobRequest:
    plan = PhasePlan(rollout_ns=int(rollout_s * S), train_ns=int(train_s * S))
    request = JobRequest(id=name, slo=slo, plan=plan, steps=10, rollout_bytes=1, train_bytes=1)
    return msgspec.structs.replace(request, **more)


class Driver:
    """Tells the cluster one event after the other and checks everything after each."""

    def __init__(self, policy: str = "ours", spec: PoolSpec = THREE_OF_EACH) -> None:
        self.cluster = Cluster(spec, CLUSTER_POLICIES[policy], WaitLimits(), 0)

    def tell(self, event: e.ClusterEvent, at_s: float = 0.0) -> list[c.ClusterCommand]:
        out = self.cluster.handle(event, int(at_s * S))
        check(self.cluster)
        return out

    def run(self, *requests: JobRequest, at_s: float = 0.0) -> None:
        for request in requests:
            for command in self.tell(e.JobSubmitted(request=request), at_s):
                if isinstance(command, c.StartJob):
                    self.tell(e.JobStarted(job=command.job, placement=command.placement), at_s)

    def ask(self, name: str, phase: PhaseKind, at_s: float) -> list[Permit]:
        return grants(self.tell(e.PhaseAsked(job=name, phase=phase), at_s))

    def end(self, name: str, at_s: float, *, finished: bool = True, cold_s: int = 0) -> list[Permit]:
        permit, cold_ns = self.cluster.jobs[name].permit, cold_s * S
        assert permit is not None
        event = e.PermitYielded(job=name, permit=permit, finished=finished, switch_ns=cold_ns, cold_ns=cold_ns)
        return grants(self.tell(event, at_s))

    def tick(self, at_s: float) -> list[c.ClusterCommand]:
        return self.tell(e.TimePassed(), at_s)


def grants(commands: list[c.ClusterCommand]) -> list[Permit]:
    return [command.permit for command in commands if isinstance(command, c.GrantPermit)]
