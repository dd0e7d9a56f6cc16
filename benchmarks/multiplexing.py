"""Jobs that take turns on one set of devices, token by token on virtual time, and what it gains.

Everything is simulated: the real `Cluster`, and for each job the real scheduler and run, on rooflines of H20 and H800.
Groups are those of Weave's Fig. 10 (Table 3): `temporal` two jobs A; `train` two D and an E on rollout nodes of their
own and one training node; `spatial` a C on two nodes of each kind, and two D in its gaps.

Calibrated on: Weave's Table 1 (devices, prices), Table 3 (models, lengths, batches), and for each kind of job, by its
training rate and one factor on its engine's times, the ratio of rollout to training that §6.2 states (D 2.5, E 6) or
that is assumed (A 1, C 0.7), and an iteration alone of Table 4 (A 257.7, D and E 525.4, C 574.6 s). All else is a
result. A switch copies Table 2's bytes over a node's 8 x 25 GB/s: in and out for training, in alone for rollouts, whose
weights stay in host memory. Whole weights are synchronised at 20 Gbit/s.

- `throughput_per_usd`: iterations a dollar, each job's weighed by its own alone, over `solo`: alone, one phase strictly
  after the other. `solo_pipelined` is a run of ours alone, which trains groups while others roll out. `colocated` has
  all phases on the training nodes, without synchronisation. `gavel` (computed) shares whole nodes by whole steps, or
  has a job where its iterations are cheapest, within its SLO.
- `iteration_s`: mean over jobs; `ideal` has all phases on H800 and no synchronisation. `shared` is `ours`.
- `naive_slowdown`: two rollout-heavy jobs on one rollout node, permits when free.
- `tail`: how much sooner iterations of a pair come that moves its tails together, on rollout nodes of one GPU each.
- `theirs`: what Weave prints, and what its Tables 1 and 4 give.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Any

import msgspec

from benchmarks._common import PRINTED, Arguments, Figures, benchmark
from benchmarks._configurations import configuration
from elastic.compose import scheduling
from elastic.compose.plan import resolve
from elastic.compose.scheduling import limits, run_plan
from elastic.config import Config
from elastic.core.cluster import ClusterPolicies, JobRequest, NodeKind, PhasePlan, PoolSpec, WaitLimits
from elastic.core.cluster import events as e
from elastic.core.cluster.types import PhaseKind
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S
from elastic.runtime.journal import NullJournal
from elastic.simulation import run as simulation
from elastic.simulation.jobs.world import JobsWorld
from elastic.simulation.performance.pool import PoolMember, SwitchTimes
from elastic.simulation.performance.profile import Device, Profile, load_profile
from elastic.simulation.performance.run import POOL, SharedPool, SimulatedRun, rare_collections
from policies.clusters import CLUSTER_POLICIES
from policies.drift import NoDrift
from policies.tails import NoTails
from providers.base import ProviderSettings

WEAVE = PRINTED["weave"]
USD_PER_GPU_HOUR = {"H20": 1.85, "H800": 5.28}
GPUS = 8
HOST_LINK_GB_PER_S = 8 * 25.0
SYNC_BYTES_PER_S = 20e9 / 8
SLO = 1.3
"""Not printed for these groups, which form with it as they are drawn. With 1.5 two D share a rollout node: cheaper by a
sixth, and slower by more. Phases are planned as the longest that were seen alone."""
WITHIN_S = 24 * 3600.0
HORIZON_NS = 30 * 24 * 3600 * NS_PER_S


@dataclass(frozen=True)
class JobType:
    """Weave's Table 3. `over_training` is a rollout's time over training's, `solo_s` an iteration alone (Table 4), the
    `gb` are Table 2's for a node."""

    model: str
    gpus_per_worker: int
    tokens: int
    turns: int
    responses: int
    over_training: float
    solo_s: float
    rollout_gb: float
    train_gb: float
    nodes: int = 1


TYPES = {letter: JobType(**kind) for letter, kind in WEAVE["jobs"].items()}
GROUPS = {"temporal": "AA", "train": "DDE", "spatial": "CDD"}
THEIRS = WEAVE["groups"]


@dataclass(frozen=True)
class Setting:
    """How jobs are run. `rollout` is the kind of device for rollouts; `synchronised` whether weights take their way."""

    steps: int
    seed: int
    rollout: str = "H20"
    synchronised: bool = True
    switched: bool = True
    node_gpus: int = GPUS


@dataclass(frozen=True)
class Pace:
    """Tokens that a GPU trains on in a second, and how many times as long engines take as their rooflines say."""

    train_tokens_per_s: float
    slower: float


@dataclass(frozen=True)
class JobSeen:
    """An iteration's mean time, and the longest phases, in seconds; the first iteration, with its boots, left out."""

    iteration_s: float
    rollout_s: float
    train_s: float


class JobRun:
    """One job's run on a modelled pool, timed by when its steps begin."""

    def __init__(self, name: str, kind: JobType, setting: Setting, pace: Pace) -> None:
        self.name, self.kind, self.setting, self._pace = name, kind, setting, pace
        self._run: SimulatedRun | None = None

    def make(self, world: JobsWorld, member: PoolMember) -> SimulatedRun:
        setting, kind = self.setting, self.kind
        config = config_of(self.name, kind, setting, self._pace, len(member.train_nodes))
        plan = resolve(config, [], self.name)
        device = device_of(kind, setting, self._pace, config)
        scheduler = Scheduler(run_plan(plan), limits(config), scheduling.policies(config), 0)

        def ended() -> None:
            world.tell(e.JobFinished(job=self.name))

        shared = SharedPool(
            loop=world.loop,
            member=member,
            settings=ProviderSettings(
                max_workers=kind.nodes * GPUS // kind.gpus_per_worker,
                usd_per_gpu_hour=USD_PER_GPU_HOUR[setting.rollout],
                gpus_per_worker=kind.gpus_per_worker,
            ),
            per_node=max(1, setting.node_gpus // kind.gpus_per_worker),
            within_s=WITHIN_S,
            ended=ended,
        )
        experiment = simulation.Experiment(profile=f"H800/{kind.model}", frame_s=10.0)
        self._run = simulation.build(plan, experiment, scheduler, NullJournal(), shared, {POOL: device})
        return self._run

    @property
    def switch(self) -> SwitchTimes:
        if not self.setting.switched:
            return SwitchTimes()
        rollout_ns, train_ns = (
            round(gb / HOST_LINK_GB_PER_S * NS_PER_S) for gb in (self.kind.rollout_gb, self.kind.train_gb)
        )
        return SwitchTimes(rollout_resume_ns=rollout_ns, train_resume_ns=train_ns, train_park_ns=train_ns)

    def request(self, seen: JobSeen | None) -> JobRequest:
        """`seen` is the job alone; None where it is about to be seen alone."""
        known = seen or JobSeen(1e5, 1e5, 1e5)
        plan = PhasePlan(
            rollout_ns=round(known.rollout_s * NS_PER_S),
            train_ns=round(known.train_s * NS_PER_S),
            rollout_switch_ns=self.switch.rollout_ns,
            train_switch_ns=self.switch.train_ns,
        )
        per_node = GPUS // self.setting.node_gpus
        return JobRequest(
            id=self.name,
            slo=SLO,
            steps=self.setting.steps,
            plan=plan,
            rollout_nodes=self.kind.nodes * per_node,
            train_nodes=self.kind.nodes,
            rollout_bytes=round(self.kind.rollout_gb * 1e9 / per_node),
            train_bytes=round(self.kind.train_gb * 1e9),
        )

    def seen(self, world: JobsWorld) -> JobSeen:
        assert self._run is not None
        if not self._run.over or self._run.failed:
            raise AssertionError(f"{self.name} did not come to its end: {self._run.failed or world.cluster.waits[:5]}")
        phases = [phase for phase in world.phases if phase.job == self.name]
        rolled = [phase for phase in phases if phase.phase is PhaseKind.ROLLOUT]
        trained = [p for p in phases if p.phase is PhaseKind.TRAIN and p.began_ns > rolled[0].began_ns]
        switch, steps = self.switch, self.setting.steps
        return JobSeen(
            iteration_s=(trained[-1].ended_ns - trained[0].ended_ns) / (steps - 1) / NS_PER_S,
            rollout_s=max(p.ended_ns - p.began_ns - switch.rollout_ns for p in rolled) / NS_PER_S,
            train_s=max(p.ended_ns - p.began_ns - switch.train_ns for p in trained) / NS_PER_S,
        )


def device_of(kind: JobType, setting: Setting, pace: Pace, config: Config) -> Device:
    profile = load_profile(f"{setting.rollout}/{kind.model}", kind.gpus_per_worker)
    profile = slowed(msgspec.structs.replace(profile, **numbers_of(kind, setting)), pace.slower)
    return Device(profile=profile, rates=simulation.rates_of(config.engine, profile, "engine"))


def slowed(profile: Profile, times: float) -> Profile:
    return msgspec.structs.replace(
        profile,
        prefill_tokens_per_s=profile.prefill_tokens_per_s / times,
        decode_step_s={batch: times * step_s for batch, step_s in profile.decode_step_s.items()},
        context_s=times * profile.context_s,
        overhead_s=times * profile.overhead_s,
    )


def numbers_of(kind: JobType, setting: Setting) -> dict[str, float]:
    profile = load_profile(f"H800/{kind.model}", kind.gpus_per_worker)
    if not setting.synchronised:
        return {"delta_bytes": 0.0, "first_load_s": 0.0, "load_s": 0.0, "apply_s": 0.0}
    return {"delta_bytes": profile.keyframe_bytes, "link_bytes_per_s": SYNC_BYTES_PER_S}


def seed_of(name: str, setting: Setting) -> int:
    """No two jobs of a group draw the same responses."""
    return 100 * setting.seed + int(name.rpartition("-")[2])


def config_of(
    name: str, kind: JobType, setting: Setting, pace: Pace, train_nodes: int, **sections: Mapping[str, Any]
) -> Config:
    context = kind.turns * kind.tokens + 4096
    batch = kind.responses * kind.gpus_per_worker // (kind.nodes * GPUS)  # So that all workers have as much to do.
    numbers = numbers_of(kind, setting) | {"train_tokens_per_s": pace.train_tokens_per_s, "trainer_boot_s": 1.0}
    return configuration(
        "multiplexing",
        policy=kind.model,
        run={"name": name, "seed": seed_of(name, setting), "steps": setting.steps},
        simulation={"numbers": numbers},
        rollout={"groups": kind.responses // 8, "max_turns": kind.turns, "max_tokens_per_turn": kind.tokens},
        trainer={"gpus": train_nodes * GPUS},
        engine={"max_batch": batch, "max_context_tokens": context},
        **sections,
    )


def pool_of(rollout: int, train: int, setting: Setting) -> PoolSpec:
    memory = 2 * 10**12
    kinds = {
        phase: NodeKind(gpus=gpus, memory_bytes=memory, nano_usd_per_hour=round(gpus * USD_PER_GPU_HOUR[device] * 1e9))
        for phase, gpus, device in (("rollout", setting.node_gpus, setting.rollout), ("train", GPUS, "H800"))
    }
    return PoolSpec.uniform(
        rollout=kinds["rollout"],
        train=kinds["train"],
        rollout_nodes=rollout * GPUS // setting.node_gpus,
        train_nodes=train,
    )


@dataclass(frozen=True)
class GroupSeen:
    jobs: dict[str, JobSeen]
    usd_per_hour: float


def lived(
    kinds: Mapping[str, JobType],
    setting: Setting,
    policies: ClusterPolicies,
    paces: Mapping[str, Pace],
    alone: Mapping[str, JobSeen] | None = None,
    pool: tuple[int, int] | None = None,
) -> GroupSeen:
    """Jobs that come at once, until all have ended. `paces` are their devices', `alone` what they are alone."""
    nodes = sum(kind.nodes for kind in kinds.values())
    spec = pool_of(*(pool or (nodes, nodes)), setting)
    policies = msgspec.structs.replace(policies, drift=NoDrift())
    world = JobsWorld(spec, policies, WaitLimits(queue_ns=HORIZON_NS, start_ns=HORIZON_NS))
    runs = [JobRun(name, kind, setting, paces[name]) for name, kind in kinds.items()]
    for run in runs:
        seen = None if alone is None else alone[run.name]

        def make(member: PoolMember, run: JobRun = run) -> SimulatedRun:
            return run.make(world, member)

        world.submit(run.request(seen), PoolMember(world, run.name, run.switch, make))
    groups = world.cluster.groups.values()
    usd = sum(g.price(world.cluster.kind) for g in groups) / 1e9
    with rare_collections():
        world.run(HORIZON_NS)
    return GroupSeen({run.name: run.seen(world) for run in runs}, usd)


@cache
def pace(name: str, kind: JobType, setting: Setting) -> Pace:
    """So that an iteration alone takes `solo_s`, and a rollout `over_training` times as long as training.

    Each job is calibrated on the responses that it draws itself, which differ by up to a half between seeds.
    """
    unswitched = replace(setting, switched=False)
    guess = Pace(5000.0, 1.0)
    for _ in range(4):
        seen = lived({name: kind}, unswitched, CLUSTER_POLICIES["solo"], {name: guess}).jobs[name]
        solo_s, ratio = kind.solo_s / seen.iteration_s, seen.train_s * kind.over_training / seen.rollout_s
        guess = Pace(guess.train_tokens_per_s * ratio / solo_s, guess.slower * solo_s)
    return guess


def pipelined(name: str, kind: JobType, setting: Setting, pace: Pace) -> float:
    """An iteration, in seconds, of a run of ours on devices of its own, which never give way."""
    reserved = {
        "max_workers": kind.nodes * GPUS // kind.gpus_per_worker,
        "gpus_per_worker": kind.gpus_per_worker,
        "usd_per_gpu_hour": USD_PER_GPU_HOUR["H20"],
    }
    more = {"providers": {"reserved": reserved}, "provisioning": {"hold": "run"}}
    config = config_of(name, kind, setting, pace, kind.nodes, **more)
    plan = resolve(config, ["reserved"], name)
    scheduler = Scheduler(run_plan(plan), limits(config), scheduling.policies(config), 0)
    experiment = simulation.Experiment(profile=f"H800/{kind.model}", frame_s=10.0)
    devices = {"reserved": device_of(kind, setting, pace, config)}
    run = simulation.build(plan, experiment, scheduler, NullJournal(), devices=devices)
    begun_ns: list[int] = []

    def sample() -> None:
        while len(begun_ns) < (scheduler.step.number if scheduler.step is not None else 0):
            begun_ns.append(run.loop.now_ns)

    failed = run.live(sample=sample, sample_ns=NS_PER_S)
    assert not failed, failed
    return (run.loop.now_ns - begun_ns[0]) / (setting.steps - 1) / NS_PER_S


def seen_alone(kinds: Mapping[str, JobType], setting: Setting, paces: Mapping[str, Pace]) -> dict[str, JobSeen]:
    policies = CLUSTER_POLICIES["solo"]
    return {name: lived({name: kind}, setting, policies, paces).jobs[name] for name, kind in kinds.items()}


def mean_iteration_s(jobs: Mapping[str, JobSeen]) -> float:
    return mean(job.iteration_s for job in jobs.values())


def usd_alone(kinds: Mapping[str, JobType], devices: Sequence[str]) -> float:
    """An hour of so many nodes of each of these kinds, for every job."""
    nodes = sum(kind.nodes for kind in kinds.values())
    return nodes * GPUS * sum(USD_PER_GPU_HOUR[device] for device in devices)


def group(letters: str, setting: Setting) -> Figures:
    kinds = {f"{letter.lower()}-{number}": TYPES[letter] for number, letter in enumerate(letters, 1)}
    paces = {name: pace(name, kind, setting) for name, kind in kinds.items()}
    unswitched = replace(setting, switched=False)
    alone = seen_alone(kinds, unswitched, paces)
    ideal = seen_alone(kinds, replace(unswitched, rollout="H800", synchronised=False), paces)
    colocated = seen_alone(kinds, replace(setting, rollout="H800", synchronised=False), paces)
    streams = {name: pipelined(name, kind, setting, paces[name]) for name, kind in kinds.items()}

    def speed(iterations_s: Mapping[str, float]) -> float:
        return sum(alone[name].iteration_s / iteration_s for name, iteration_s in iterations_s.items())

    def seconds(jobs: Mapping[str, JobSeen]) -> dict[str, float]:
        return {name: job.iteration_s for name, job in jobs.items()}

    def over_solo(iterations_s: Mapping[str, float], usd_per_hour: float) -> float:
        return (speed(iterations_s) / usd_per_hour) / (len(kinds) / usd_alone(kinds, ("H20", "H800")))

    shared = {
        name: lived(kinds, setting, CLUSTER_POLICIES[policy], paces, alone)
        for name, policy in (("ours", "ours_without_moves"), ("weave", "weave"))
    }
    per_usd = {
        "solo": 1.0,
        "solo_pipelined": over_solo(streams, usd_alone(kinds, ("H20", "H800"))),
        "colocated": over_solo(seconds(colocated), usd_alone(kinds, ("H800",))),
        "gavel": gavel(kinds, alone, colocated),
    }
    per_usd |= {name: over_solo(seconds(seen.jobs), seen.usd_per_hour) for name, seen in shared.items()}
    ours = shared["ours"]
    return {
        "throughput_per_usd": per_usd,
        "over_solo_pipelined": per_usd["ours"] / per_usd["solo_pipelined"],
        "iteration_s": {
            "solo": mean_iteration_s(alone),
            "ideal": mean_iteration_s(ideal),
            "shared": mean_iteration_s(ours.jobs),
        },
        "slowdown": {name: job.iteration_s / alone[name].iteration_s for name, job in ours.jobs.items()},
        "usd_per_hour": {name: seen.usd_per_hour for name, seen in shared.items()}
        | {"solo": usd_alone(kinds, ("H20", "H800")), "colocated": usd_alone(kinds, ("H800",))},
        "rollout_over_train": {name: job.rollout_s / job.train_s for name, job in alone.items()},
    }


def gavel(kinds: Mapping[str, JobType], alone: Mapping[str, JobSeen], colocated: Mapping[str, JobSeen]) -> float:
    """Iterations a dollar over `solo` where every job has whole nodes for whole steps, and is where that is cheapest.

    Taking turns by whole steps halves the price and the speed alike, so that only the kind of node matters.
    """
    usd = {"apart": USD_PER_GPU_HOUR["H20"] + USD_PER_GPU_HOUR["H800"], "together": USD_PER_GPU_HOUR["H800"]}
    gained, weight = 0.0, 0.0
    for name, kind in kinds.items():
        faster = alone[name].iteration_s / colocated[name].iteration_s
        bears = faster >= 1 / SLO
        best = max(1.0, faster * usd["apart"] / usd["together"] if bears else 0.0)
        gained, weight = gained + kind.nodes * best, weight + kind.nodes
    return gained / weight


def naive(setting: Setting) -> list[float]:
    kinds = {"d-1": TYPES["D"], "d-2": TYPES["D"]}
    paces = {name: pace(name, kind, setting) for name, kind in kinds.items()}
    alone = seen_alone(kinds, replace(setting, switched=False), paces)
    seen = lived(kinds, setting, CLUSTER_POLICIES["naive"], paces, alone, pool=(1, 1))
    return [job.iteration_s / alone[name].iteration_s for name, job in seen.jobs.items()]


def tail(letters: str, setting: Setting) -> float:
    """How many times as fast iterations come with tails that move together."""
    kinds = {f"{letter.lower()}-{number}": TYPES[letter] for number, letter in enumerate(letters, 1)}
    paces = {name: pace(name, kind, setting) for name, kind in kinds.items()}
    single = replace(setting, node_gpus=1)
    alone = seen_alone(kinds, replace(single, switched=False), paces)
    policies = CLUSTER_POLICIES["naive"]
    pool = (1, 1)
    with_tails, without = (
        lived(kinds, single, msgspec.structs.replace(policies, tail=tails), paces, alone, pool)
        for tails in (CLUSTER_POLICIES["ours"].tail, NoTails())
    )
    return mean_iteration_s(without.jobs) / mean_iteration_s(with_tails.jobs)


def averaged(found: Sequence[Any]) -> Any:
    """Leaf by leaf, over seeds."""
    first = found[0]
    if isinstance(first, Mapping):
        return {key: averaged([each[key] for each in found]) for key in first}
    if isinstance(first, list):
        return [averaged([each[number] for each in found]) for number in range(len(first))]
    return mean(found)


def temporal(setting: Setting) -> Figures:
    return {"temporal": group(GROUPS["temporal"], setting), "tail": {"AA": tail("AA", setting)}}


def train(setting: Setting) -> Figures:
    return {
        "train": group(GROUPS["train"], setting),
        "naive_slowdown": naive(setting),
        "tail": {"DD": tail("DD", setting)},
    }


def spatial(setting: Setting) -> Figures:
    return {"spatial": group(GROUPS["spatial"], setting)}


def long_tails(setting: Setting) -> Figures:
    return {"tail": {"EE": tail("EE", setting)}}


PARTS = (train, spatial, temporal, long_tails)
"""Each with the figures that need the same jobs alone."""


def main(arguments: Arguments) -> Figures:
    settings = [Setting(steps=3 if arguments.quick else 9, seed=seed) for seed in range(1, 2 if arguments.quick else 4)]
    figures: Figures = {"measured": "simulated, token by token", "seeds": len(settings), "tail": {}}
    with ProcessPoolExecutor(2) as processes:
        found = [[processes.submit(part, setting) for setting in settings] for part in PARTS]
        for seeds in found:
            means = averaged([seed.result() for seed in seeds])
            figures["tail"] |= means.pop("tail", {})
            figures |= means
    figures["wanted_over_solo"] = {
        name: math.floor(97 * theirs) / 100 for name, theirs in THEIRS["tables_1_and_4_over_solo"].items()
    }
    figures["theirs"] = THEIRS
    return figures


if __name__ == "__main__":
    benchmark(__doc__, main)
