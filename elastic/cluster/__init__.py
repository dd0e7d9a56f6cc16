"""Many jobs on shared pools: where each job runs, when, and what it costs. A pure state machine; see docs/jobs.md."""

from elastic.cluster.cluster import Cluster
from elastic.cluster.policy import ClusterPolicies
from elastic.cluster.types import ClusterError, JobRequest, NodeKind, PhasePlan, PoolSpec, WaitLimits

__all__ = [
    "Cluster",
    "ClusterError",
    "ClusterPolicies",
    "JobRequest",
    "NodeKind",
    "PhasePlan",
    "PoolSpec",
    "WaitLimits",
]
