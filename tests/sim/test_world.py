"""Worlds full of faults: the core keeps its invariants, and every run reaches its end."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from elastic.core import events as e
from elastic.core.fleet import Fleet
from elastic.core.lease_desk import LeaseDesk
from elastic.core.ledger import Ledger
from elastic.core.reward_desk import RewardDesk
from elastic.core.run_state import RunState
from elastic.core.step_driver import StepDriver
from elastic.core.steps import Group
from elastic.core.trainer_device import TrainerDevice
from elastic.core.turn_desk import TurnDesk
from elastic.core.types import NS_PER_S, Plan
from elastic.core.worker_desk import WorkerDesk
from elastic.sim.faults import NO_FAULTS, Ending, Fault, FaultKind, FaultPlan, Mishaps
from elastic.sim.settings import ProviderSettings, WorldSettings
from elastic.sim.world import WorldFailed, replay, simulate

CI_SEEDS = 200
BATCH = 20
ALL_SEEDS = 1000


def live_through(seeds: range) -> None:
    for seed in seeds:
        simulate(seed)


@pytest.mark.parametrize("first", range(0, CI_SEEDS, BATCH))
def test_small_worlds(first: int) -> None:
    live_through(range(first, first + BATCH))


@pytest.mark.slow
def test_many_more_worlds() -> None:
    live_through(range(CI_SEEDS, ALL_SEEDS))


@pytest.mark.parametrize("seed", range(6))
def test_same_seed_gives_the_same_history(seed: int) -> None:
    one, two = simulate(seed), simulate(seed)
    assert (one.history, one.state) == (two.history, two.state)
    assert one.history != simulate(seed + 100).history


@pytest.mark.parametrize("seed", range(8))
def test_replayed_events_lead_to_the_same_state_after_each(seed: int) -> None:
    outcome = simulate(seed, digests=True)
    assert replay(outcome.settings, outcome.log) == list(outcome.digests)


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
    for seed in range(3):
        outcome = simulate(seed, SETTINGS, storm(kind))
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
    assert any(isinstance(event, e.WorkerAwoke) for _, event in outcome.log)


@pytest.mark.parametrize("ending", [Ending.STOP, Ending.TRAINER_LOST])
def test_early_ends_give_everything_back(ending: Ending) -> None:
    for at_s in (0, 1, 2, 4):
        faults = FaultPlan(
            end_ns=9 * NS_PER_S, faults=(), mishaps=Mishaps(), ending=ending, ending_at_ns=at_s * NS_PER_S
        )
        assert simulate(3, SETTINGS, faults).failed or ending is Ending.TRAINER_LOST


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
