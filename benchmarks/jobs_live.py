"""Jobs that take turns on one set of devices, live: FrozenLake jobs, real processes that die, costs.

Two balanced jobs of different shape (`examples/jobs/one.toml`, `two.toml`, the second paced so that its steps are about
as long as the first one's) and, but for `--quick`, a third that is heavy on rollouts (`three.toml`), engines and
training paced, on two rollout nodes and one training node, in these arms:

- `apart_strict`: each on nodes of its own, one phase after the other; measured one by one, costs added, the time of the
  longer. `in_turn`: the same measurement as of one set of nodes, one job after the other, so that times are added.
- `apart`: a run of its own with a reserved worker, which trains groups while others roll out. `colocated`: one whose
  trainer's device generates as well, without synchronisation; both measured one by one as `apart_strict`.
- `naive`: permits when free, no plan. `shared`: as planned.
- `shared_killed`: with SIGKILL for rollout residents, trainers, orchestrators, the pool's process and, where twelve or
  more fall, a node agent, drawn by seed.

`--arm machines`, instead of all these and as root: the three jobs on a pool of three network namespaces, a training
site and two rollout machines of two devices each, whose nodes join by tickets; the third job's trainer has two ranks.
Node agents are killed, links cut, and the pool's process killed. Beside it `apart_strict`. `weights_identical_share`:
of the jobs, those whose last weights and optimizer states are the same there, bit for bit. `hit`: whether a stroke fell
on a node where the job's rollouts were. With `--quick` three small jobs, and one stroke of each kind, in some minutes.

With `--quick` there are two small jobs with untrained policies, and `apart_strict` has them side by side on nodes of
their own. `step_s` is the median of a job's cycles, `slowdown` over `apart_strict`. `identical_share` of all
trajectories are the same, token for token, as in `apart_strict`. Costs are those of the nodes while they are of a
group. `cpu_use` is the machine's. `pacing_held_share` is the part of paced iterations, groups and updates that took no
longer than modelled: an arm in which it is below 0.95 counts for no time and no cost, and `cost_over` it is null.
"""

import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import ROOT
from benchmarks._common import Arguments, Figures, benchmark, option
from benchmarks._machines import KINDS as STROKES
from benchmarks._machines import REACHED, Machines, lacking, machines_pool
from benchmarks._pools import JOBS, LivePool, at_once, live_pool, residual_nano_usd
from benchmarks._runs import elastic, sets
from benchmarks._shapes import write_policy
from elastic.report import summarise
from elastic.runtime.journal import RunDirectory, SampleRow, TrajectoryRow
from tests.proof import check_run, same_episode, same_weights, trajectories

FULL_NAMES, QUICK_NAMES = ("one", "two", "three"), ("one", "two")
ROLLOUT_NODES, TRAIN_NODES = 2, 1
KINDS = ("a rollout resident", "a trainer", "an orchestrator", "the pool's process")
NODE_AGENT, NODE_AGENT_AT = "a node agent", 12
FULL_STEPS, QUICK_STEPS = 8, 2
FULL_KILLS, QUICK_KILLS = 12, 2
FULL_SEEDS = (1, 2, 3)
ARM_WITHIN_S = 900.0
PACE_HELD = 0.95
SLO = 1.3
"""One that keeps the third job's rollouts from the nodes of the first two."""
PACED = {
    "two": (
        "engine.pacing={prefill_tokens_per_s=4000, decode_step_s={1=0.044, 8=0.055, 16=0.066}}",
        "trainer.pacing.train_tokens_per_s=450",
        "job.plan={rollout_s=6, train_s=5, sync_s=1, rollout_switch_s=0.5, train_switch_s=0.5}",
    )
}
RANKED, RANKS = "three", 2
"""The job of which the trainer has several ranks where training nodes have several devices."""
SMALL = ("rollout.groups=2", "rollout.group_size=4", "rollout.max_turns=3")


@dataclass
class ArmSeen:
    """What an arm came to. `runs` are its jobs' directories."""

    wall_s: float
    usd: float
    idle_share: dict[str, float] | None
    switch_share: float | None
    jobs: dict[str, Figures]
    runs: dict[str, Path]
    kills: int = 0
    residual_nano_usd: int = 0
    cpu: list[float] = field(default_factory=list[float])
    held: int = 0
    paced: int = 0


@dataclass(frozen=True)
class Jobs:
    """The jobs of one seed, and what is set of their configurations."""

    names: Sequence[str]
    steps: int
    seed: int
    policy: Future[Path] | None
    """Written at the same time as the first pool starts; None: the one that was prepared."""
    further: Sequence[str] = ()
    train_gpus: int = 1
    """Of a training node; the ranked job's trainer has a rank on each."""

    def settings(self, name: str) -> list[str]:
        found = [f"run.steps={self.steps}", f"run.seed={self.seed}", f"job.slo={SLO}", *self.further]
        if name == RANKED and self.train_gpus > 1:
            found += ["trainer.kind=transformers", f"trainer.gpus={self.train_gpus}", "trainer.engine.device=cpu"]
        small = () if self.policy is None else (f"model.checkpoint={self.policy.result()}", *SMALL)
        return [*found, *(small or PACED.get(name, ()))]

    def submit(self, pool: LivePool, names: Iterable[str], runs: Path) -> dict[str, Path]:
        """One after the other; where nobody's place depends on that, at once."""
        jobs = {name: (JOBS / f"{name}.toml", self.settings(name)) for name in names}
        if self.policy is not None:
            return pool.submit_at_once(jobs, runs)
        return {name: pool.submit(file, name, runs, settings) for name, (file, settings) in jobs.items()}


def paces(runs: Iterable[Path]) -> tuple[int, int]:
    """How many paced pieces of work were on time, of how many, by the logs of runs' processes."""
    held = of = 0
    for path in {path for run in runs for path in run.rglob("*.log")}:
        for line in path.read_bytes().splitlines():
            if b'"event": "pace"' in line:
                told = json.loads(line)
                held, of = held + told["held"], of + told["of"]
    return held, of


def machine_use(run: Path) -> list[float]:
    with RunDirectory(run).journals() as journals:
        return [row.status.cpu_share for journal in journals for row in journal.rows(SampleRow)]


def seen(pool: LivePool, runs: Mapping[str, Path], wall_s: float, kills: int = 0) -> ArmSeen:
    """The arm by the pool's own report and the runs' journals."""
    report = pool.report()
    jobs: dict[str, Figures] = {}
    for job in report["jobs"]:
        jobs[job["name"]] = {
            "step_s": job["cycle_s"],
            "slo": job["slo"],
            "success_after": summarise(RunDirectory(runs[job["name"]])).success_last,
            "usd": job["usd"],
        }
    held, paced = paces(runs.values())
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
        cpu=[share for run in runs.values() for share in machine_use(run)],
        held=held,
        paced=paced,
    )


def together(directory: Path, policy: str, jobs: Jobs, kills: int = 0) -> ArmSeen:
    """All jobs on one pool at the same time."""
    with live_pool(directory, policy, ROLLOUT_NODES, TRAIN_NODES) as pool:
        return carried_out(pool, directory / "runs", jobs, kills)()


def carried_out(pool: LivePool, runs: Path, jobs: Jobs, kills: int = 0) -> Callable[[], ArmSeen]:
    """All jobs have come to their ends; what looks at the pool and says what that came to."""
    began_s = time.monotonic()
    submitted = jobs.submit(pool, jobs.names, runs)
    killed = disturbed(pool, random.Random(jobs.seed), kills) if kills else 0
    pool.wait_over(jobs.names, ARM_WITHIN_S)
    wall_s = time.monotonic() - began_s
    return lambda: seen(pool, submitted, wall_s, killed)


def begun(pool: LivePool) -> None:
    """Wait until all jobs have begun."""
    pool.until("all jobs", lambda now: all(j["state"] == "running" or j["over"] for j in now["jobs"]), ARM_WITHIN_S)


def disturbed(pool: LivePool, rng: random.Random, kills: int) -> int:
    """So many of the pool's processes are killed in turn once all jobs have begun; how many were there to be killed."""
    begun(pool)
    killed = 0
    while killed < kills and not all(job["over"] for job in pool.jobs()):
        # When a kill comes is drawn: nothing is waited for.
        time.sleep(rng.uniform(2.0, 6.0) if kills > QUICK_KILLS else rng.uniform(0.5, 1.5))
        last = killed + 1 == kills >= NODE_AGENT_AT
        killed += pool.kill(NODE_AGENT if last else KINDS[killed % len(KINDS)], rng) is not None
    return killed


MACHINES, SLO_OF_MACHINES = 2, 2.0


def on_machines(directory: Path, jobs: Jobs, strokes: int) -> ArmSeen:
    """All jobs on a pool of several machines, of which processes are killed and links cut."""
    with machines_pool(directory, "ours", MACHINES, TRAIN_NODES, jobs.train_gpus) as (pool, machines):
        began_s = time.monotonic()
        submitted = jobs.submit(pool, jobs.names, directory / "runs")
        strokes_on = struck_on(pool, machines, random.Random(jobs.seed), strokes)
        pool.wait_over(jobs.names, ARM_WITHIN_S)
        found = seen(pool, submitted, time.monotonic() - began_s, len(strokes_on))
    for name, told in found.jobs.items():
        told["hit"] = any(name in those for those in strokes_on)
    return found


def struck_on(pool: LivePool, machines: Machines, rng: random.Random, strokes: int) -> list[set[str]]:
    """So many strokes in turn of each kind, once all jobs have begun, as far as there is time; returns of each whose
    rollouts were on the nodes that it struck."""
    begun(pool)
    found: list[set[str]] = []
    while len(found) < strokes and not all(job["over"] for job in pool.jobs()):
        # When a stroke comes is drawn: nothing is waited for.
        time.sleep(rng.uniform(1.0, 5.0))
        places = {job["name"]: {*job["rollout"]} for job in pool.jobs()}
        nodes = machines.disturb(pool, STROKES[len(found) % len(STROKES)], rng)
        found.append({name for name, place in places.items() if place & nodes})
    return found


def machines_seeded(directory: Path, jobs: Jobs, strokes: int) -> dict[str, ArmSeen]:
    place = directory / str(jobs.seed)
    apart, _ = one_by_one(place / "apart_strict", jobs)
    of_machines = replace(jobs, further=(*jobs.further, *REACHED))
    return {"apart_strict": apart, "machines": on_machines(place / "machines", of_machines, strokes)}


def same_weights_share(arms: Mapping[str, ArmSeen]) -> float:
    alone, found = arms["apart_strict"].runs, arms["machines"].runs
    return mean(same_weights(run, found[name]) for name, run in alone.items())


def one_by_one(directory: Path, jobs: Jobs) -> tuple[ArmSeen, ArmSeen]:
    """The jobs one after the other: as if each had nodes of its own, and on one set of nodes."""
    arms: list[ArmSeen] = []
    for name in jobs.names:
        place = directory / name
        with live_pool(place, "solo", 1, 1, train_gpus=jobs.train_gpus) as pool:
            began_s = time.monotonic()
            runs = jobs.submit(pool, [name], place / "runs")
            pool.wait_over([name], ARM_WITHIN_S)
            arms.append(seen(pool, runs, time.monotonic() - began_s))
    walls = [arm.wall_s for arm in arms]
    idles = [arm.idle_share or {} for arm in arms]
    strict = ArmSeen(
        wall_s=max(walls),
        usd=sum(arm.usd for arm in arms),
        idle_share={phase: mean(idle.get(phase, 0.0) for idle in idles) for phase in ("rollout", "train")},
        switch_share=mean(arm.switch_share or 0.0 for arm in arms),
        jobs={name: told for arm in arms for name, told in arm.jobs.items()},
        runs={name: run for arm in arms for name, run in arm.runs.items()},
        residual_nano_usd=sum(abs(arm.residual_nano_usd) for arm in arms),
        cpu=[share for arm in arms for share in arm.cpu],
        held=sum(arm.held for arm in arms),
        paced=sum(arm.paced for arm in arms),
    )
    return strict, replace(strict, wall_s=sum(walls))


RESERVED = ("reserved", ["providers.reserved={max_workers=1, usd_per_gpu_hour=1.85}"])
COLOCATED = ("", ["seeding.policy=fixed", f"seeding.window_s={ARM_WITHIN_S}"])


def plain(directory: Path, jobs: Jobs, providers: str, settings: Sequence[str]) -> ArmSeen:
    """Plain runs, one after the other, each with these providers and a trainer of its own."""
    told, runs, walls, usd = dict[str, Figures](), dict[str, Path](), list[float](), 0.0
    for name in jobs.names:
        own = [f"run.directory={directory}", "trainer.usd_per_gpu_hour=5.28", *settings, *jobs.settings(name)]
        out = elastic("run", str(JOBS / f"{name}.toml"), "--providers", providers, "--json", *sets(own))
        runs[name] = ROOT / Path(json.loads(out.splitlines()[-1])["report"]).parent
        summary = summarise(RunDirectory(runs[name]))
        walls.append(summary.wall_s)
        usd += summary.usd
        step_s = median(step.duration_s for step in summary.steps)
        told[name] = {"step_s": step_s, "slo": None, "success_after": summary.success_last, "usd": summary.usd}
    held, paced = paces(runs.values())
    cpu = [share for run in runs.values() for share in machine_use(run)]
    return ArmSeen(max(walls), usd, None, None, told, runs, cpu=cpu, held=held, paced=paced)


def episodes(runs: Mapping[str, Path]) -> dict[tuple[str, str], TrajectoryRow]:
    return {(name, key): row for name, run in runs.items() for key, row in trajectories(RunDirectory(run)).items()}


def seeded(directory: Path, jobs: Jobs, kills: int, *, quick: bool) -> dict[str, ArmSeen]:
    place = directory / str(jobs.seed)
    arms: dict[str, ArmSeen] = {}
    if quick:
        return seeded_quickly(place, jobs, kills)
    arms["apart_strict"], arms["in_turn"] = one_by_one(place / "apart_strict", jobs)
    arms["apart"] = plain(place / "apart", jobs, *RESERVED)
    arms["colocated"] = plain(place / "colocated", jobs, *COLOCATED)
    arms["naive"] = together(place / "naive", "naive", jobs)
    arms["shared"] = together(place / "shared", "ours", jobs)
    arms["shared_killed"] = together(place / "shared_killed", "ours", jobs, kills)
    return arms


def seeded_quickly(place: Path, jobs: Jobs, kills: int) -> dict[str, ArmSeen]:
    """Two arms, one after the other; their pools start and stop at once."""
    many, apart, shared = len(jobs.names), place / "apart_strict", place / "shared_killed"
    pools = live_pool(apart, "solo", many, many), live_pool(shared, "ours", ROLLOUT_NODES, TRAIN_NODES)
    with at_once(pools) as (of_apart, of_shared), ThreadPoolExecutor(1) as beside:
        first = beside.submit(carried_out(of_apart, apart / "runs", jobs))
        second = carried_out(of_shared, shared / "runs", jobs, kills)
        return {"apart_strict": first.result(), "shared_killed": second()}


def figures_of(arms: Mapping[str, ArmSeen]) -> Figures:
    alone = arms["apart_strict"].jobs
    shown: Figures = {}
    for name, arm in arms.items():
        jobs: Figures = {}
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
            "pacing_held_share": arm.held / arm.paced if arm.paced else None,
            "jobs": jobs,
        }
    return shown


def main(arguments: Arguments) -> Figures:
    quick, machines = arguments.quick, arguments.arm is not None
    if machines and (missing := lacking()):
        raise SystemExit(f"--arm machines: {missing}")
    steps, kills = (QUICK_STEPS, QUICK_KILLS) if quick else (FULL_STEPS, FULL_KILLS)
    names = FULL_NAMES if machines or not quick else QUICK_NAMES
    for name in () if quick else names:
        elastic("prepare", str(JOBS / f"{name}.toml"))
    directory = arguments.scratch
    with ThreadPoolExecutor(1) as beside:
        policy = beside.submit(write_policy, directory / "policy") if quick else None
        seeds = FULL_SEEDS[:1] if quick else FULL_SEEDS
        if machines:
            slo = (f"job.slo={SLO_OF_MACHINES}",)
            strokes = len(STROKES) if quick else 3 * len(STROKES)
            jobs = [Jobs(names, steps, seed, policy, slo, RANKS) for seed in seeds]
            lived = [machines_seeded(directory, each, strokes) for each in jobs]
        else:
            lived = [seeded(directory, Jobs(names, steps, seed, policy), kills, quick=quick) for seed in seeds]
        same = total = lost = twice = imbalance = 0
        for arms in lived:
            expected = episodes(arms["apart_strict"].runs)
            for arm in arms.values():
                found = episodes(arm.runs)
                same += sum(same_episode(row, found.get(key)) for key, row in expected.items())
                total += len(expected.keys() | found.keys())
                for run in arm.runs.values():
                    verdict = check_run(RunDirectory(run))
                    lost += verdict.tokens_lost
                    twice += verdict.groups_twice
                    imbalance += verdict.ledger_imbalance_ns
        each = [figures_of(arms) for arms in lived]
        same_weights_of = [same_weights_share(arms) for arms in lived] if machines else []
    held = sum(arm.held for arms in lived for arm in arms.values())
    paced = sum(arm.paced for arms in lived for arm in arms.values())
    whole = "machines" if machines else "shared_killed" if quick else "shared"

    def over(name: str, key: str) -> float | None:
        """What sharing takes of an arm's, where both were measured at their modelled pace."""
        if any(
            name not in figures or min(_pace(figures[arm]) for arm in (name, whole)) < PACE_HELD for figures in each
        ):
            return None
        return mean(figures[whole][key] / figures[name][key] for figures in each)

    return {
        "measured": "live, on this machine; engines and training paced to modelled devices",
        "seeds": len(each),
        "steps": steps,
        "arms": averaged(each),
        "cost_over": {name: over(name, "usd") for name in ("apart", "apart_strict", "colocated", "in_turn")},
        "time_over_in_turn": over("in_turn", "wall_s"),
        "identical_share": same / total,
        "weights_identical_share": mean(same_weights_of) if machines else None,
        "kills": sum(arm.kills for arms in lived for arm in arms.values()),
        "tokens_lost": lost,
        "trained_twice": twice,
        "imbalance_ns": imbalance,
        "bill_residual_nano_usd": sum(abs(arm.residual_nano_usd) for arms in lived for arm in arms.values()),
        "cpu_use": mean(share for arms in lived for arm in arms.values() for share in arm.cpu),
        "pacing_held_share": held / paced,
    }


def _pace(figures: Mapping[str, Any]) -> float:
    return figures["pacing_held_share"] or 0.0


def averaged(found: Sequence[Any]) -> Any:
    """Leaf by leaf over seeds; whether an SLO was met is met in all."""
    first = found[0]
    if isinstance(first, Mapping):
        return {key: averaged([each[key] for each in found]) for key in first}
    if isinstance(first, bool):
        return all(found)
    return None if any(each is None for each in found) else mean(found)


if __name__ == "__main__":
    benchmark(__doc__, main, option("--arm", choices=("machines",), help="this instead of all others; as root"))
