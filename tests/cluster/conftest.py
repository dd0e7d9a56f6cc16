"""Pools as a policy sees them, built by hand."""

from typing import NamedTuple

import msgspec

from elastic.cluster import JobRequest, NodeKind, PhasePlan, PoolSpec
from elastic.cluster.cycle import cycle_ns
from elastic.cluster.groups import JobGroup, planned

SPEC = PoolSpec(
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

    def remaining_ns(self, job: str) -> int:
        return self.requests[job].steps * 100

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
        members={request.id: planned(request, train, its) for request, its in pinned},
    )
    made.follow(cycle_ns)
    return made


def view(*groups: JobGroup, requests: tuple[JobRequest, ...] = ()) -> View:
    return View({each.name: each for each in groups}, {request.id: request for request in requests})
