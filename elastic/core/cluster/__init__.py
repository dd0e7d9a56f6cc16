"""Many jobs on shared pools: where each job runs, when, and what it costs. A pure state machine; see docs/jobs.md."""

from elastic.core.cluster.cluster import Cluster
from elastic.core.cluster.policy import ClusterPolicies
from elastic.core.cluster.types import ClusterError, JobRequest, NodeKind, PhasePlan, PoolSpec, WaitLimits

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
