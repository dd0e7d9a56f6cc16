"""Jobs that take turns on one set of devices, live: two FrozenLake jobs, real processes that die, costs.

Two jobs of different shape (`examples/jobs/one.toml`, `two.toml`), engines and training paced, on two rollout nodes and
one training node, in these arms:

- `apart_strict`: each on nodes of its own, one phase after the other; measured one by one, costs added, the time of
  the longer. `apart`: a run of its own with as many reserved workers, which trains groups while others roll out.
- `in_turn`: one set of nodes, one job after the other. `naive`: permits when free, no plan. `shared`: as planned.
- `shared_killed`: with SIGKILL for rollout residents, trainers, orchestrators and the pool's process, drawn by seed.

`step_s` is the median of a job's cycles, `slowdown` over `apart_strict`. `identical_share` of all trajectories are the
same, token for token, as in `apart_strict`. Costs are those of the nodes while they are of a group. `cpu_use` is the
machine's, and `pacing_held_share` the part of samples in which paced engines kept their pace: below 0.95 no time or
cost here counts.
"""

import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from _common import ROOT, Arguments, emit, parse_arguments
from _pools import JOBS, LivePool, live_pool, residual_nano_usd
from _proof import judge, same_episode, trajectories
from _runs import elastic, sets

from elastic.report import summarise
from elastic.runtime.journal import RunDirectory, SampleRow, TrajectoryRow

NAMES = ("one", "two")
ROLLOUT_NODES, TRAIN_NODES = 2, 1
KINDS = ("a rollout resident", "a trainer", "an orchestrator", "the pool's process")
FULL_STEPS, QUICK_STEPS = 8, 2
FULL_KILLS, QUICK_KILLS = 12, 2
FULL_SEEDS = (1, 2, 3)
ARM_WITHIN_S = 900.0


@dataclass
class ArmSeen:
    """What an arm came to. `runs` are its jobs' directories."""

    wall_s: float
    usd: float
    idle_share: dict[str, float] | None
    switch_share: float | None
    jobs: dict[str, dict[str, Any]]
    runs: dict[str, Path]
    kills: int = 0
    residual_nano_usd: int = 0
    cpu: list[float] = field(default_factory=list[float])
    held: list[bool] = field(default_factory=list[bool])


def settings(steps: int, seed: int) -> list[str]:
    return [f"run.steps={steps}", f"run.seed={seed}"]


def submitted(pool: LivePool, names: Iterable[str], runs: Path, steps: int, seed: int) -> dict[str, Path]:
    return {name: pool.submit(JOBS / f"{name}.toml", name, runs, settings(steps, seed)) for name in names}


def seen(pool: LivePool, runs: Mapping[str, Path], wall_s: float, kills: int = 0) -> ArmSeen:
    """The arm by the pool's own report and the runs' journals."""
    report = pool.report()
    jobs: dict[str, dict[str, Any]] = {}
    cpu, held = list[float](), list[bool]()
    for job in report["jobs"]:
        directory = RunDirectory(runs[job["name"]])
        jobs[job["name"]] = {
            "step_s": job["cycle_s"],
            "slo": job["slo"],
            "success_after": summarise(directory).success_last,
            "usd": job["usd"],
        }
        with directory.journals() as journals:
            for journal in journals:
                for row in journal.rows(SampleRow):
                    cpu.append(row.status.cpu_share)
                    held.append(row.status.pacing_holds)
    slices_s = sum(node["slice_share"] + node["switching_share"] for node in report["nodes"])
    switching = sum(node["switching_share"] for node in report["nodes"])
    return ArmSeen(
        wall_s=wall_s,
        usd=report["usd"],
        idle_share=report["idle_share"],
        switch_share=switching / slices_s if slices_s else None,
        jobs=jobs,
        runs=dict(runs),
        kills=kills,
        residual_nano_usd=residual_nano_usd(pool),
        cpu=cpu,
        held=held,
    )


def together(directory: Path, policy: str, steps: int, seed: int, kills: int = 0) -> ArmSeen:
    """Both jobs on one pool at the same time."""
    with live_pool(directory, policy, ROLLOUT_NODES, TRAIN_NODES) as pool:
        began_s = time.monotonic()
        runs = submitted(pool, NAMES, directory / "runs", steps, seed)
        killed = disturbed(pool, random.Random(seed), kills) if kills else 0
        pool.wait_over(NAMES, ARM_WITHIN_S)
        return seen(pool, runs, time.monotonic() - began_s, killed)


def disturbed(pool: LivePool, rng: random.Random, kills: int) -> int:
    """So many of the pool's processes are killed in turn once both jobs work; how many were there to be killed."""
    pool.wait(lambda jobs: all(job["state"] == "running" for job in jobs), ARM_WITHIN_S)
    killed = 0
    while killed < kills and not all(job["over"] for job in pool.jobs()):
        time.sleep(rng.uniform(2.0, 6.0))  # When a kill comes is drawn: nothing is waited for.
        killed += pool.kill(KINDS[killed % len(KINDS)], rng) is not None
    return killed


def one_by_one(directory: Path, steps: int, seed: int, *, same_nodes: bool) -> ArmSeen:
    """The jobs one after the other: on the same nodes, or each as if it had nodes of its own."""
    arms: list[ArmSeen] = []
    for name in NAMES:
        place = directory / name
        with live_pool(place, "solo", ROLLOUT_NODES, TRAIN_NODES) as pool:
            began_s = time.monotonic()
            runs = submitted(pool, [name], place / "runs", steps, seed)
            pool.wait_over([name], ARM_WITHIN_S)
            arms.append(seen(pool, runs, time.monotonic() - began_s))
    walls = [arm.wall_s for arm in arms]
    idles = [arm.idle_share or {} for arm in arms]
    return ArmSeen(
        wall_s=sum(walls) if same_nodes else max(walls),
        usd=sum(arm.usd for arm in arms),
        idle_share={phase: mean(idle.get(phase, 0.0) for idle in idles) for phase in ("rollout", "train")},
        switch_share=mean(arm.switch_share or 0.0 for arm in arms),
        jobs=arms[0].jobs | arms[1].jobs,
        runs=arms[0].runs | arms[1].runs,
        residual_nano_usd=sum(abs(arm.residual_nano_usd) for arm in arms),
        cpu=[share for arm in arms for share in arm.cpu],
        held=[holds for arm in arms for holds in arm.held],
    )


def apart(directory: Path, steps: int, seed: int) -> ArmSeen:
    """Plain runs, each with a reserved worker and a trainer of its own."""
    jobs, runs, walls, usd = dict[str, dict[str, Any]](), dict[str, Path](), list[float](), 0.0
    for name in NAMES:
        reserved = "providers.reserved={max_workers=1, usd_per_gpu_hour=1.85}"
        own = [f"run.directory={directory}", "trainer.usd_per_gpu_hour=5.28", reserved, *settings(steps, seed)]
        out = elastic("run", str(JOBS / f"{name}.toml"), "--providers", "reserved", "--json", *sets(own))
        runs[name] = ROOT / Path(json.loads(out.splitlines()[-1])["report"]).parent
        summary = summarise(RunDirectory(runs[name]))
        walls.append(summary.wall_s)
        usd += summary.usd
        step_s = median(step.duration_s for step in summary.steps)
        jobs[name] = {"step_s": step_s, "slo": None, "success_after": summary.success_last, "usd": summary.usd}
    return ArmSeen(max(walls), usd, None, None, jobs, runs)


def episodes(arm: ArmSeen) -> dict[tuple[str, str], TrajectoryRow]:
    return {(name, key): row for name, run in arm.runs.items() for key, row in trajectories(RunDirectory(run)).items()}


def seeded(directory: Path, steps: int, kills: int, seed: int, *, quick: bool) -> dict[str, ArmSeen]:
    place = directory / str(seed)
    arms = {"apart_strict": one_by_one(place / "apart_strict", steps, seed, same_nodes=False)}
    if not quick:
        arms["apart"] = apart(place / "apart", steps, seed)
        arms["in_turn"] = one_by_one(place / "in_turn", steps, seed, same_nodes=True)
        arms["naive"] = together(place / "naive", "naive", steps, seed)
        arms["shared"] = together(place / "shared", "ours", steps, seed)
    arms["shared_killed"] = together(place / "shared_killed", "ours", steps, seed, kills)
    return arms


def figures_of(arms: Mapping[str, ArmSeen]) -> dict[str, Any]:
    alone = arms["apart_strict"].jobs
    shown: dict[str, Any] = {}
    for name, arm in arms.items():
        jobs: dict[str, Any] = {}
        for job, figures in arm.jobs.items():
            own_s, alone_s = figures["step_s"], alone[job]["step_s"]
            slowdown = own_s / alone_s if own_s and alone_s else None
            slo = alone[job]["slo"]
            jobs[job] = figures | {"slowdown": slowdown, "slo": slo, "met": slowdown is not None and slowdown <= slo}
        shown[name] = {
            "wall_s": arm.wall_s,
            "usd": arm.usd,
            "idle_share": arm.idle_share,
            "switch_share": arm.switch_share,
            "jobs": jobs,
        }
    return shown


def main(arguments: Arguments) -> dict[str, Any]:
    quick = arguments.quick
    steps, kills = (QUICK_STEPS, QUICK_KILLS) if quick else (FULL_STEPS, FULL_KILLS)
    for name in NAMES:
        elastic("prepare", str(JOBS / f"{name}.toml"))
    with TemporaryDirectory() as directory:
        seeds = FULL_SEEDS[:1] if quick else FULL_SEEDS
        lived = [seeded(Path(directory), steps, kills, seed, quick=quick) for seed in seeds]
        same = total = lost = twice = imbalance = 0
        for arms in lived:
            expected = episodes(arms["apart_strict"])
            for arm in arms.values():
                found = episodes(arm)
                same += sum(same_episode(row, found.get(key)) for key, row in expected.items())
                total += len(expected.keys() | found.keys())
                for run in arm.runs.values():
                    verdict = judge(RunDirectory(run))
                    lost += verdict.tokens_lost
                    twice += verdict.groups_twice
                    imbalance += verdict.ledger_imbalance_ns
        each = [figures_of(arms) for arms in lived]
    costs = [{name: arm["usd"] for name, arm in figures.items()} for figures in each]
    held = [holds for arms in lived for arm in arms.values() for holds in arm.held]
    whole = "shared_killed" if quick else "shared"
    return {
        "measured": "live, on this machine; engines and training paced to modelled devices",
        "seeds": len(each),
        "steps": steps,
        "arms": averaged(each),
        "cost_over": {
            name: None if quick else mean(cost[whole] / cost[name] for cost in costs)
            for name in ("apart", "apart_strict", "in_turn")
        },
        "time_over_in_turn": None
        if quick
        else mean(figures["shared"]["wall_s"] / figures["in_turn"]["wall_s"] for figures in each),
        "identical_share": same / total,
        "kills": sum(arm.kills for arms in lived for arm in arms.values()),
        "tokens_lost": lost,
        "trained_twice": twice,
        "imbalance_ns": imbalance,
        "bill_residual_nano_usd": sum(abs(arm.residual_nano_usd) for arms in lived for arm in arms.values()),
        "cpu_use": mean(share for arms in lived for arm in arms.values() for share in arm.cpu),
        "pacing_held_share": sum(held) / len(held),
    }


def averaged(found: Sequence[Any]) -> Any:
    """Leaf by leaf over seeds; whether an SLO was met is met in all."""
    first = found[0]
    if isinstance(first, Mapping):
        return {key: averaged([each[key] for each in found]) for key in first}
    if isinstance(first, bool):
        return all(found)
    return None if any(each is None for each in found) else mean(found)


if __name__ == "__main__":
    options = parse_arguments(__doc__)
    emit(main(options), options)
