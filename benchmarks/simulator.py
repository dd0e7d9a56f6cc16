"""How fast virtual time goes: core events a second in a simulated run, beside the bare event loop in the same process.

Small: the main job's configuration, with its journal and without, in turn with the bare loop; medians of the rounds,
and the range of what a round's loop did for each of its events. Growth: the same job, without a journal, on more and
more workers, up to 2,000 reserved workers with 50,000 trajectories in one step. `speedup` is virtual seconds in a
second of the small run. Seconds are of CPU time, the journal's thread included.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from benchmarks import ROOT
from benchmarks._common import Arguments, Figures, benchmark
from elastic.compose.plan import resolve
from elastic.compose.scheduling import limits, policies, run_plan
from elastic.config import load_config
from elastic.core.scheduler import Scheduler
from elastic.runtime.journal import NullJournal, RunDirectory
from elastic.simulation import run as simulation
from elastic.simulation.loop import EventLoop

EXAMPLE = ROOT / "examples" / "frozenlake.toml"
LOOP_EVENTS = 1_000_000
HEAP = 10_000
"""Actions that wait in the bare loop at any time, as many as a run of some thousand turns has."""
SIZES = ((20, 500), (200, 5_000), (2_000, 50_000))
"""Workers and trajectories."""
GROUP_SIZE = 10


def bare_loop(events: int) -> float:
    """Actions a second of the loop alone, each of which schedules the next."""
    loop = EventLoop()
    left = [events]

    def act() -> None:
        left[0] -= 1
        if left[0] <= 0:
            loop.stop()
        loop.after(1 + left[0] * 7919 % 1000, act)

    for _ in range(HEAP):
        act()
    began_s = time.process_time()
    loop.run(1 << 62)
    return (events - HEAP) / (time.process_time() - began_s)


def simulate(
    overrides: list[str], providers: list[str], frame_s: float | None = None, run_dir: Path | None = None
) -> dict[str, float]:
    """One run, with its journal in `run_dir` if that is given: its events, CPU time and virtual time."""
    config = load_config(EXAMPLE, overrides)
    plan = resolve(config, providers, str(EXAMPLE))
    scheduler = Scheduler(run_plan(plan), limits(config), policies(config), 0)
    journal = None if run_dir is None else RunDirectory(run_dir).begin_journal(config.journal, waits=True)
    run = simulation.build(plan, simulation.Experiment(frame_s=frame_s), scheduler, journal or NullJournal())
    began_s = time.process_time()
    failed = run.live()
    if journal is not None:
        journal.close()
    cpu_s = time.process_time() - began_s
    if failed:
        raise RuntimeError(f"the simulated run failed: {failed}")
    return {"events": run.events, "cpu_s": cpu_s, "virtual_s": run.loop.now_ns / 1e9}


def large(workers: int, trajectories: int) -> Figures:
    overrides = [
        "run.steps=1",
        f"rollout.groups={trajectories // GROUP_SIZE}",
        f"rollout.group_size={GROUP_SIZE}",
        "trainer.updates_per_step=1",
        f"seeding.reserved_engines={workers}",
        "scheduler.queue_timeout_s=36000",
        "scheduler.turn_stall_timeout_s=3600",
        "scheduler.heartbeat_interval_s=1",
        "trainer.step_timeout_s=36000",
        f"providers.reserved.max_workers={workers}",
    ]
    before = psutil.Process().memory_info().rss
    figures = simulate(overrides, ["reserved"], frame_s=1.0)
    return {
        "workers": workers,
        "trajectories": trajectories,
        "events": figures["events"],
        "events_per_s": figures["events"] / figures["cpu_s"],
        "rss_mb": psutil.Process().memory_info().rss / 2**20,
        "rss_before_mb": before / 2**20,
        "virtual_s": figures["virtual_s"],
    }


def small(rounds: int, steps: int, loop_events: int) -> Figures:
    """Loop, run with a journal and run without one, in turn."""
    job = [f"run.steps={steps}"], ["serving", "spot"]
    loops, journaled, bare, speedups = [], [], [], []
    for _ in range(rounds):
        loops.append(bare_loop(loop_events))
        with tempfile.TemporaryDirectory() as directory:
            found = simulate(*job, run_dir=Path(directory))
        journaled.append(found["events"] / found["cpu_s"])
        speedups.append(found["virtual_s"] / found["cpu_s"])
        found = simulate(*job)
        bare.append(found["events"] / found["cpu_s"])
    over = [loop / events for loop, events in zip(loops, journaled, strict=True)]
    over_bare = [loop / events for loop, events in zip(loops, bare, strict=True)]
    return {
        "events_per_s": median(journaled),
        "events_per_s_no_journal": median(bare),
        "loop_events_per_s": median(loops),
        "loop_over_events": median(over),
        "loop_over_events_range": [min(over), max(over)],
        "loop_over_events_no_journal": median(over_bare),
        "loop_over_events_no_journal_range": [min(over_bare), max(over_bare)],
        "speedup": median(speedups),
    }


def main(arguments: Arguments) -> Figures:
    quick = arguments.quick
    figures = small(3, 3, LOOP_EVENTS // 10) if quick else small(7, 20, LOOP_EVENTS)
    sizes = [large(*size) for size in (SIZES[:2] if quick else SIZES)]
    return {**figures, "large": None if quick else sizes[-1], "growth": sizes}


if __name__ == "__main__":
    benchmark(__doc__, main)
