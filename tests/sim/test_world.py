"""Worlds full of faults: the core keeps its invariants, and every run reaches its end."""

import functools
import itertools
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import msgspec
import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core import fleet
from elastic.core.fleet import Fleet
from elastic.core.group_manager import GroupManager
from elastic.core.ids import lease_of
from elastic.core.lease_manager import LeaseManager
from elastic.core.ledger import Ledger
from elastic.core.reward_manager import RewardManager
from elastic.core.run_state import Phase, RunState
from elastic.core.step_controller import StepController
from elastic.core.steps import Group, Step
from elastic.core.trainer_device import TrainerDevice
from elastic.core.turn_manager import TurnManager
from elastic.core.types import NS_PER_S, EndCause, FinishReason, InfrastructureCause, Plan, StalenessDrop, WorkerState
from elastic.core.worker_manager import WorkerManager
from elastic.runtime.run import Run
from elastic.testing.faults.core.faults import NO_FAULTS, FaultPlan, FaultRates, RunEnding
from elastic.testing.faults.core.incarnation import TrainerOrders
from elastic.testing.faults.core.provider import SimulatedProvider
from elastic.testing.faults.core.record import RunRecord
from elastic.testing.faults.core.rollouts import SimulatedRollouts
from elastic.testing.faults.core.settings import (
    SimulatedProviderSettings,
    WorldSettings,
    draw_large_settings,
    draw_settings,
)
from elastic.testing.faults.core.trainer import SimulatedTrainer
from elastic.testing.faults.core.worker import SimulatedWorker
from elastic.testing.faults.core.world import SimulatedOutcome, simulate
from elastic.testing.faults.kinds import KINDS_OF_THE_CORE, Fault, FaultKind
from elastic.testing.faults.outcome import WorldFailed
from tests.seeds import seeds

CI_SEEDS = 5
REPLAYED = 12
"""A seed whose whole journal is replayed, and leads to the same state after each event."""
STORMS = (FaultKind.KILL_WORKER, FaultKind.CUT, FaultKind.LIE, FaultKind.SILENT_PROVIDER)
"""Faults that come alone with every change; small worlds have all of them."""
NIGHTLY_SEEDS = 25_000
NIGHTLY_BATCH = 250


PutWrongly = Callable[[Any, str, object], None]


@pytest.fixture
def put_wrongly(monkeypatch: pytest.MonkeyPatch) -> PutWrongly:
    """Puts something wrong in the place of what a type or module has under a name, until the test ends."""

    def put(owner: Any, name: str, broken: object) -> None:
        monkeypatch.setattr(owner, name, broken)

    return put


def live_through(seeds: range, settings: WorldSettings | None = None, faults: FaultPlan | None = None) -> None:
    for seed in seeds:
        simulate(seed, settings, faults)


@pytest.mark.parametrize("seeds", [range(CI_SEEDS), range(REPLAYED, REPLAYED + 1)])
def test_small_worlds(seeds: range) -> None:
    """Many cheap worlds of the core: each seed has other faults."""
    live_through(seeds)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(CI_SEEDS, NIGHTLY_SEEDS, NIGHTLY_BATCH))
def test_ten_million_events(first: int) -> None:
    live_through(range(first, first + NIGHTLY_BATCH))


def test_same_seed_gives_the_same_history() -> None:
    """Three worlds, of which two must be alike to the last event."""
    one, two = simulate(1), simulate(1)
    assert (one.history, one.state) == (two.history, two.state)
    assert one.history != simulate(101).history


@pytest.mark.nightly
def test_worlds_are_small_but_for_one_in_a_hundred() -> None:
    def workers(settings: WorldSettings) -> int:
        return 1 + sum((p.leases + p.overlap) * p.workers_per_lease for p in settings.providers)

    def turns(settings: WorldSettings) -> int:
        return settings.plan.steps * settings.plan.groups * settings.plan.group_size * settings.max_turns

    small = [draw_settings(Random(seed)) for seed in range(200)]
    large = [draw_large_settings(Random(seed)) for seed in range(20)]
    assert max(map(workers, small)) == 8
    assert max(map(turns, small)) <= 64
    assert min(map(workers, large)) > 20
    assert max(map(turns, large)) > 300


SETTINGS = WorldSettings(
    plan=Plan(steps=2, groups=2, group_size=3),
    providers=(
        SimulatedProviderSettings(name="spot", leases=2, workers_per_lease=2),
        SimulatedProviderSettings(name="serving", leases=1, boot_ns=NS_PER_S // 10),
    ),
    seeding_ns=NS_PER_S,
    max_new_tokens=40,
    tokens_per_iteration=1,
)


def storm(kind: FaultKind) -> FaultPlan:
    """One kind of fault, again and again, at every worker in turn, some short and some long."""
    faults = (
        Fault(kind=kind, at_s=n, duration_s=1 + n % 2 * 4, target=n * 0.37 % 1, chance=n * 0.37 % 1)
        for n in range(1, 31, 3)
    )
    return FaultPlan(end_ns=30 * NS_PER_S, faults=tuple(faults))


@functools.cache
def calm(seed: int, rewards_on_functions: bool, faults: FaultPlan) -> SimulatedOutcome:
    """What several tests compare a world full of faults with."""
    return simulate(seed, msgspec.structs.replace(SETTINGS, rewards_on_functions=rewards_on_functions), faults)


def told(outcome: SimulatedOutcome, kind: type[e.Event], **fields: object) -> int:
    """How often the core has heard such an event."""
    events = (event for _, event in outcome.journals[-1].events if isinstance(event, kind))
    return sum(all(getattr(event, name) == value for name, value in fields.items()) for event in events)


def stalls(outcome: SimulatedOutcome) -> int:
    frames = [event for _, event in outcome.journals[-1].events if isinstance(event, e.TokensReceived)]
    return sum(chunk.finish is FinishReason.STALLED for frame in frames for chunk in frame.chunks)


def granted(outcome: SimulatedOutcome) -> list[str]:
    return [event.lease for _, event in outcome.journals[-1].events if isinstance(event, e.LeaseGranted)]


def _released_early(outcome: SimulatedOutcome) -> int:
    return len(outcome.record.granted)


def _duration_ns(outcome: SimulatedOutcome) -> int:
    return outcome.ended_ns


def _untold_ns(outcome: SimulatedOutcome) -> int:
    """From the loss of each worker's connection to the word that its lease is over."""
    lost_ns: dict[str, int] = {}
    untold_ns = 0
    for at_ns, event in outcome.journals[-1].events:
        if isinstance(event, e.WorkerDisconnected):
            lost_ns[lease_of(event.worker)] = at_ns
        elif isinstance(event, e.LeaseEnded) and event.lease in lost_ns:
            untold_ns += at_ns - lost_ns.pop(event.lease)
    return untold_ns


TRACES: dict[FaultKind, Callable[[SimulatedOutcome], int]] = {
    FaultKind.KILL_WORKER: lambda o: told(o, e.WorkerDisconnected, goodbye=False),
    FaultKind.TAKE: lambda o: told(o, e.LeaseEnded, cause=EndCause.PREEMPTED),
    FaultKind.PREEMPT: lambda o: told(o, e.LeaseNotice),
    FaultKind.FREEZE: _released_early,
    FaultKind.HANG: _released_early,
    FaultKind.SLOW: _duration_ns,
    FaultKind.CUT: lambda o: told(o, e.WorkerJoined, epoch=2),
    FaultKind.STALL: _released_early,
    FaultKind.DECLINE: stalls,
    FaultKind.BLACKOUT: lambda o: told(o, e.LeaseEnded, cause=EndCause.PREEMPTED),
    FaultKind.SILENT_PROVIDER: _untold_ns,
    FaultKind.FUNCTIONS: lambda o: told(o, e.RewardFailed),
    FaultKind.KILL_TRAINER: lambda o: sum(lease.startswith("trainer") for lease in granted(o)),
    FaultKind.LIE: lambda o: told(o, e.WorkerBarred),
}
"""Of what there is more under a fault than without it."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in STORMS else [pytest.mark.nightly]) for kind in KINDS_OF_THE_CORE],
)
def test_storm_of_one_fault(kind: FaultKind) -> None:
    """A world for each kind of fault, with and without it."""
    settings = msgspec.structs.replace(SETTINGS, rewards_on_functions=kind is FaultKind.FUNCTIONS)
    faults, without = storm(kind), FaultPlan(end_ns=30 * NS_PER_S)
    if kind is FaultKind.SILENT_PROVIDER:
        # A provider with nothing to say keeps silent about nothing.
        without = storm(FaultKind.TAKE)
        both = sorted((*faults.faults, *without.faults), key=lambda fault: fault.at_s)
        faults = msgspec.structs.replace(faults, faults=tuple(both))
    stormy = simulate(0, settings, faults)
    assert stormy.record.finished
    assert 0 < stormy.faults <= len(faults.faults)
    assert TRACES[kind](stormy) > TRACES[kind](calm(0, settings.rewards_on_functions, without))


def test_what_did_nothing_is_no_fault() -> None:
    """No function scores, nobody is there yet, and a silence follows another at once."""
    assert simulate(1, SETTINGS, storm(FaultKind.FUNCTIONS)).faults == 0
    kill = Fault(kind=FaultKind.KILL_WORKER, at_s=0)
    assert simulate(1, SETTINGS, FaultPlan(end_ns=NS_PER_S, faults=(kill,))).faults == 0
    silences = tuple(Fault(kind=FaultKind.SILENT_PROVIDER, at_s=n, target=0.1) for n in range(1, 4))
    assert simulate(1, SETTINGS, FaultPlan(end_ns=5 * NS_PER_S, faults=silences)).faults == 1


@pytest.mark.parametrize("fault", FaultRates.__struct_fields__)
@pytest.mark.nightly
def test_epidemic_of_one_fault(fault: str) -> None:
    faults = FaultPlan(end_ns=60 * NS_PER_S, fault_rates=FaultRates(**{fault: 0.3}))
    settings = msgspec.structs.replace(SETTINGS, rewards_on_functions=fault.startswith("reward"))
    sick, sound = simulate(0, settings, faults), calm(0, settings.rewards_on_functions, FaultPlan(end_ns=faults.end_ns))
    assert sick.record.finished
    assert sick.faults > 0
    assert sick.history != sound.history


def test_quiet_world_moves_turns_only_at_the_end_of_seeding() -> None:
    outcome = simulate(1, SETTINGS, NO_FAULTS)
    assert outcome.failed == ""
    assert outcome.faults == 0
    assert outcome.record.trained


def test_trainers_device_goes_on_alone() -> None:
    """Every elastic provider vanishes in the middle of the first step, for longer than the step takes."""
    blackout = Fault(kind=FaultKind.BLACKOUT, at_s=3, duration_s=10_000)
    outcome = simulate(2, SETTINGS, FaultPlan(end_ns=4 * NS_PER_S, faults=(blackout,)))
    assert outcome.failed == ""
    assert any(isinstance(event, e.WorkerAwoke) for _, event in outcome.journals[0].events)


@pytest.mark.parametrize("ending", [RunEnding.STOP, RunEnding.TRAINER_LOST])
def test_early_ends_give_everything_back(ending: RunEnding) -> None:
    for at_s in (0, 2):
        faults = FaultPlan(end_ns=9 * NS_PER_S, ending=ending, ending_at_ns=at_s * NS_PER_S)
        assert simulate(3, SETTINGS, faults).failed or ending is RunEnding.TRAINER_LOST


@pytest.mark.parametrize(
    ("bound", "way"),
    [
        (2, FaultKind.KILL_TRAINER),
        (0, FaultKind.CUT),
        pytest.param(0, FaultKind.KILL_TRAINER, marks=pytest.mark.nightly),
        pytest.param(2, FaultKind.CUT, marks=pytest.mark.nightly),
    ],
)
def test_the_trainer_goes_at_any_time(bound: int, way: FaultKind) -> None:
    """It catches up with what its checkpoint does not have, or stands where it stood, and the run goes on."""
    plan = Plan(steps=3, groups=2, group_size=3, staleness_bound=bound)
    settings = msgspec.structs.replace(
        SETTINGS, plan=plan, providers=(), checkpoint_every_steps=3, train_ns=2 * NS_PER_S, tokens_per_iteration=3
    )
    again = 0
    for tenths in range(5, 400, 60):
        faults = tuple(Fault(kind=way, at_s=tenths / 10 + n * 7, chance=0.3 + n % 2 / 2) for n in range(3))
        outcome = simulate(tenths, settings, FaultPlan(end_ns=(tenths + 140) * NS_PER_S // 10, faults=faults))
        assert outcome.failed == ""
        again += told(outcome, e.WorkerJoined) > 1
    assert again > 2


@pytest.mark.parametrize("seed", seeds(1, 7))
def test_silence_hides_the_end_of_a_lease_that_nobody_remembers(seed: int) -> None:
    """Its journal is lost, a new incarnation gives its name to a lease of its own, and only then silence ends."""
    at_s = 3 + seed
    kinds = (FaultKind.SILENT_PROVIDER, FaultKind.TAKE, FaultKind.PREEMPT)
    faults = [Fault(kind=kind, at_s=at_s + n / NS_PER_S, duration_s=2, target=0.1) for n, kind in enumerate(kinds)]
    crash = Fault(kind=FaultKind.LOSE_JOURNAL, at_s=at_s + 1 / 4, duration_s=1 / 4, chance=1)
    plan = FaultPlan(end_ns=round(crash.at_s * NS_PER_S), faults=(*faults, crash))
    assert simulate(seed, SETTINGS, plan).failed == ""


def crash_at(at_s: float, kind: FaultKind = FaultKind.KILL_ORCHESTRATOR, down_s: float = 1.0) -> FaultPlan:
    """The orchestrator is gone from then on, for so long; of the trainer's process only `KILL_BOTH` takes leave."""
    crash = Fault(kind=kind, at_s=at_s, duration_s=down_s, chance=1)
    return FaultPlan(end_ns=round(at_s * NS_PER_S), faults=(crash,))


@pytest.mark.parametrize(
    ("bound", "checkpoint_every", "kind"), [(0, 1, FaultKind.KILL_ORCHESTRATOR), (2, 3, FaultKind.KILL_BOTH)]
)
@pytest.mark.nightly
def test_crashed_run_goes_on_from_its_journal(bound: int, checkpoint_every: int, kind: FaultKind) -> None:
    """Whenever the orchestrator dies, the next incarnation begins with what the journal has, and keeps all of it."""
    plan = Plan(steps=4, groups=2, group_size=3, staleness_bound=bound)
    settings = msgspec.structs.replace(SETTINGS, plan=plan, checkpoint_every_steps=checkpoint_every)
    checkpoints, rejoined, took_up = set[int](), 0, 0
    for tenths in range(0, 400, 80):
        outcome = simulate(tenths, settings, crash_at(tenths / 10, kind), digests=True)
        assert outcome.failed == ""
        checkpoints |= {one.checkpoint for one in outcome.incarnations[1:]}
        for before, after in itertools.pairwise(outcome.journals):
            had = before.committed
            assert (after.recalled_events, after.events[:had]) == (had, before.events[:had])
            assert after.digests[:had] == before.digests[:had]
            fresh = after.events[had:]
            assert isinstance(fresh[0][1], e.Resumed)
            known = {event.worker for _, event in after.events[:had] if isinstance(event, e.WorkerJoined)}
            rejoined += any(isinstance(event, e.WorkerJoined) and event.worker in known for _, event in fresh)
            first: dict[tuple[str, int, int], int] = {}
            for frame in (event for _, event in fresh if isinstance(event, e.TokensReceived)):
                for chunk in frame.chunks:
                    first.setdefault((frame.worker, frame.epoch, chunk.slot), chunk.start)
            took_up += any(start > 0 for start in first.values())
    assert len(checkpoints) > 1
    assert rejoined > 1
    assert took_up > 1


def test_what_outlives_a_long_absence() -> None:
    """Nobody is blamed for what the orchestrator could not hear, and leases that ended meanwhile have ended."""
    spot = SimulatedProviderSettings(name="spot", leases=2, life_ns=20 * NS_PER_S)
    settings = msgspec.structs.replace(SETTINGS, providers=(spot, SETTINGS.providers[1]))
    outcome = simulate(3, settings, crash_at(8, down_s=40))
    assert outcome.failed == ""
    journal = outcome.journals[1]
    fresh = journal.events[journal.recalled_events :]
    at_once = [event for at_ns, event in fresh if at_ns == fresh[0][0]]
    ended = {event.lease: event.cause for event in at_once if isinstance(event, e.LeaseEnded)}
    assert EndCause.EXPIRED in ended.values()
    lasting = [worker for worker in ("serving-1",) if worker not in ended]
    later = [event for _, event in fresh if isinstance(event, e.WorkerJoined)]
    assert [event.epoch for event in later if event.worker in lasting] == [2]


@pytest.mark.parametrize("checkpoint_every", [1, 3])
@pytest.mark.nightly
def test_run_without_its_journal_begins_at_the_checkpoint(checkpoint_every: int) -> None:
    """As `elastic run --resume` does: a core that knows nothing, and whatever is still leased is given back."""
    plan = Plan(steps=4, groups=2, group_size=3)
    settings = msgspec.structs.replace(SETTINGS, plan=plan, checkpoint_every_steps=checkpoint_every)
    checkpoints = set[int]()
    for tenths in range(0, 400, 80):
        outcome = simulate(tenths, settings, crash_at(tenths / 10, FaultKind.LOSE_JOURNAL))
        assert outcome.failed == ""
        for one in outcome.incarnations[1:]:
            assert one.journal.recalled_events == 0
            assert one.checkpoint % checkpoint_every == 0 or one.checkpoint == settings.plan.steps
            checkpoints.add(one.checkpoint)
    assert len(checkpoints) > 1


def test_crash_after_crash() -> None:
    kinds = FaultKind.LOSE_JOURNAL, FaultKind.KILL_ORCHESTRATOR, FaultKind.KILL_ORCHESTRATOR
    crashes = tuple(Fault(kind=kinds[n % 3], at_s=2 * n, duration_s=1 / 4, chance=1) for n in range(10))
    faults = FaultPlan(end_ns=20 * NS_PER_S, fault_rates=FaultRates(frame_lost=0.05), faults=crashes)
    outcome = simulate(1, SETTINGS, faults)
    assert outcome.failed == ""
    assert len(outcome.incarnations) > 3
    assert any(journal.committed < len(journal.events) for journal in outcome.journals[:-1])


def _leave_orphans(provider: SimulatedProvider, known: Mapping[str, bool]) -> list[e.Event]:
    return [event for lease, granted in known.items() for event in provider._missed(lease, granted=granted)]


def _act_at_once(run: Run, action: Callable[..., None], *arguments: object) -> None:
    action(*arguments)


def _begin_afresh(driver: Any) -> None:
    """As `StepController._begin`, but the trainer's version is not taken for the number of steps that are done."""
    driver._run.phase = Phase.RUNNING
    driver._run.timers.clear("start", "run")
    driver._run.version = driver._run.fleet.trainer.version
    driver._workers.ensure_weights_everywhere()
    driver._start_step(0)


RESUMED_WRONGLY: list[tuple[type[Any], str, Callable[..., object], str, int]] = [
    (SimulatedProvider, "take_stock", _leave_orphans, "while there is one|still alive|given back", 2),
    (RunState, "take_up", lambda run, *_: None, "the run failed", 7),
    (SimulatedTrainer, "_join", SimulatedWorker._join, "LearnerViolated|has not learnt|came with weights", 282),
    (TrainerOrders, "remember", lambda orders, order: None, "LearnerViolated|has not learnt|came with weights", 282),
    (Run, "_once_durable", _act_at_once, "before it is durable", 2),
    (RunRecord, "recall", lambda record, former: None, "not of this run|was not generated", 17),
    (StepController, "_begin", _begin_afresh, "", 217),
]


@pytest.mark.parametrize(
    ("owner", "name", "broken", "found", "first_tenths"), RESUMED_WRONGLY, ids=[each[1] for each in RESUMED_WRONGLY]
)
def test_worlds_notice_a_run_that_is_resumed_wrongly(
    owner: type[Any],
    name: str,
    broken: Callable[..., object],
    found: str,
    first_tenths: int,
    put_wrongly: PutWrongly,
) -> None:
    """Crashes are worth something only if a wrong resumption shows; the first is one in which it has shown before."""
    put_wrongly(owner, name, broken)
    plan = Plan(steps=3, groups=2, group_size=3)
    spot = SimulatedProviderSettings(name="spot", leases=2, life_ns=6 * NS_PER_S, overlap=1)
    settings = msgspec.structs.replace(SETTINGS, plan=plan, providers=(spot,), checkpoint_every_steps=2)
    kinds = FaultKind.KILL_ORCHESTRATOR, FaultKind.KILL_BOTH

    def live() -> None:
        for tenths in (first_tenths, *range(2, 302, 5)):
            # Only after the loss of a journal there are leases that nobody knows, and a checkpoint to begin at.
            kind = FaultKind.LOSE_JOURNAL if name in ("take_stock", "_begin") else kinds[tenths % 3 == 0]
            simulate(tenths, settings, crash_at(tenths / 10, kind, down_s=1 + tenths % 2 * 44))

    with pytest.raises(WorldFailed, match=found or None):
        live()


def _serve_anything(worker: SimulatedWorker, genuine: bool) -> bool:
    return True


def _take_failed_for_applied(manager: WorkerManager, event: e.WeightsFailed) -> None:
    manager._on_weights_applied(e.WeightsApplied(worker=event.worker, epoch=event.epoch, version=event.version))


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (SimulatedWorker, "_matches_manifest", _serve_anything),
        (WorkerManager, "_on_weights_failed", _take_failed_for_applied),
    ],
)
def test_weights_that_do_not_match_their_manifest_are_never_served(
    owner: type[Any], name: str, broken: Callable[..., object], put_wrongly: PutWrongly
) -> None:
    """Invariant 10, and that its check sees a worker that verifies nothing and a core that believes in it."""
    faults = FaultPlan(end_ns=20 * NS_PER_S, fault_rates=FaultRates(load_corrupted=0.5))
    outcome = simulate(1, SETTINGS, faults)
    assert any(isinstance(x, e.WeightsFailed) and "manifest" in x.reason for _, x in outcome.journals[0].events)
    put_wrongly(owner, name, broken)
    with pytest.raises(WorldFailed, match=r"weights that are not|not checked against the manifest"):
        live_through(range(8), SETTINGS, faults)


def _nothing(*_: object, **__: object) -> None:
    return None


REPLACING = msgspec.structs.replace(
    SETTINGS, plan=Plan(steps=1, groups=2, group_size=3, refill_most=1), rewards_on_functions=True
)
UNSCORED = FaultPlan(
    end_ns=30 * NS_PER_S,
    fault_rates=FaultRates(reward_refused=0.9, event_repeated=0.1),
    faults=tuple(Fault(kind=FaultKind.KILL_ORCHESTRATOR, at_s=at_s, duration_s=0.2) for at_s in (4.0, 7.0)),
)


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_what_replaces_members_is_replayed_and_outlives_the_orchestrator(seed: int) -> None:
    """A world whose state is hashed after each event, and replayed."""
    assert simulate(seed, REPLACING, UNSCORED, digests=True).record.replaced


def _refill_always(*_: object) -> bool:
    return True


def _refill_the_same(step: Step, group: Group, replaces: str, cause: InfrastructureCause) -> str:
    """Have a member that was replaced end once more."""
    step.unended += 1
    group.members[replaces] = None
    return replaces


BY_TOKEN = msgspec.structs.replace(
    SETTINGS,
    plan=Plan(steps=5, groups=2, group_size=2, staleness_bound=1, staleness_drop=StalenessDrop.TOKEN),
    think_ns=NS_PER_S,
)


def test_overtaken_tokens_alone_are_dropped_by_token_and_replayed_alike() -> None:
    """A world whose state is hashed after each event, and replayed."""
    assert simulate(0, BY_TOKEN, NO_FAULTS, digests=True).record.masked


def _train_on_all(device: TrainerDevice, step: int, group: Group, slot: int) -> None:
    """Without a word of which tokens are too old."""
    device._send_order(c.TrainGroup(group=group.id, trajectories=tuple(group.finished), step=step, slot=slot))


@pytest.mark.parametrize(
    ("settings", "faults", "owner", "name", "broken", "found"),
    [
        (REPLACING, UNSCORED, GroupManager, "_may_refill", _refill_always, "time 2"),
        (REPLACING, UNSCORED, Group, "times_refilled", lambda group, trajectory: 0, "time 2"),
        (REPLACING, UNSCORED, Step, "refill", _refill_the_same, "is started twice"),
        pytest.param(REPLACING, UNSCORED, SimulatedRollouts, "refill", _nothing, "for ever", marks=pytest.mark.nightly),
        (BY_TOKEN, NO_FAULTS, TrainerDevice, "train", _train_on_all, "is trained 2 versions late"),
        pytest.param(
            *(BY_TOKEN, NO_FAULTS, Group, "overtaken", lambda group, oldest_version: False, "nothing is left of"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_worlds_notice_members_replaced_wrongly_and_tokens_trained_too_late(
    settings: WorldSettings,
    faults: FaultPlan,
    owner: type[Any],
    name: str,
    broken: Callable[..., object],
    found: str,
    put_wrongly: PutWrongly,
) -> None:
    put_wrongly(owner, name, broken)
    with pytest.raises(WorldFailed, match=found):
        live_through(range(12), settings, faults)


def _send_beyond_credit(worker: Any) -> bool:
    return worker.state is WorkerState.READY and worker.version is not None and worker.capacity > 0


@pytest.mark.parametrize(
    ("owner", "name", "broken", "found"),
    [
        (SimulatedWorker, "_yield", lambda worker: None, "rollouts stay"),
        (fleet, "_accepts", _send_beyond_credit, "can hold"),
    ],
)
def test_serving_comes_first(
    owner: Any, name: str, broken: Callable[..., object], found: str, put_wrongly: PutWrongly
) -> None:
    """Invariant 8, and that its checks see a host that keeps rollouts and a core that sends more than it may."""
    serving = SimulatedProviderSettings(name="serving", leases=2, serving_gap_ns=2 * NS_PER_S)
    plan = Plan(steps=2, groups=2, group_size=3)
    settings = msgspec.structs.replace(SETTINGS, plan=plan, providers=(serving,))
    assert stalls(simulate(1, settings, NO_FAULTS)) > 0
    put_wrongly(owner, name, broken)
    with pytest.raises(WorldFailed, match=found or None):
        live_through(range(8), settings, NO_FAULTS)


def test_failure_names_its_seed(put_wrongly: PutWrongly) -> None:
    put_wrongly(TurnManager, "_on_tokens", _raise)
    with pytest.raises(WorldFailed, match="seed 5: ") as caught:
        simulate(5)
    assert caught.value.seed == 5


def _raise(*_: object) -> None:
    raise RuntimeError("broken")


def _believe_everybody(run: RunState, worker: str, epoch: int) -> object:
    run.timers.set("heartbeat", worker, run.now_ns, run.limits.heartbeat_timeout_ns)
    return run.fleet.workers.get(worker)


BREAKAGES: list[tuple[type[Any], str, object]] = [
    (RunState, "heard_from", _believe_everybody),
    (TurnManager, "_fits", lambda manager, turn, chunk: True),
    (TurnManager, "take_away", _nothing),
    (TurnManager, "_expect_handover", _nothing),
    (TurnManager, "_token_due", _nothing),
    (TurnManager, "_prefer_others", _nothing),
    (Fleet, "rested", _nothing),
    (WorkerManager, "_ensure_weights", _nothing),
    (WorkerManager, "give_up", _nothing),
    (WorkerManager, "drain", _nothing),
    (LeaseManager, "_ask_back", _nothing),
    (LeaseManager, "_expiry_due", _nothing),
    (LeaseManager, "release_vacated", _nothing),
    (RewardManager, "_score_due", _nothing),
    (RewardManager, "_score_again_due", _nothing),
    (RewardManager, "take_outcomes", lambda manager: []),
    (Ledger, "close", _nothing),
    (Fleet, "reindex", _nothing),
    (TrainerDevice, "rest", _nothing),
    (TrainerDevice, "done", _nothing),
    (TrainerDevice, "follow", _nothing),
    (TrainerDevice, "_put_to_sleep", TrainerDevice.wake),
    (StepController, "_needs_reseeding", lambda driver: False),
    (Group, "finished", property(lambda group: {t: float(n) for n, t in enumerate(group.members)})),
]
NEVER_END = ("rest", "take_outcomes")
"""Broken so, a world shows it only by going on for hours of its time."""
FIRST_SEEDS = {
    "heard_from": 4,
    "_token_due": 22,
    "_score_due": 15,
    "take_away": 4,
    "_score_again_due": 4,
    "finished": 3,
}
"""In which it has shown before, where earlier worlds do not show it."""


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        pytest.param(*each, id=each[1], marks=[pytest.mark.nightly] if each[1] in NEVER_END else [])
        for each in BREAKAGES
    ],
)
def test_worlds_notice_a_broken_core(owner: type[Any], name: str, broken: object, put_wrongly: PutWrongly) -> None:
    """The worlds are worth something only if they catch a core that is wrong."""
    put_wrongly(owner, name, broken)
    with pytest.raises(WorldFailed):
        live_through(range(FIRST_SEEDS.get(name, 0), 60))
