"""Jobs whose phases drift over their lives, and the hourly optimal regrouping that Weave compares with (§6.6).

The measured templates are not public: here a phase begins at `BEGINS` of its plan (jobs are planned at their token
limit) and its rollouts grow, or shrink, by `GROWS` of that until the job's end, times a half, one, one and a half, or
none; training by half as much, for it is rollouts that drift.
"""

from collections.abc import Mapping, Sequence
from random import Random
from statistics import mean

import msgspec

from benchmarks._common import Figures
from benchmarks._optimum import Optimiser, fewest_nodes
from elastic.core.cluster import JobRequest, PoolSpec
from elastic.core.cluster.policy import ClusterPolicies
from elastic.core.cluster.types import JobId
from elastic.simulation.jobs.phases import Arrival
from elastic.simulation.jobs.plans import NS_PER_H, PhaseShares, PlanWorld
from policies.charging import IdleAsAlone
from policies.drift import NoDrift, SloAtStake
from policies.placement import PLACEMENTS
from policies.tails import NoTails

BEGINS, GROWS = 0.8, 0.4
UP, DOWN = (0.0, 0.5, 1.0, 1.5), (0.0, -0.5, -1.0, -1.5)
SETTINGS: Mapping[str, tuple[float, ...]] = {"up": UP, "down": DOWN, "mixed": UP + DOWN[1:]}
ARMS: Mapping[str, tuple[str, bool]] = {
    "weave_static": ("weave", False),
    "weave": ("weave", True),
    "ours_static": ("ours", False),
    "ours": ("ours", True),
    "random": ("random", False),
    "most_idle": ("most_idle", False),
}
"""Placement, and whether a job that has drifted too far is resubmitted."""


def drifting(setting: str, arrivals: Sequence[Arrival], seed: int) -> PhaseShares:
    rng = Random(seed)
    grows = {arrival.request.id: GROWS * rng.choice(SETTINGS[setting]) for arrival in arrivals}
    return lambda job, done: (BEGINS * (1 + grows[job] * done), BEGINS * (1 + grows[job] / 2 * done))


def drifted(arm: str, spec: PoolSpec, arrivals: Sequence[Arrival], setting: str, seed: int) -> Figures:
    """One policy under one setting: what everything cost, and the share of jobs within their SLO by their own time
    alone, as it has drifted."""
    shares = drifting(setting, arrivals, seed)
    if arm == "regroup_hourly":
        return Regrouped(spec, arrivals, shares).run()
    placement, resubmits = ARMS[arm]
    policies = ClusterPolicies(
        placement=PLACEMENTS[placement],
        tail=NoTails(),
        drift=SloAtStake() if resubmits else NoDrift(),
        charging=IdleAsAlone(),
    )
    world = PlanWorld(spec, policies, arrivals, shares=shares).run()
    paid = sum(stretch.nano_usd_per_hour * (stretch.ended_ns - stretch.begun_ns) for stretch in world.stretches)
    restarts = world.commands["StopJob"]
    return {
        "usd": paid / NS_PER_H / 1e9,
        "slo": mean(outcome.met for outcome in world.outcomes()),
        "restarts": restarts,
        "restart_h": restarts * arrivals[0].request.restart_ns / NS_PER_H,
    }


class Regrouped:
    """The least-cost groups of all active jobs at their present phases, found anew every hour where the groups there
    are cost more or miss an SLO. Who changes its group is charged a restart; the solver's time is not. New jobs are
    alone until the next look, and a group's cycle is the best that its nodes allow: both favour it."""

    def __init__(self, spec: PoolSpec, arrivals: Sequence[Arrival], shares: PhaseShares) -> None:
        self._spec, self._shares = spec, shares
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival.at_ns)
        self._requests = {arrival.request.id: arrival.request for arrival in arrivals}
        self._done: dict[JobId, float] = {}
        self._groups: list[tuple[JobId, ...]] = []
        self._back_ns: dict[JobId, int] = {}
        self._began_ns: dict[JobId, int] = {}
        self._alone_ns: dict[JobId, float] = {}
        self._met: list[bool] = []
        self._restarts = 0
        self._paid = 0.0

    def run(self) -> Figures:
        now_ns, look_ns, coming = 0, 0, list(self._arrivals)
        while coming or self._done:
            if not self._done:
                now_ns = max(now_ns, coming[0].at_ns)
            while coming and coming[0].at_ns <= now_ns:
                job = coming.pop(0).request.id
                self._done[job], self._began_ns[job], self._alone_ns[job] = 0.0, now_ns, 0.0
                self._groups.append((job,))
            present = {job: self._present(job) for job in self._done}
            if now_ns >= look_ns:
                self._look(present, now_ns)
                look_ns = now_ns + NS_PER_H
            now_ns = self._pass(present, now_ns, min([look_ns, *(arrival.at_ns for arrival in coming[:1])]))
        return {
            "usd": self._paid / NS_PER_H / 1e9,
            "slo": mean(self._met),
            "restarts": self._restarts,
            "restart_h": self._restarts * self._arrivals[0].request.restart_ns / NS_PER_H,
        }

    def _present(self, job: JobId) -> JobRequest:
        request = self._requests[job]
        assert request.plan is not None
        rollout, train = self._shares(job, self._done[job] / request.steps)
        plan = msgspec.structs.replace(
            request.plan,
            rollout_ns=int(request.plan.rollout_ns * rollout),
            train_ns=int(request.plan.train_ns * train),
        )
        return msgspec.structs.replace(request, plan=plan)

    def _look(self, present: Mapping[JobId, JobRequest], now_ns: int) -> None:
        optimiser = Optimiser(present, self._spec, saturation=False, jobs_max=len(present))
        best = optimiser.of(frozenset(present))
        assert best.proven, "a bound is no optimum"
        costs = [optimiser.cost(tuple(sorted(group))) for group in self._groups]
        if all(cost is not None for cost in costs) and sum(filter(None, costs)) <= best.nano_usd_per_hour:
            return
        left = [set(group) for group in self._groups]
        for group in sorted(best.groups, key=len, reverse=True):
            home = max(left, key=lambda old: len(old.intersection(group)), default=set[JobId]())
            for job in group:
                if job not in home:
                    self._restarts += 1
                    self._back_ns[job] = now_ns + present[job].restart_ns
            if home in left:
                left.remove(home)
        self._groups = list(best.groups)

    def _pass(self, present: Mapping[JobId, JobRequest], now_ns: int, until_ns: int) -> int:
        """Until then, or until somebody has ended or come back."""
        pace: dict[JobId, float] = {}
        price = 0
        for group in self._groups:
            cycle_ns, nodes = self._cycle([present[job] for job in group])
            price += self._spec.train[0].nano_usd_per_hour + nodes * self._spec.rollout[0].nano_usd_per_hour
            for job in group:
                back_ns = self._back_ns.get(job, 0)
                pace[job] = 0.0 if back_ns > now_ns else 1 / cycle_ns
                if back_ns > now_ns:
                    until_ns = min(until_ns, back_ns)
                else:
                    until_ns = min(until_ns, now_ns + int((present[job].steps - self._done[job]) * cycle_ns) + 1)
        passed_ns = max(1, until_ns - now_ns)
        self._paid += price * passed_ns
        for job, per_ns in pace.items():
            plan = present[job].plan
            assert plan is not None
            self._done[job] += per_ns * passed_ns
            self._alone_ns[job] += per_ns * passed_ns * plan.solo_ns
            if self._done[job] >= present[job].steps - 1e-6:
                took_ns = now_ns + passed_ns - self._began_ns[job]
                self._met.append(took_ns <= present[job].slo * self._alone_ns[job] * (1 + 1e-6))
                del self._done[job]
                rest = (tuple(other for other in group if other != job) for group in self._groups)
                self._groups = [group for group in rest if group]
        return now_ns + passed_ns

    def _cycle(self, members: Sequence[JobRequest]) -> tuple[float, int]:
        plans = [member.plan for member in members if member.plan is not None]
        longest_ns = max(plan.solo_ns for plan in plans)
        bound_ns = max(longest_ns, min(member.limit_ns for member in members))
        items = tuple(
            sorted(((plan.rollout_ns, member.rollout_bytes) for plan, member in zip(plans, members, strict=True)))[::-1]
        )
        nodes = min(fewest_nodes(items, bound_ns, self._spec.rollout[0].memory_bytes), len(members))
        rolled_ns = sum(plan.rollout_ns for plan in plans) / nodes
        return max(longest_ns, sum(plan.train_ns for plan in plans), rolled_ns), nodes
