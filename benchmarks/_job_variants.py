"""Other ways to plan and to train, on jobs whose phases vary from step to step: what each saves, and what it risks."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean

import msgspec

from benchmarks._common import Figures
from elastic.core.cluster import PoolSpec
from elastic.core.cluster.cycle import CycleMember, load_ns
from elastic.core.cluster.groups import CycleModel
from elastic.core.cluster.policy import ClusterPolicies
from elastic.core.cluster.types import JobState
from elastic.simulation.jobs.phases import Arrival, phased
from elastic.simulation.jobs.plans import NS_PER_H, PlanWorld
from elastic.simulation.jobs.world import JobsWorld
from policies.charging import IdleAsAlone
from policies.clusters import CLUSTER_POLICIES
from policies.drift import NoDrift
from policies.placement import TightestWithoutMoves
from policies.tails import NoTails

QUANTILES = {"worst": 1.0, "p99": 0.99, "p95": 0.95, "mean": None}
GROUPS = 8
"""Groups of responses that a step trains on, one after the other."""


def shortest_shares(arrivals: Sequence[Arrival], seed: int) -> dict[str, float]:
    """How short each job's phases are at the least, over the longest."""
    rng = Random(seed)
    return {arrival.request.id: rng.uniform(0.3, 1.0) for arrival in arrivals}


def planned_at(arrival: Arrival, shortest: float, quantile: float | None) -> Arrival:
    """The job planned at a quantile of its phases, None for their mean, instead of the longest that they can be.

    A phase lasts `shortest` to 1 of the longest, by the square root of an even draw (`PhasedJob`).
    """
    share = shortest + (1 - shortest) * (2 / 3 if quantile is None else quantile**0.5)
    plan = arrival.request.plan
    assert plan is not None
    plan = msgspec.structs.replace(plan, rollout_ns=int(plan.rollout_ns * share), train_ns=int(plan.train_ns * share))
    request = msgspec.structs.replace(arrival.request, plan=plan)
    return msgspec.structs.replace(arrival, request=request, shortest=shortest / share, longest=1 / share)


def planned(spec: PoolSpec, arrivals: Sequence[Arrival], how: str, seed: int) -> Figures:
    """Phase by phase: cost, and the share of jobs within their SLO by the longest that their steps alone could have
    taken (`slo_worst`) and by what they would have taken (`slo_actual`)."""
    shortest = shortest_shares(arrivals, seed)
    jobs = [planned_at(arrival, shortest[arrival.request.id], QUANTILES[how]) for arrival in arrivals]
    world = JobsWorld(spec, CLUSTER_POLICIES["ours"])
    lived = phased(world, jobs, seed)
    world.run()
    worst, actual = list[bool](), list[bool]()
    for arrival in arrivals:
        job, plan = arrival.request.id, arrival.request.plan
        assert plan is not None
        steps, request = lived[job].steps, world.cluster.request(job)
        took_ns = steps[-1].ended_ns - steps[0].begun_ns
        ended = world.cluster.jobs[job].state is JobState.FINISHED
        worst.append(ended and took_ns <= request.slo * plan.solo_ns * request.steps)
        actual.append(ended and took_ns <= request.slo * lived[job].alone_ns)
    billed = sum(record.billed for record in world.cluster.jobs.values())
    return {"usd": billed / NS_PER_H / 1e9, "slo_worst": mean(worst), "slo_actual": mean(actual)}


class PiecewiseCycle:
    """Groups of responses are trained as they finish, while others still roll out; each piece costs a switch."""

    def __init__(self, switch_ns: int) -> None:
        self._switch_ns = switch_ns

    def __call__(self, members: Sequence[CycleMember]) -> int:
        more_ns = (GROUPS - 1) * self._switch_ns
        longest_ns = max(
            max(each.rollout_ns + each.train_ns // GROUPS, each.rollout_ns // GROUPS + each.train_ns) + each.sync_ns
            for each in members
        )
        return max(longest_ns + self._switch_ns, load_ns(members), sum(each.train_ns + more_ns for each in members))


@dataclass(frozen=True, slots=True)
class PieceByPiece(TightestWithoutMoves):
    """Places jobs by the cycles of groups that train in pieces."""

    switch_ns: int = 0

    @property
    def cycle(self) -> CycleModel:
        return PiecewiseCycle(self.switch_ns)


def train_when(spec: PoolSpec, arrivals: Sequence[Arrival], switch_s: float | None) -> Figures:
    """Cost and mean slowdown where training waits for all groups (None), or begins with the first."""
    rules = TightestWithoutMoves() if switch_s is None else PieceByPiece(switch_ns=int(switch_s * 1e9))
    policies = ClusterPolicies(
        placement=rules,
        tail=NoTails(),
        drift=NoDrift(),
        charging=IdleAsAlone(),
    )
    world = PlanWorld(spec, policies, arrivals).run()
    paid = sum(stretch.nano_usd_per_hour * (stretch.ended_ns - stretch.begun_ns) for stretch in world.stretches)
    outcomes = world.outcomes()
    slowdowns = [outcome.slowdown for outcome in outcomes if outcome.slowdown is not None]
    return {"usd": paid / NS_PER_H / 1e9, "slowdown": mean(slowdowns), "slo": mean(each.met for each in outcomes)}


class _Rounds(PlanWorld):
    """Counts the rounds that members could go beyond one a cycle while the longest of their group trains."""

    rounds = 0.0
    extra = 0.0

    def _note(self, until_ns: int) -> None:
        super()._note(until_ns)
        length_ns = until_ns - self.stretches[-1].begun_ns
        for group in self.cluster.groups.values():
            cycles = length_ns / group.cycle_ns
            self.rounds += cycles * len(group.members)
            train_ns = group.cycle_ns - group.train_ns
            rollout_ns = {node: group.cycle_ns - used_ns for node, used_ns in group.rollout_ns.items()}
            for member in sorted(group.members.values(), key=lambda member: member.alone_ns):
                room_ns = min(rollout_ns[node] for node in member.nodes)
                if (
                    2 * member.alone_ns <= group.cycle_ns
                    and member.rollout_ns <= room_ns
                    and member.train_ns <= train_ns
                ):
                    self.extra += cycles
                    train_ns -= member.train_ns
                    for node in member.nodes:
                        rollout_ns[node] -= member.rollout_ns


def extra_rounds(spec: PoolSpec, arrivals: Sequence[Arrival]) -> float:
    """By how much the steps of all could grow at the most: where nodes are free long enough, whenever that is."""
    world = _Rounds(spec, CLUSTER_POLICIES["ours"], arrivals)
    world.run()
    return world.extra / world.rounds
