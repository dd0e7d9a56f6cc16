"""How long a step's rollouts take as turns may go to more places, and for better reasons (ROSE Table 3, and more).

Two kinds of modelled devices, one fast at prefill, one at decoding, and two kinds of task, one with long prompts and
observations, one with short ones; turns are long-tailed. `static` pins a trajectory to the worker of its first turn,
`turn_wise` sends each turn to the least loaded worker, `affinity` weighs prefixes and hardware, and `balanced` moves
turns between workers besides. All four see the same turns of the same lengths. There are twice as many trajectories
as workers can execute at once, so that throughput decides, and not the longest trajectory alone. `rollout_s` is the
mean over steps and runs; `ordering_holds` says whether each is no slower than the one before, within one standard
error. `--quick` has the first and the last arm only.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._arms import in_order, in_turn
from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._paced import Devices, LongTailedTask, TaskSettings, paced_run
from elastic.core.types import NS_PER_S

ARMS: dict[str, dict[str, Any]] = {
    "static": {"routing": {"policy": "static"}, "balancing": {"policy": "none"}},
    "turn_wise": {"routing": {"policy": "turn_wise"}, "balancing": {"policy": "none"}},
    "affinity": {"routing": {"policy": "affinity"}, "balancing": {"policy": "none"}},
    "balanced": {"routing": {"policy": "affinity"}, "balancing": {"policy": "continuous"}},
}
COMPUTE = {
    "pacing": {"prefill_tokens_per_s": 8000, "decode_step_s": {1: 0.04, 4: 0.045, 8: 0.08}},
    "tflops": 800,
    "memory_gb_per_s": 2000,
}
BANDWIDTH = {
    "pacing": {"prefill_tokens_per_s": 1500, "decode_step_s": {1: 0.02, 4: 0.0225, 8: 0.04}},
    "tflops": 150,
    "memory_gb_per_s": 4000,
}
PROMPTS, OBSERVATIONS = {"long": 160, "short": 16}, {"long": 60, "short": 4}
SEND_ALL = 64
"""Θ of the static baseline: a pinned turn is sent to its worker however long the queue there."""


@dataclass(frozen=True)
class BalancingScale:
    """`workers` of each kind."""

    arms: tuple[str, ...]
    seeds: int
    workers: int
    steps: int
    turns: int
    turn_tokens: int


FULL = BalancingScale(tuple(ARMS), seeds=3, workers=2, steps=3, turns=3, turn_tokens=48)
QUICK = BalancingScale(("static", "balanced"), seeds=1, workers=1, steps=1, turns=2, turn_tokens=32)


async def rollout_s(directory: Path, arm: str, seed: int, scale: BalancingScale) -> list[float]:
    """Of each step of one run."""
    devices = {"compute": Devices(scale.workers, COMPUTE), "bandwidth": Devices(scale.workers, BANDWIDTH)}
    async with paced_run(
        directory,
        f"{arm}-{seed}",
        devices,
        LongTailedTask,
        TaskSettings(prompts=PROMPTS, observations=OBSERVATIONS, turns=scale.turns),
        "balancing",
        seed=seed,
        rollout={"groups": 8 * scale.workers, "max_turns": scale.turns, "max_tokens_per_turn": scale.turn_tokens},
        engine={"max_pending": SEND_ALL if arm == "static" else 2, "pacing": COMPUTE["pacing"]},
        **ARMS[arm],
    ) as run:
        await run.workers(2 * scale.workers)
        return [step.rollout_ns / NS_PER_S for step in await run.steps(scale.steps)]


async def measure(arguments: Arguments) -> Figures:
    scale = QUICK if arguments.quick else FULL
    measured = await in_turn(scale.arms, scale.seeds, lambda arm, seed: rollout_s(arguments.scratch, arm, seed, scale))
    found = {arm: [time_s for run in runs for time_s in run] for arm, runs in measured.items()}
    return in_order("rollout_s", found, ARMS, scale.seeds)


if __name__ == "__main__":
    benchmark(__doc__, measure)
