"""Jobs on a modelled pool, token by token: the real cluster and the real runs, whatever the policy."""

import pytest

from elastic.compose.plan import resolve
from elastic.compose.scheduling import limits, policies, run_plan
from elastic.config import Config
from elastic.core.cluster import Cluster, JobRequest, NodeKind, PhasePlan, PoolSpec
from elastic.core.cluster import events as e
from elastic.core.cluster.invariants import check
from elastic.core.cluster.types import JobState, PhaseKind
from elastic.core.invariants import check as check_run
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S
from elastic.runtime.journal import NullJournal
from elastic.simulation import run as simulation
from elastic.simulation.jobs.world import JobsWorld
from elastic.simulation.performance.pool import PoolMember, SwitchTimes
from elastic.simulation.performance.profile import Device, load_profile
from elastic.simulation.performance.run import POOL, SharedPool, SimulatedRun
from policies.clusters import CLUSTER_POLICIES
from providers.base import ProviderSettings

S = NS_PER_S
STEPS = 3
SWITCH = SwitchTimes(rollout_resume_ns=S, train_resume_ns=S, train_park_ns=2 * S)


def config(name: str, seed: int) -> Config:
    body = {
        "run": {"name": name, "seed": seed, "steps": STEPS, "directory": "."},
        "model": {"checkpoint": "Qwen3-8B"},
        "environment": {"name": "frozenlake"},
        "simulation": {"numbers": {"trainer_boot_s": 1.0}},
        "rollout": {"groups": 4, "group_size": 4, "max_turns": 2, "max_tokens_per_turn": 512},
        "trainer": {"gpus": 8},
        "provisioning": {"hold": "rollouts"},
        "seeding": {"policy": "fixed", "window_s": 0.0},
        "engine": {"max_batch": 4, "max_pending": 0, "max_context_tokens": 4096},
    }
    return Config.model_validate(body)


class CheckedWorld(JobsWorld):
    """Checks the cluster and every run after each event."""

    def __init__(self, spec: PoolSpec, policy: str) -> None:
        super().__init__(spec, CLUSTER_POLICIES[policy], handled=self._check)
        self.runs: dict[str, SimulatedRun] = {}
        self.moved = 0
        """Tails that have left nodes."""

    def _check(self, cluster: Cluster, event: e.ClusterEvent) -> None:
        self.moved += isinstance(event, e.TailMoved)
        check(cluster, slos=False)
        for run in self.runs.values():
            check_run(run.scheduler)


def lived(policy: str, seeds: tuple[int, ...], nodes: int, plan: PhasePlan) -> CheckedWorld:
    kinds = [NodeKind(gpus=2, memory_bytes=10, nano_usd_per_hour=price) for price in (1, 3)]
    spec = PoolSpec.uniform(rollout=kinds[0], train=kinds[1], rollout_nodes=nodes, train_nodes=nodes)
    world = CheckedWorld(spec, policy)
    for number, seed in enumerate(seeds):
        settled = config(f"job-{number}", seed)

        def make(member: PoolMember, settled: Config = settled) -> SimulatedRun:
            name, resolved = settled.run.name, resolve(settled, [], "here")
            profile = load_profile("H20/Qwen3-8B")
            device = Device(profile=profile, rates=simulation.rates_of(settled.engine, profile, "engine"))
            scheduler = Scheduler(run_plan(resolved), limits(settled), policies(settled), world.loop.now_ns)
            shared = SharedPool(
                loop=world.loop,
                member=member,
                settings=ProviderSettings.model_validate({"max_workers": 4}),
                per_node=2,
                within_s=3600.0,
                ended=lambda: world.tell(e.JobFinished(job=name)),
            )
            experiment = simulation.Experiment(profile="H800/Qwen3-8B", frame_s=1.0)
            world.runs[name] = simulation.build(resolved, experiment, scheduler, NullJournal(), shared, {POOL: device})
            return world.runs[name]

        request = JobRequest(id=settled.run.name, slo=3.0, steps=STEPS, plan=plan, rollout_nodes=2)
        world.submit(request, PoolMember(world, request.id, SWITCH, make))
    return world.run(10**14)


def tokens(run: SimulatedRun) -> int:
    return sum(count.tokens for count in run.recorder.counts.values())


GENEROUS = PhasePlan(rollout_ns=60 * S, train_ns=30 * S)


@pytest.mark.parametrize(("policy", "seed"), [("weave", 1), ("ours_without_moves", 2), ("naive", 3)])
def test_jobs_that_share_do_what_they_do_alone(policy: str, seed: int) -> None:
    alone = [lived("solo", (one,), 2, GENEROUS) for one in (seed, seed + 1)]
    shared = lived(policy, (seed, seed + 1), 2, GENEROUS)
    for number, world in enumerate(alone):
        assert tokens(shared.runs[f"job-{number}"]) == tokens(world.runs["job-0"]), seed
    for name, record in shared.cluster.jobs.items():
        assert record.state is JobState.FINISHED, seed
        assert not shared.runs[name].failed, seed
    assert not shared.cluster.permits


@pytest.mark.parametrize("policy", ["weave", "naive"])
def test_who_is_told_to_give_way_goes_on_in_its_next_turn_with_every_token(policy: str) -> None:
    """Phases are planned far too short, so that every slice is recalled."""
    short = PhasePlan(rollout_ns=2 * S, train_ns=2 * S)
    alone, shared = lived("solo", (5,), 2, GENEROUS), lived(policy, (5, 6), 2, short)
    assert tokens(shared.runs["job-0"]) == tokens(alone.runs["job-0"])
    unfinished = [seen for seen in shared.phases if not seen.finished and seen.phase is PhaseKind.ROLLOUT]
    assert unfinished
    assert all(record.state is JobState.FINISHED for record in shared.cluster.jobs.values())


def test_a_tail_moves_with_every_token() -> None:
    """Rollouts are heavy, so that the next job gains by the nodes that a tail leaves."""
    heavy = PhasePlan(rollout_ns=60 * S, train_ns=S)
    alone, shared = lived("solo", (5,), 2, GENEROUS), lived("weave", (5, 6), 2, heavy)
    assert shared.moved > 0
    assert tokens(shared.runs["job-0"]) == tokens(alone.runs["job-0"])
    assert all(record.state is JobState.FINISHED for record in shared.cluster.jobs.values())
