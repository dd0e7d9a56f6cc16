"""The performance world's own record of what the core did without need, and hosts that decline whatever they get."""

from collections.abc import Callable
from pathlib import Path

from elastic.compose.plan import resolve
from elastic.compose.scheduling import limits, policies, run_plan
from elastic.config import load_config
from elastic.core import commands as c
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, TurnState, WorkerState
from elastic.runtime.journal import NullJournal
from elastic.simulation import run as simulation
from elastic.simulation.performance import SimulatedRun
from elastic.simulation.performance.truth import Acts
from elastic.simulation.performance.worker import WorkerModel

EXAMPLE = Path(__file__).parents[2] / "examples" / "frozenlake.toml"
WHILE_TURNS_RUN_NS = 8 * NS_PER_S


def simulated() -> SimulatedRun:
    overrides = ["run.steps=2", "rollout.groups=8", "providers.reserved.max_workers=2"]
    config = load_config(EXAMPLE, overrides)
    plan = resolve(config, ["reserved"], str(EXAMPLE))
    scheduler = Scheduler(run_plan(plan), limits(config), policies(config), 0)
    return simulation.build(plan, simulation.Experiment(), scheduler, NullJournal())


def while_turns_run(do: Callable[[SimulatedRun, WorkerModel], None]) -> SimulatedRun:
    """A run in the middle of which something is done with the rollout worker that holds most turns."""
    run = simulated()

    def act() -> None:
        ready = [w for w in run.scheduler.fleet.workers.values() if w.state is WorkerState.READY]
        busiest = max((w for w in ready if w.provider == "reserved"), key=lambda worker: worker.outstanding)
        assert run.worker(busiest.id).held_turns
        do(run, run.worker(busiest.id))

    run.loop.at(WHILE_TURNS_RUN_NS, act)
    assert run.live() == ""
    return run


def test_a_fence_of_a_live_worker_is_needless_and_takes_its_turns() -> None:
    acts, held = Acts(), 0

    def fence(run: SimulatedRun, worker: WorkerModel) -> None:
        nonlocal held
        held = worker.held_turns
        acts.note_fence(worker.id, {worker.id: worker}, run.scheduler)
        acts.note_fence("gone", {worker.id: worker}, run.scheduler)

    while_turns_run(fence)
    assert (acts.needless_fences, acts.needless_moves) == (1, held)


def test_a_turn_that_its_engine_holds_is_moved_without_need_unless_there_are_fewer_elsewhere() -> None:
    acts = Acts()

    def move(run: SimulatedRun, worker: WorkerModel) -> None:
        live = run.scheduler.turns.live.values()
        turn = next(t for t in live if t.state is TurnState.RUNNING and worker.holds(t.id, t.attempt))
        order = c.AbortTurn(worker=worker.id, epoch=1, turn=turn.id, attempt=turn.attempt)
        acts.note(order, {worker.id: worker}, run.scheduler)
        assert acts.needless_moves == 1
        turn.destination = "idle"
        idle = WorkerModel(run, "idle", worker.lease, worker.role, run.launchers["reserved"].device)
        acts.note(order, {worker.id: worker, "idle": idle}, run.scheduler)
        turn.destination = None

    while_turns_run(move)
    assert acts.needless_moves == 1


def test_a_worker_that_declines_gives_back_all_it_has_and_gets() -> None:
    def decline(run: SimulatedRun, worker: WorkerModel) -> None:
        worker.decline(NS_PER_S)
        assert not worker.held_turns
        run.loop.after(NS_PER_S - 1, lambda: held.append(worker.held_turns))

    held: list[int] = []
    run = while_turns_run(decline)
    assert held == [0]
    assert run.acts.resent_turns
    assert not run.acts.needless_fences
