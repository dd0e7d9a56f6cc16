"""Many jobs on one pool where nothing goes wrong."""

from random import Random

import pytest

from elastic.core.cluster import JobRequest, NodeKind, PhasePlan, PoolSpec
from elastic.core.cluster.invariants import check
from elastic.core.cluster.types import JobState
from elastic.simulation.jobs.phases import Arrival, phased
from elastic.simulation.jobs.world import JobsWorld, S
from policies.clusters import CLUSTER_POLICIES


@pytest.mark.parametrize("policy", ["ours_without_moves", "weave", "gavel"])
def test_steps_last_as_long_as_was_planned_and_no_longer(policy: str) -> None:
    """Where nothing goes wrong: on average over its steps a job's cycle is at most the one that it bears."""
    for seed in range(3):
        rng = Random(seed)
        arrivals: list[Arrival] = []
        for number in range(rng.randrange(2, 7)):
            plan = PhasePlan(
                rollout_ns=rng.randrange(20 * S, 300 * S),
                train_ns=rng.randrange(20 * S, 300 * S),
                sync_ns=rng.choice((0, 5 * S)),
                rollout_switch_ns=S,
                train_switch_ns=2 * S,
            )
            request = JobRequest(
                id=f"job-{number}",
                slo=rng.choice((1.2, 1.5, 2.5)),
                plan=plan,
                steps=30,
                rollout_nodes=rng.choice((1, 1, 2)),
            )
            arrivals.append(Arrival(at_ns=0, request=request, shortest=rng.choice((0.5, 1.0))))
        kind = NodeKind(gpus=8, memory_bytes=0, nano_usd_per_hour=S)
        spec = PoolSpec.uniform(rollout=kind, train=kind, rollout_nodes=20, train_nodes=20)
        world = JobsWorld(spec, CLUSTER_POLICIES[policy], handled=lambda cluster, _: check(cluster))
        jobs = phased(world, arrivals, seed)
        world.run()
        for job, record in world.cluster.jobs.items():
            assert record.state is JobState.FINISHED
            steps = jobs[job].steps
            took_ns = steps[-1].ended_ns - steps[0].begun_ns
            # The first step waits for its time slice at most a cycle.
            assert took_ns <= 31 * record.request.limit_ns
            assert len(steps) == 30
