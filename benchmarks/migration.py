"""What it costs a step to lose half of its workers, with and without the tokens they had generated (RLBoost Fig. 14).

In the middle of a step half of the workers are killed without notice, early (at a fifth of an undisturbed step) or
midway (at three fifths); they come back after it. With `migrate` tokens are collected as they are generated and turns
go on elsewhere from there; with `recompute` workers send whole turns only, and turns that were lost begin again.
`overhead_s` is how much longer the step's rollouts take than those of the undisturbed step before it, which itself
comes one step after the last worker is ready: a worker that has just come still loads what it will need. Turns have a
fixed length, so that steps are alike. `--quick` tries midway only.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from benchmarks._arms import deviation, in_turn
from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._paced import STEP_TIMEOUT_S, Devices, FixedTask, PacedRun, TaskSettings, paced_run
from elastic.core.types import NS_PER_S

ARMS = {"migrate": "tokens", "recompute": "responses"}
MOMENTS = {"early": 0.2, "midway": 0.6}
TASK = TaskSettings(prompts={"": 16}, observations={"": 1})


class StepTimes(NamedTuple):
    """Rollout times of two steps: an undisturbed one, and the next that all workers begin and half do not end."""

    calm_s: float
    disturbed_s: float


async def one_round(run: PacedRun, share: float, workers: int) -> StepTimes:
    """Half of the workers are killed at a `share` of the time that the undisturbed step took."""
    await run.workers(workers)
    calm_s = (await run.steps(2))[-1].rollout_ns / NS_PER_S
    found = StepTimes(calm_s, await disturbed_s(run, share * calm_s, workers))
    run.stocks["spot"].grow(workers)
    return found


async def disturbed_s(run: PacedRun, after_s: float, workers: int) -> float:
    scheduler = run.live.orchestrator.scheduler
    now = scheduler.step.number if scheduler.step else 0
    step = await run.live.until(
        "the next step",
        lambda: scheduler.step if scheduler.step and scheduler.step.number > now and run.loaded(workers) else None,
        STEP_TIMEOUT_S,
    )
    await asyncio.sleep(max(0.0, step.started_ns / NS_PER_S + after_s - run.now_s()))
    run.stocks["spot"].shrink(workers // 2)
    await run.live.until("the step's end", lambda: len(run.history) > step.number, STEP_TIMEOUT_S)
    return run.history[step.number].rollout_ns / NS_PER_S


@dataclass(frozen=True)
class MigrationScale:
    """Each moment is tried once in each of `seeds` runs."""

    moments: tuple[str, ...]
    seeds: int
    workers: int
    turn_tokens: int


FULL = MigrationScale(tuple(MOMENTS), seeds=3, workers=4, turn_tokens=96)
QUICK = MigrationScale(("midway",), seeds=1, workers=2, turn_tokens=48)


async def rounds(directory: Path, arm: str, seed: int, scale: MigrationScale) -> dict[str, StepTimes]:
    workers = scale.workers
    async with paced_run(
        directory,
        f"{arm}-{seed}",
        {"spot": Devices(workers)},
        FixedTask,
        TASK,
        "migration",
        seed=seed,
        rollout={"groups": workers, "max_tokens_per_turn": scale.turn_tokens},
        scheduler={"collect": ARMS[arm]},
    ) as run:
        return {moment: await one_round(run, MOMENTS[moment], workers) for moment in scale.moments}


async def measure(arguments: Arguments) -> Figures:
    scale = QUICK if arguments.quick else FULL
    found = await in_turn(ARMS, scale.seeds, lambda arm, seed: rounds(arguments.scratch, arm, seed, scale))
    played = {moment: {arm: [run[moment] for run in runs] for arm, runs in found.items()} for moment in scale.moments}
    costs_s = {
        moment: {arm: [run.disturbed_s - run.calm_s for run in runs] for arm, runs in arms.items()}
        for moment, arms in played.items()
    }
    means = {moment: {arm: mean(values) for arm, values in arms.items()} for moment, arms in costs_s.items()}
    return {
        "overhead_s": {moment: means.get(moment) for moment in MOMENTS},
        "overhead_cut": {m: 1 - v["migrate"] / v["recompute"] for m, v in means.items() if v["recompute"]},
        "spread": {
            moment: {
                arm: {"mean": mean(values), "stdev": deviation(values), "runs": len(values)}
                for arm, values in arms.items()
            }
            for moment, arms in costs_s.items()
        },
        "rounds": {
            moment: {arm: [[run] for run in runs] for arm, runs in arms.items()} for moment, arms in played.items()
        },
    }


if __name__ == "__main__":
    benchmark(__doc__, measure)
