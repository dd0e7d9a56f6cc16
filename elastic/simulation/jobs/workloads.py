"""Workloads of many jobs: arrivals and durations of a trace, phases of the papers' profiles.

- `Mixed` and the three profiles are Weave's Table 6; prices are those of its Table 1, eight GPUs a node. Every job asks
  for one node of each kind, and a node holds as many states as jobs may be in a group.
- A job has as many steps as fit into the traced duration when it runs alone.
- `production`: the published marginals of Weave §6.4, for the trace itself is not public.
"""

from collections.abc import Mapping, Sequence
from random import Random

from elastic.core.cluster import ClusterError, JobRequest, NodeKind, PhasePlan, PoolSpec
from elastic.simulation.jobs.phases import Arrival
from elastic.simulation.jobs.world import S
from traces.jobs import TracedJob

GPUS = 8
H20_NANO_USD, H800_NANO_USD = 1_850_000_000, 5_280_000_000
RESTART_S = 308
"""Half way between what moving a job of 7B and of 32B took (Weave §6.6: 197 to 419 s)."""

_BALANCED = (((50, 100), (50, 100)), ((100, 200), (100, 200)), ((200, 300), (200, 300)))
_ROLLOUT_HEAVY = (((100, 200), (25, 50)), ((200, 400), (50, 100)), ((400, 600), (100, 200)))
_TRAIN_HEAVY = tuple((train, rollout) for rollout, train in _ROLLOUT_HEAVY)
PROFILES: Mapping[str, Sequence[tuple[tuple[int, int], tuple[int, int]]]] = {
    "balanced": _BALANCED,
    "rollout_heavy": _ROLLOUT_HEAVY,
    "train_heavy": _TRAIN_HEAVY,
    "mixed": (*_BALANCED, *_ROLLOUT_HEAVY, *_TRAIN_HEAVY),
}
"""Rollout and training time of a small, a medium and a large job, each drawn evenly between two bounds, in seconds."""


def pool_of(residents: int, nodes: int = 4096) -> PoolSpec:
    """H20 nodes for rollouts and H800 nodes for training, with host memory for so many states each."""
    return PoolSpec.uniform(
        rollout=NodeKind(gpus=GPUS, memory_bytes=residents, nano_usd_per_hour=GPUS * H20_NANO_USD),
        train=NodeKind(gpus=GPUS, memory_bytes=residents, nano_usd_per_hour=GPUS * H800_NANO_USD),
        rollout_nodes=nodes,
        train_nodes=nodes,
    )


def from_trace(
    trace: Sequence[TracedJob], profile: str, slo: tuple[float, float], seed: int, restart_s: float = RESTART_S
) -> list[Arrival]:
    """One job for each of the trace; its profile and its SLO, between two bounds, are drawn."""
    if profile not in PROFILES:
        raise ClusterError(f"profile: found {profile!r}; allowed: {', '.join(PROFILES)}")
    rng = Random(seed)
    arrivals: list[Arrival] = []
    for number, job in enumerate(trace):
        rollout_s, train_s = (rng.uniform(*bounds) for bounds in rng.choice(PROFILES[profile]))
        plan = PhasePlan(rollout_ns=int(rollout_s * S), train_ns=int(train_s * S))
        request = JobRequest(
            id=f"job-{number + 1}",
            slo=rng.uniform(*slo),
            plan=plan,
            steps=max(1, round(job.duration_s * S / plan.solo_ns)),
            rollout_bytes=1,
            train_bytes=1,
            restart_ns=int(restart_s * S),
        )
        arrivals.append(Arrival(at_ns=int(job.arrival_s * S), request=request))
    return arrivals


PRODUCTION_JOBS, PRODUCTION_H, PRODUCTION_MEAN_H = 200, 370.2, 27.9


def production(seed: int) -> list[Arrival]:
    """200 jobs in 370.2 h with a mean duration of 27.9 h; 60 % multi-turn, whose rollouts are three to four times their
    training; phases from 50 to 900 s; SLOs between 1 and 2. Which job is how long is our assumption."""
    rng = Random(seed)
    lengths = [rng.lognormvariate(0.0, 0.8) for _ in range(PRODUCTION_JOBS)]
    scale_s = PRODUCTION_MEAN_H * 3600 * PRODUCTION_JOBS / sum(lengths)
    last_s = PRODUCTION_H * 3600 - PRODUCTION_MEAN_H * 3600
    times = sorted(rng.uniform(0, last_s) for _ in lengths)
    arrivals: list[Arrival] = []
    for number, (at_s, length) in enumerate(zip(times, lengths, strict=True)):
        train_s = rng.uniform(50, 250)
        rollout_s = min(900.0, train_s * (rng.uniform(3, 4) if rng.random() < 0.6 else rng.uniform(0.8, 1.5)))
        plan = PhasePlan(rollout_ns=int(rollout_s * S), train_ns=int(train_s * S))
        request = JobRequest(
            id=f"job-{number + 1}",
            slo=rng.uniform(1, 2),
            plan=plan,
            steps=max(1, round(length * scale_s * S / plan.solo_ns)),
            rollout_bytes=1,
            train_bytes=1,
            restart_ns=RESTART_S * S,
        )
        arrivals.append(Arrival(at_ns=int(at_s * S), request=request))
    return arrivals
