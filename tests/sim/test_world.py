"""Worlds full of faults: the core keeps its invariants, and every run reaches its end."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.fleet import Fleet
from elastic.core.lease_desk import LeaseDesk
from elastic.core.ledger import Ledger
from elastic.core.reward_desk import RewardDesk
from elastic.core.run_state import Phase, RunState
from elastic.core.step_driver import StepDriver
from elastic.core.steps import Group
from elastic.core.trainer_device import TrainerDevice
from elastic.core.turn_desk import TurnDesk
from elastic.core.types import NS_PER_S, Plan
from elastic.core.worker_desk import WorkerDesk
from elastic.sim.faults import NO_FAULTS, Crash, Ending, Fault, FaultKind, FaultPlan, Mishaps
from elastic.sim.life import replayed
from elastic.sim.record import Record, RecordViolated
from elastic.sim.settings import ProviderSettings, WorldSettings
from elastic.sim.world import WorldFailed, simulate

CI_SEEDS = 200
BATCH = 20
ALL_SEEDS = 650
NIGHTLY_SEEDS = 25_000
NIGHTLY_BATCH = 250


def live_through(seeds: range) -> None:
    for seed in seeds:
        simulate(seed)


@pytest.mark.parametrize("first", range(0, CI_SEEDS, BATCH))
def test_small_worlds(first: int) -> None:
    live_through(range(first, first + BATCH))


@pytest.mark.slow
def test_many_more_worlds() -> None:
    live_through(range(CI_SEEDS, ALL_SEEDS))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(ALL_SEEDS, NIGHTLY_SEEDS, NIGHTLY_BATCH))
def test_ten_million_events(first: int) -> None:
    live_through(range(first, first + NIGHTLY_BATCH))


@pytest.mark.parametrize("seed", range(6))
def test_same_seed_gives_the_same_history(seed: int) -> None:
    one, two = simulate(seed), simulate(seed)
    assert (one.history, one.state) == (two.history, two.state)
    assert one.history != simulate(seed + 100).history


@pytest.mark.parametrize("seed", range(8))
def test_replayed_events_lead_to_the_same_state_after_each(seed: int) -> None:
    outcome = simulate(seed, digests=True)
    for life in outcome.lives:
        assert replayed(outcome.settings, life.events) == list(life.digests)


SETTINGS = WorldSettings(
    plan=Plan(steps=2, groups=2, group_size=3, providers=("spot", "serving")),
    providers=(
        ProviderSettings(name="spot", leases=2, workers_per_lease=2),
        ProviderSettings(name="serving", leases=1, boot_ns=NS_PER_S // 10),
    ),
    seeding_ns=NS_PER_S,
    max_new_tokens=40,
    tokens_per_iteration=1,
)


def storm(kind: FaultKind) -> FaultPlan:
    """One kind of fault, again and again, at every worker in turn, some short and some long."""
    faults = tuple(Fault(n * NS_PER_S, kind, (1 + n % 2 * 4) * NS_PER_S, n * 0.37 % 1) for n in range(1, 31, 3))
    return FaultPlan(end_ns=30 * NS_PER_S, faults=faults, mishaps=Mishaps())


@pytest.mark.parametrize("kind", FaultKind)
def test_storm_of_one_fault(kind: FaultKind) -> None:
    settings = msgspec.structs.replace(SETTINGS, rewards_on_functions=kind is FaultKind.REWARDS_DOWN)
    for seed in range(3):
        outcome = simulate(seed, settings, storm(kind))
        assert outcome.turns_finished > 0
        assert outcome.redispatched > 0


@pytest.mark.parametrize("mishap", Mishaps.__struct_fields__)
def test_epidemic_of_one_mishap(mishap: str) -> None:
    faults = FaultPlan(end_ns=20 * NS_PER_S, faults=(), mishaps=Mishaps(**{mishap: 0.3}))
    settings = msgspec.structs.replace(SETTINGS, rewards_on_functions=mishap.startswith("reward"))
    for seed in range(3):
        assert simulate(seed, settings, faults).turns_finished > 0


def test_quiet_world_moves_turns_only_at_the_end_of_seeding() -> None:
    outcome = simulate(1, SETTINGS, NO_FAULTS)
    assert outcome.failed == ""
    assert outcome.imbalance_ns == 0
    assert outcome.trajectories_trained > 0


def test_trainers_device_goes_on_alone() -> None:
    """Every elastic provider vanishes in the middle of the first step, for longer than the step takes."""
    blackout = Fault(3 * NS_PER_S, FaultKind.BLACKOUT, 10_000 * NS_PER_S, 0.0)
    outcome = simulate(2, SETTINGS, FaultPlan(end_ns=4 * NS_PER_S, faults=(blackout,), mishaps=Mishaps()))
    assert outcome.failed == ""
    assert any(isinstance(event, e.WorkerAwoke) for _, event in outcome.lives[0].events)


@pytest.mark.parametrize("ending", [Ending.STOP, Ending.TRAINER_LOST])
def test_early_ends_give_everything_back(ending: Ending) -> None:
    for at_s in (0, 1, 2, 4):
        faults = FaultPlan(
            end_ns=9 * NS_PER_S, faults=(), mishaps=Mishaps(), ending=ending, ending_at_ns=at_s * NS_PER_S
        )
        assert simulate(3, SETTINGS, faults).failed or ending is Ending.TRAINER_LOST


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_crashed_run_is_resumed_from_its_checkpoint(bound: int, checkpoint_every: int) -> None:
    """Whenever the orchestrator dies, the run goes on from the newest checkpoint and is the same run in the end."""
    plan = Plan(steps=4, groups=2, group_size=3, staleness_bound=bound, providers=("spot", "serving"))
    settings = msgspec.structs.replace(SETTINGS, plan=plan, checkpoint_every_steps=checkpoint_every)
    resumed_at = set[int]()
    for tenths in range(0, 400, 25):
        crash = Crash(tenths * NS_PER_S // 10, NS_PER_S)
        faults = FaultPlan(end_ns=crash.at_ns, faults=(), mishaps=Mishaps(), crashes=(crash,))
        outcome = simulate(tenths, settings, faults)
        assert outcome.failed == ""
        for life in outcome.lives[1:]:
            assert life.first_version % checkpoint_every == 0 or life.first_version == plan.steps
            resumed_at.add(life.first_version)
    assert len(resumed_at) > 1


def test_crash_after_crash() -> None:
    crashes = tuple(Crash(n * NS_PER_S, NS_PER_S // 4) for n in range(0, 20, 2))
    faults = FaultPlan(end_ns=20 * NS_PER_S, faults=(), mishaps=Mishaps(frame_lost=0.05), crashes=crashes)
    outcome = simulate(1, SETTINGS, faults)
    assert outcome.failed == ""
    assert len(outcome.lives) > 3
    assert any(life.committed < len(life.events) for life in outcome.lives[:-1])


def test_what_the_checkpoint_has_learnt_is_not_trained_again() -> None:
    record = Record(staleness_bound=0, version=2, trained={"1/0/0": 1})
    again = c.TrainGroup(group="1/0", trajectories=("1/0/0",), step=2, slot=0)
    with pytest.raises(RecordViolated, match="1/0/0 is trained twice"):
        record.note_command(again, e.Tick(), 0)


def test_failure_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurnDesk, "_on_tokens", _raise)
    with pytest.raises(WorldFailed, match="seed 5: ") as caught:
        simulate(5)
    assert caught.value.seed == 5


def _raise(*_: object) -> None:
    raise RuntimeError("broken")


def _believe_everybody(run: RunState, worker: str, epoch: int) -> object:
    run.timers.set("heartbeat", worker, run.now_ns, run.limits.heartbeat_timeout_ns)
    return run.fleet.workers.get(worker)


def _begin_afresh(driver: Any) -> None:
    """As `StepDriver._begin`, but the trainer's version is not taken for the number of steps that are done."""
    driver._run.phase = Phase.RUNNING
    driver._run.timers.clear("start", "run")
    driver._run.version = driver._run.fleet.trainer.version
    driver._workers.ensure_weights_everywhere()
    driver._start_step(0)


def _nothing(*_: object, **__: object) -> None:
    return None


BREAKAGES: list[tuple[type[Any], str, Callable[..., object]]] = [
    (RunState, "hear", _believe_everybody),
    (TurnDesk, "_fits", lambda desk, turn, chunk: True),
    (TurnDesk, "take_away", _nothing),
    (TurnDesk, "_expect_handover", _nothing),
    (TurnDesk, "_token_due", _nothing),
    (WorkerDesk, "_ensure_weights", _nothing),
    (WorkerDesk, "give_up", _nothing),
    (WorkerDesk, "drain", _nothing),
    (LeaseDesk, "_ask_back", _nothing),
    (LeaseDesk, "_expiry_due", _nothing),
    (LeaseDesk, "release_vacated", _nothing),
    (RewardDesk, "_score_due", _nothing),
    (RewardDesk, "_score_again_due", _nothing),
    (RewardDesk, "take_outcomes", lambda desk: []),
    (Ledger, "close", _nothing),
    (Fleet, "reindex", _nothing),
    (TrainerDevice, "rest", _nothing),
    (TrainerDevice, "done", _nothing),
    (StepDriver, "_begin", _begin_afresh),
    (StepDriver, "_needs_reseeding", lambda driver, helped: False),
    (Group, "finished", property(lambda group: {t: float(n) for n, t in enumerate(group.members)})),
]


@pytest.mark.parametrize(("owner", "name", "broken"), BREAKAGES, ids=lambda value: getattr(value, "__name__", value))
def test_worlds_notice_a_broken_core(
    owner: type[Any], name: str, broken: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worlds are worth something only if they catch a core that is wrong."""
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(WorldFailed):
        live_through(range(60))
