"""Weeks of many jobs as plans: nobody beyond its SLO, moves that save, and pools that pay what is billed."""

import sys
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from statistics import mean
from typing import Any

import pytest

from benchmarks._optimum import Optimiser
from elastic.core.cluster.invariants import check
from elastic.core.cluster.types import JobState
from elastic.simulation.jobs.phases import phased
from elastic.simulation.jobs.plans import NS_PER_H, PlanWorld
from elastic.simulation.jobs.workloads import from_trace, pool_of, production
from elastic.simulation.jobs.world import JobsWorld
from policies.clusters import CLUSTER_POLICIES
from traces import data_path
from traces.jobs import TracedJob, read_jobs


def usd_per_hour(world: PlanWorld) -> float:
    paid = sum(stretch.nano_usd_per_hour * (stretch.ended_ns - stretch.begun_ns) for stretch in world.stretches)
    return paid / sum(stretch.ended_ns - stretch.begun_ns for stretch in world.stretches if stretch.jobs) / 1e9


def test_everybody_keeps_its_slo_and_ours_costs_less_than_weave_and_that_less_than_alone() -> None:
    """A hundred and twenty jobs of a trace under three policies: a difference of cost shows over many jobs alone."""
    arrivals = from_trace(read_jobs(data_path("philly-ee9e8c"))[:120], "mixed", (1.0, 2.0), 1)
    cost: dict[str, float] = {}
    for policy in ("ours", "weave", "solo"):
        world = PlanWorld(pool_of(5), CLUSTER_POLICIES[policy], arrivals).run()
        check(world.cluster)
        assert all(outcome.met for outcome in world.outcomes())
        billed = sum(outcome.usd for outcome in world.outcomes())
        own = sum(node.settled_ns - node.opened_ns for node in world.cluster.state.nodes.values())
        assert own >= 0
        cost[policy] = usd_per_hour(world)
        hours = sum(stretch.ended_ns - stretch.begun_ns for stretch in world.stretches if stretch.jobs) / NS_PER_H
        assert billed == pytest.approx(cost[policy] * hours, rel=1e-6)
    assert cost["ours"] < cost["weave"] < cost["solo"]


def test_nobody_pays_more_than_alone() -> None:
    arrivals = from_trace(read_jobs(data_path("philly-ee9e8c"))[:60], "mixed", (1.0, 2.0), 2)
    world = PlanWorld(pool_of(5), CLUSTER_POLICIES["ours"], arrivals).run()
    for arrival, outcome in zip(arrivals, world.outcomes(), strict=True):
        plan, slowdown = arrival.request.plan, outcome.slowdown
        assert plan is not None
        assert slowdown is not None
        held_h = slowdown * plan.solo_ns * arrival.request.steps / NS_PER_H
        assert outcome.usd <= held_h * 8 * (1.85 + 5.28) * (1 + 1e-9)


def test_the_production_workload_has_the_published_marginals() -> None:
    arrivals = production(1)
    assert len(arrivals) == 200
    hours = [arrival.request.steps * plan.solo_ns / NS_PER_H for arrival in arrivals if (plan := arrival.request.plan)]
    assert mean(hours) == pytest.approx(27.9, rel=0.01)
    assert all(1 <= arrival.request.slo <= 2 for arrival in arrivals)


def test_both_grains_give_steps_of_the_same_length() -> None:
    trace = [TracedJob(0.0, 20_000.0), TracedJob(1.0, 20_000.0), TracedJob(2.0, 20_000.0)]
    arrivals = from_trace(trace, "balanced", (1.6, 1.6), 4)
    spec = pool_of(5, nodes=8)
    phases = JobsWorld(spec, CLUSTER_POLICIES["ours_without_moves"], handled=lambda cluster, _: check(cluster))
    jobs = phased(phases, arrivals)
    phases.run()
    plans = PlanWorld(spec, CLUSTER_POLICIES["ours_without_moves"], arrivals).run()
    billed, planned = (sum(record.billed for record in each.cluster.jobs.values()) for each in (phases, plans))
    assert billed == pytest.approx(planned, rel=0.03)
    for outcome in plans.outcomes():
        assert outcome.state is JobState.FINISHED
        steps = jobs[outcome.job].steps
        plan = phases.cluster.request(outcome.job).plan
        assert plan is not None
        assert outcome.slowdown == pytest.approx(
            (steps[-1].ended_ns - steps[0].begun_ns) / len(steps) / plan.solo_ns, rel=0.03
        )


def enumerated(optimiser: Any, jobs: Sequence[str]) -> int:
    """Return the least cost of an hour over every partition of the jobs into groups."""

    @cache
    def least(left: tuple[str, ...]) -> float:
        if not left:
            return 0
        best, rest = float("inf"), left[1:]
        for size in range(len(rest) + 1):
            for others in combinations(rest, size):
                cost = optimiser.cost(tuple(sorted((left[0], *others))))
                if cost is not None:
                    best = min(best, cost + least(tuple(job for job in rest if job not in others)))
        return best

    return int(least(tuple(sorted(jobs))))


def test_the_solver_agrees_with_plain_enumeration() -> None:
    for seed in range(3):
        jobs = 6 + seed
        requests = {
            arrival.request.id: arrival.request
            for arrival in from_trace([TracedJob(0.0, 5e4)] * jobs, "mixed", (1.0, 2.0), seed)
        }
        for saturation in (False, True):
            optimiser = Optimiser(requests, pool_of(5), saturation=saturation, jobs_max=jobs)
            found = optimiser.of(frozenset(requests))
            assert found.proven
            assert found.nano_usd_per_hour == enumerated(optimiser, list(requests))
            assert optimiser.bound(requests) <= found.nano_usd_per_hour
        fewer = Optimiser(requests, pool_of(5), saturation=False, jobs_max=jobs - 1).of(frozenset(requests))
        assert not fewer.proven
    sys.modules.pop("_optimum", None)
