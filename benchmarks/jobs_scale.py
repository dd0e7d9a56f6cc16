"""What hundreds of jobs on shared pools cost, by policy, beside the least that they could. Simulated as plans.

Arrivals and durations are two windows of the Philly trace (`traces/data`); phases are those of Weave's Table 6, prices
those of its Table 1, SLOs between 1 and 2, at most five jobs in a group, one node of eight GPUs of each kind for a job.
The real `Cluster` places, moves and bills; jobs go on at the planned cycle, moves take 308 s; switching is not
charged.

- `over_optimum`: a policy's cost over that of the least-cost partition of its active jobs that keeps all SLOs, moves
  free, while at most so many are active that the solver proves it (13; quick 9: `optimum_proven_share`).
  `over_optimum_unsaturated`: of groups within their cycle only. `over_bound`: over a lower bound, all of the time.
- `slo_planned`: the share of jobs within their SLO, restarts included; a rejected one that could run alone is missed.
  `slo_actual`: the same if each job's phases take the share of their plan that its responses are long (drawn between a
  half and all of it), against its own solo time.
- `admissions`: packed, scaled, new. `peak_gpus`, `idle_share`: of the groups' nodes. `moves` are a job.
- `drift`: every second job of the first window, whose phases drift (`_drift.py`), where placements stay, where jobs
  that drift too far are resubmitted, and beside hourly optimal regrouping (`over_regrouping`: cost over its).
- `sensitivity.planning` is simulated phase by phase, with the first jobs of the first window (`_job_variants.py`), as
  `train_when` and `extra_rounds_at_most` are by plans.

`--part` runs some parts alone; the others are null. Without it the full form takes some ten minutes on two cores.
"""

import multiprocessing
from collections import Counter
from collections.abc import Sequence
from multiprocessing.pool import Pool
from random import Random
from statistics import mean, pstdev
from typing import Any, NamedTuple

from benchmarks._common import PRINTED, Arguments, Figures, benchmark, option
from benchmarks._drift import ARMS, SETTINGS, drifted
from benchmarks._job_variants import QUANTILES, extra_rounds, planned, train_when
from benchmarks._optimum import Optimiser
from benchmarks._processes import uninterrupted
from elastic.core.cluster.types import JobState
from elastic.simulation.jobs.phases import Arrival
from elastic.simulation.jobs.plans import NS_PER_H, PhaseShares, PlanWorld
from elastic.simulation.jobs.workloads import GPUS, H800_NANO_USD, RESTART_S, from_trace, pool_of, production
from elastic.system.cores import cores
from policies.clusters import CLUSTER_POLICIES
from traces import data_path
from traces.jobs import read_jobs

WINDOWS = ("philly-ed69ec", "philly-ee9e8c")
POLICIES = ("solo", "gavel", "random", "most_idle", "weave", "ours_without_moves", "ours")
SHARING = ("random", "most_idle", "weave", "ours")
SEEDS, QUICK_SEEDS = (1, 2, 3), (1,)
PROVEN_MAX, QUICK_PROVEN_MAX = 13, 9
RESIDENTS = 5
SLO = (1.0, 2.0)


def lived(policy: str, arrivals: Sequence[Arrival], residents: int) -> PlanWorld:
    return PlanWorld(pool_of(residents), CLUSTER_POLICIES[policy], arrivals).run()


def figures(world: PlanWorld, arrivals: Sequence[Arrival], residents: int, proven_max: int) -> Figures:
    """Everything about one policy's world; costs are in dollars an hour of the time in which there are jobs."""
    requests = {arrival.request.id: arrival.request for arrival in arrivals}
    optimisers = [
        Optimiser(requests, pool_of(residents), saturation=saturation, jobs_max=proven_max)
        for saturation in (False, True)
    ]
    paid = [0.0, 0.0]
    least = [0.0, 0.0]
    cost = bound = proven_ns = active_ns = 0.0
    busy, there = [0.0, 0.0], [0.0, 0.0]
    for stretch in world.stretches:
        length_ns = stretch.ended_ns - stretch.begun_ns
        if not stretch.jobs:
            continue
        active_ns += length_ns
        cost += stretch.nano_usd_per_hour * length_ns
        bound += optimisers[0].bound(stretch.jobs) * length_ns
        for i, (used, nodes) in enumerate(
            ((stretch.rollout_busy, stretch.rollout_nodes), (stretch.train_busy, stretch.train_nodes))
        ):
            busy[i] += used * length_ns
            there[i] += nodes * length_ns
        for i, optimiser in enumerate(optimisers):
            found = optimiser.of(stretch.jobs)
            if found.proven:
                proven_ns += length_ns if i == 0 else 0
                paid[i] += stretch.nano_usd_per_hour * length_ns
                least[i] += found.nano_usd_per_hour * length_ns
    outcomes = world.outcomes()
    hows = Counter(outcome.how for outcome in outcomes if outcome.how)
    return {
        "usd_per_hour": cost / active_ns / 1e9,
        "usd": cost / NS_PER_H / 1e9,
        "over_optimum": paid[0] / least[0],
        "over_optimum_unsaturated": paid[1] / least[1],
        "over_bound": cost / bound,
        "optimum_proven_share": proven_ns / active_ns,
        "slo_planned": mean(outcome.met for outcome in outcomes),
        "rejected": sum(outcome.state is JobState.REJECTED for outcome in outcomes),
        "peak_gpus": {
            "rollout": GPUS * max(stretch.rollout_nodes for stretch in world.stretches),
            "train": GPUS * max(stretch.train_nodes for stretch in world.stretches),
        },
        "admissions": {how: hows[how] / len(outcomes) for how in ("packed", "scaled", "new")},
        "moves": sum(outcome.moves for outcome in outcomes) / len(outcomes),
        "idle_share": {"rollout": 1 - busy[0] / there[0], "train": 1 - busy[1] / there[1]},
    }


def slo_actual(policy: str, arrivals: Sequence[Arrival], residents: int, seed: int) -> float:
    """The share of jobs within their SLO by their own solo time, where responses are shorter than planned."""
    rng = Random(seed)
    share = {arrival.request.id: rng.uniform(0.5, 1.0) for arrival in arrivals}
    shares: PhaseShares = lambda job, done: (share[job], share[job])  # noqa: E731
    world = PlanWorld(pool_of(residents), CLUSTER_POLICIES[policy], arrivals, shares=shares).run()
    return mean(outcome.met for outcome in world.outcomes())


def merged(found: Sequence[Figures]) -> Figures:
    """The mean over seeds of every figure."""
    merged_figures: Figures = {}
    for key, value in found[0].items():
        if isinstance(value, dict):
            merged_figures[key] = merged([each[key] for each in found])
        else:
            merged_figures[key] = None if value is None else mean(each[key] for each in found)
    return merged_figures


def by_key(by_policy: dict[str, Figures]) -> Figures:
    """From figures by policy to policies by figure."""
    keys = next(iter(by_policy.values()))
    return {key: {policy: found[key] for policy, found in by_policy.items()} for key in keys}


class ScaleTask(NamedTuple):
    """One policy's world; `workload` is a window's name or `production`."""

    workload: str
    policy: str
    profile: str
    slo: tuple[float, float]
    residents: int
    seed: int
    proven_max: int
    restart_s: float


def done(task: ScaleTask) -> Figures:
    if task.workload == "production":
        arrivals = production(task.seed)
    else:
        arrivals = from_trace(read_jobs(data_path(task.workload)), task.profile, task.slo, task.seed, task.restart_s)
    world = lived(task.policy, arrivals, task.residents)
    found = figures(world, arrivals, task.residents, task.proven_max)
    found["slo_actual"] = slo_actual(task.policy, arrivals, task.residents, task.seed)
    return found | {"job_hours_per_hour": job_hours(world)}


def job_hours(world: PlanWorld) -> float:
    """Jobs that are active on average, while there are any."""
    stretches = [stretch for stretch in world.stretches if stretch.jobs]
    whole_ns = sum(stretch.ended_ns - stretch.begun_ns for stretch in stretches)
    return sum(len(stretch.jobs) * (stretch.ended_ns - stretch.begun_ns) for stretch in stretches) / whole_ns


def compared(
    pool: Pool,
    workload: str,
    seeds: Sequence[int],
    proven_max: int,
    *,
    profile: str = "mixed",
    slo: tuple[float, float] = SLO,
    residents: int = RESIDENTS,
    policies: Sequence[str] = POLICIES,
    restart_s: float = RESTART_S,
) -> tuple[Figures, dict[str, float]]:
    """The policies on one workload, and how much the seeds differ in `over_optimum`."""
    tasks = [
        ScaleTask(workload, policy, profile, slo, residents, seed, proven_max, restart_s)
        for policy in policies
        for seed in seeds
    ]
    found = pool.map(done, tasks, chunksize=1)
    by_policy: dict[str, Figures] = {}
    spread: dict[str, float] = {}
    for i, policy in enumerate(policies):
        own = found[i * len(seeds) : (i + 1) * len(seeds)]
        by_policy[policy] = merged(own)
        spread[policy] = pstdev(each["over_optimum"] for each in own)
    return by_key(by_policy), spread


def produced(pool: Pool, seeds: Sequence[int], proven_max: int) -> Figures:
    """The production workload from its marginals. `colocated` runs both phases on training nodes alone, in the same
    time: what `solo` pays without its rollout nodes."""
    found, _ = compared(pool, "production", seeds, proven_max)
    return found | {"colocated_usd_per_hour": found["job_hours_per_hour"]["solo"] * GPUS * H800_NANO_USD / 1e9}


PARTS = ("windows", "workload", "slo", "residency", "moves", "planning", "production", "drift")
PROFILES_APART = ("balanced", "rollout_heavy", "train_heavy")
PLANNED_JOBS = 100
SWITCHES_S = (None, 0.0, 2.0, 10.0)


def short(pool: Pool, window: str, seeds: Sequence[int], proven_max: int, **changed: Any) -> Figures:
    found, _ = compared(pool, window, seeds, proven_max, policies=SHARING, **changed)
    return {key: found[key] for key in ("over_optimum", "slo_planned", "slo_actual", "rejected", "moves")}


def restarts(pool: Pool, seeds: Sequence[int], proven_max: int) -> Figures:
    """What `ours` costs and how often it moves a job, by how long a move takes, in seconds."""
    moves: Figures = {}
    for restart_s in (30.0, 120.0, 308.0, 900.0, 3600.0):
        found, _ = compared(pool, WINDOWS[0], seeds, proven_max, policies=("ours",), restart_s=restart_s)
        keys = ("usd_per_hour", "over_optimum", "slo_planned", "moves")
        moves[f"{restart_s:g}"] = {key: found[key]["ours"] for key in keys}
    return moves


def mixed_jobs(seed: int) -> list[Arrival]:
    return from_trace(read_jobs(data_path(WINDOWS[0])), "mixed", SLO, seed)


def planned_with(task: tuple[str, int]) -> Figures:
    how, seed = task
    return planned(pool_of(RESIDENTS, 64), mixed_jobs(seed)[:PLANNED_JOBS], how, seed)


def trained(task: tuple[float | None, int]) -> Figures:
    return train_when(pool_of(RESIDENTS), mixed_jobs(task[1]), task[0])


def extra(seed: int) -> float:
    return extra_rounds(pool_of(RESIDENTS), mixed_jobs(seed))


def planning(pool: Pool, seeds: Sequence[int]) -> Figures:
    """At what quantile jobs are planned, when they train, and what rounds beyond one a cycle could bring."""
    return {how: merged(pool.map(planned_with, [(how, seed) for seed in seeds], chunksize=1)) for how in QUANTILES} | {
        "train_when": {
            "all_in" if switch_s is None else f"piecewise, {switch_s:g} s a switch": merged(
                pool.map(trained, [(switch_s, seed) for seed in seeds], chunksize=1)
            )
            for switch_s in SWITCHES_S
        },
        "extra_rounds_at_most": mean(pool.map(extra, seeds)),
    }


def drifted_with(task: tuple[str, str, int]) -> Figures:
    arm, setting, seed = task
    return drifted(arm, pool_of(RESIDENTS), mixed_jobs(seed)[::2], setting, seed)


def drift(pool: Pool, seeds: Sequence[int]) -> Figures:
    arms, found = (*ARMS, "regroup_hourly"), Figures()
    for setting in SETTINGS:
        tasks = [(arm, setting, seed) for arm in arms for seed in seeds]
        told = pool.map(drifted_with, tasks, chunksize=1)
        by_arm = {arm: merged(told[i * len(seeds) : (i + 1) * len(seeds)]) for i, arm in enumerate(arms)}
        least = by_arm["regroup_hourly"]["usd"]
        found[setting] = {arm: each | {"over_regrouping": each["usd"] / least} for arm, each in by_arm.items()}
    return found


def main(arguments: Arguments) -> Figures:
    quick = arguments.quick
    proven_max = arguments.proven_max or (QUICK_PROVEN_MAX if quick else PROVEN_MAX)
    parts = arguments.part or (("windows",) if quick else PARTS)
    seeds = QUICK_SEEDS if quick else SEEDS
    windows: Figures = {}
    spread: Figures = {}
    with uninterrupted():
        started = multiprocessing.get_context("spawn").Pool(cores())
    with started as pool:
        if "windows" in parts:
            for window in WINDOWS:
                windows[window], spread[window] = compared(pool, window, seeds, proven_max)
        sensitivity: Figures = dict.fromkeys(("workload", "slo", "residency", "moves", "planning"))
        if "workload" in parts:
            sensitivity["workload"] = {
                profile: {window: short(pool, window, seeds, proven_max, profile=profile) for window in WINDOWS}
                for profile in PROFILES_APART
            }
        if "slo" in parts:
            sensitivity["slo"] = {
                str(slo): short(pool, WINDOWS[0], seeds, QUICK_PROVEN_MAX, slo=(slo, slo)) for slo in (1.2, 1.5, 2.0)
            }
        if "residency" in parts:
            sensitivity["residency"] = {
                str(residents): short(pool, WINDOWS[0], seeds, QUICK_PROVEN_MAX, residents=residents)
                for residents in (2, 3, 4, 5)
            }
        if "moves" in parts:
            sensitivity["moves"] = restarts(pool, seeds, QUICK_PROVEN_MAX)
        if "planning" in parts:
            sensitivity["planning"] = planning(pool, seeds)
        return {
            "grain": "simulated by plans",
            "proven_max": proven_max,
            "windows": windows or None,
            "sensitivity": sensitivity if any(sensitivity.values()) else None,
            "production": produced(pool, seeds, QUICK_PROVEN_MAX) if "production" in parts else None,
            "drift": drift(pool, seeds) if "drift" in parts else None,
            "seeds": len(seeds),
            "spread": spread or None,
            "theirs": PRINTED["weave"]["scale"],
        }


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option("--proven-max", type=int, metavar="N", help="prove optima of at most so many jobs"),
        option("--part", action="append", choices=PARTS, help="this part alone; may be given several times"),
    )
