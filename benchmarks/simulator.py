"""How fast virtual time goes: core events a second in a simulated run, beside the bare event loop in the same process.

Small: the main job's configuration. Growth: the same job on more and more workers, up to 2,000 reserved workers with
50,000 trajectories in one step. `speedup` is virtual seconds in a second of the small run.
"""

import time
from typing import Any

import psutil
from _common import ROOT, Arguments, emit, parse_arguments

from elastic import compose, simulation
from elastic.config import load_config
from elastic.core.scheduler import Scheduler
from elastic.runtime.journal import NullJournal
from elastic.sim.loop import EventLoop

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


def simulate(overrides: list[str], providers: list[str], frame_s: float | None = None) -> dict[str, float]:
    """One run without a journal: its events, CPU time and virtual time."""
    config = load_config(EXAMPLE, overrides)
    plan = compose.resolve(config, providers, str(EXAMPLE))
    scheduler = Scheduler(compose.run_plan(plan), compose.limits(config), compose.policies(config), 0)
    run = simulation.build(plan, simulation.Experiment(frame_s=frame_s), scheduler, NullJournal())
    began_s = time.process_time()
    failed = run.live()
    cpu_s = time.process_time() - began_s
    if failed:
        raise RuntimeError(f"the simulated run failed: {failed}")
    return {"events": run.events, "cpu_s": cpu_s, "virtual_s": run.loop.now_ns / 1e9}


def large(workers: int, trajectories: int) -> dict[str, Any]:
    overrides = [
        "run.steps=1",
        f"rollout.groups={trajectories // GROUP_SIZE}",
        f"rollout.group_size={GROUP_SIZE}",
        "trainer.updates_per_step=1",
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


def main(arguments: Arguments) -> dict[str, Any]:
    loop_events_per_s = bare_loop(LOOP_EVENTS // 10 if arguments.quick else LOOP_EVENTS)
    small = simulate([f"run.steps={3 if arguments.quick else 20}"], ["serving", "spot"])
    sizes = [large(*size) for size in (SIZES[:2] if arguments.quick else SIZES)]
    return {
        "events_per_s": small["events"] / small["cpu_s"],
        "loop_events_per_s": loop_events_per_s,
        "speedup": small["virtual_s"] / small["cpu_s"],
        "large": None if arguments.quick else sizes[-1],
        "growth": sizes,
    }


if __name__ == "__main__":
    parsed = parse_arguments(__doc__)
    emit(main(parsed), parsed)
