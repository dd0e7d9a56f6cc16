"""Throughput while most spot workers vanish and come back, by how the trainer's device seeds (RLBoost Fig. 12).

A run has six workers and its window has settled; five are killed; after some steps they come back, and after some more
the same happens again. `adaptive` is Algorithm 1, `no_memory` the same without the memory of windows by capacity,
`none` never seeds (but for turns that nobody else could take). `throughput` is of trained tokens a second from the
first loss on; all see the same turns. `ordering_holds` says whether adaptive ≥ no_memory ≥ none, within one standard
error. `--quick` has three workers, one loss, and leaves `no_memory` out: memory tells only when a capacity returns.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._arms import in_order, in_turn
from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._paced import Devices, LongTailedTask, PacedRun, TaskSettings, paced_run
from elastic.core.policy import StepRecord
from elastic.core.types import NS_PER_S

ARMS: dict[str, dict[str, Any]] = {
    "adaptive": {"policy": "adaptive", "window_s": 0.3, "rate": 3.0},
    "no_memory": {"policy": "adaptive", "window_s": 0.3, "rate": 3.0, "memory": False},
    "none": {"policy": "fixed", "window_s": 0},
}
TASK = TaskSettings(prompts={"": 16}, observations={"": 1})


@dataclass(frozen=True)
class SeedingScale:
    """Steps in each phase: `settle` with all workers, `few` after a loss, `many` after the return."""

    arms: tuple[str, ...]
    seeds: int
    workers: int
    losses: int
    settle: int
    few: int
    many: int


FULL = SeedingScale(tuple(ARMS), seeds=3, workers=6, losses=2, settle=3, few=3, many=3)
QUICK = SeedingScale(("adaptive", "none"), seeds=1, workers=3, losses=1, settle=1, few=2, many=1)


async def lose_and_regain(run: PacedRun, scale: SeedingScale) -> list[StepRecord]:
    """The steps from the first loss on."""
    await run.workers(scale.workers)
    await run.steps(scale.settle)
    first = len(run.history)
    for _ in range(scale.losses):
        run.stocks["spot"].shrink(1)
        await run.steps(scale.few)
        run.stocks["spot"].grow(scale.workers)
        await run.workers(scale.workers)
        await run.steps(scale.many)
    return run.history[first:]


async def tokens_per_s(directory: Path, arm: str, seed: int, scale: SeedingScale) -> tuple[float, list[float]]:
    """Throughput of one run, and the seeding times of its steps in seconds."""
    async with paced_run(
        directory,
        f"{arm}-{seed}",
        {"spot": Devices(scale.workers)},
        LongTailedTask,
        TASK,
        "seeding",
        seed=seed,
        rollout={"groups": 2 * scale.workers},
        seeding=ARMS[arm],
    ) as run:
        steps = await lose_and_regain(run, scale)
    duration_s = sum(step.duration_ns for step in steps) / NS_PER_S
    return run.tokens({step.step for step in steps}) / duration_s, [step.seeding_ns / NS_PER_S for step in steps]


async def measure(arguments: Arguments) -> Figures:
    scale = QUICK if arguments.quick else FULL
    measured = await in_turn(
        scale.arms, scale.seeds, lambda arm, seed: tokens_per_s(arguments.scratch, arm, seed, scale)
    )
    found = {arm: [throughput for throughput, _ in runs] for arm, runs in measured.items()}
    seeding_s = {arm: runs[-1][1] for arm, runs in measured.items()}
    return {**in_order("throughput", found, ARMS, scale.seeds), "seeding_s": seeding_s}


if __name__ == "__main__":
    benchmark(__doc__, measure)
