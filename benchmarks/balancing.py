"""How long a step's rollouts take as turns may go to more places, and for better reasons (ROSE Table 3, and more).

Two kinds of modelled devices, one fast at prefill, one at decoding, and two kinds of task, one with long prompts and
observations, one with short ones; turns are long-tailed. `static` pins a trajectory to the worker of its first turn,
`turn_wise` sends each turn to the least loaded worker, `affinity` weighs prefixes and hardware, and `balanced` moves
turns between workers besides. All four see the same turns of the same lengths. There are twice as many trajectories
as workers can execute at once, so that throughput decides, and not the longest trajectory alone. `rollout_s` is the
mean over steps and runs; `ordering_holds` says whether each is no slower than the one before, within one standard
error. `--quick` has the first and the last arm only.
"""

import itertools
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from _common import Arguments, emit, parse_arguments
from _live import run_to_end
from _paced import Devices, LongTailedTask, TaskSettings, paced_run

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
MAX_BATCH = 8
SEND_ALL = 64
"""Θ of the static baseline: a pinned turn is sent to its worker however long the queue there."""


@dataclass(frozen=True)
class Scale:
    """`workers` of each kind."""

    arms: tuple[str, ...]
    seeds: int
    workers: int
    steps: int
    turns: int
    turn_tokens: int


FULL = Scale(tuple(ARMS), seeds=3, workers=2, steps=3, turns=3, turn_tokens=48)
QUICK = Scale(("static", "balanced"), seeds=1, workers=1, steps=1, turns=2, turn_tokens=32)
GROUP_SIZE = 4


async def rollout_s(directory: Path, arm: str, seed: int, scale: Scale) -> list[float]:
    """Of each step of one run."""
    pending = SEND_ALL if arm == "static" else 2
    engine = {"max_batch": MAX_BATCH, "max_pending": pending, "max_context_tokens": 640, "kv_blocks": 512}
    devices = {"compute": Devices(scale.workers, COMPUTE), "bandwidth": Devices(scale.workers, BANDWIDTH)}
    async with paced_run(
        directory,
        f"{arm}-{seed}",
        devices,
        LongTailedTask,
        TaskSettings(prompts=PROMPTS, observations=OBSERVATIONS, turns=scale.turns),
        seed=seed,
        rollout={
            "groups": 2 * 2 * scale.workers * MAX_BATCH // GROUP_SIZE,
            "group_size": GROUP_SIZE,
            "max_turns": scale.turns,
            "max_tokens_per_turn": scale.turn_tokens,
        },
        engine=engine | {"pacing": COMPUTE["pacing"]},
        seeding={"policy": "fixed", "window_s": 0},
        **ARMS[arm],
    ) as run:
        await run.workers(2 * scale.workers)
        return [step.rollout_ns / NS_PER_S for step in await run.steps(scale.steps)]


async def measure(arguments: Arguments) -> dict[str, Any]:
    scale = QUICK if arguments.quick else FULL
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for seed in range(scale.seeds):
            for arm in scale.arms:
                found.setdefault(arm, []).extend(await rollout_s(Path(name), arm, seed, scale))
    means = {arm: mean(values) for arm, values in found.items()}
    errors = {arm: stdev(v) / math.sqrt(len(v)) if len(v) > 1 else 0.0 for arm, v in found.items()}
    return {
        "rollout_s": {arm: means.get(arm) for arm in ARMS},
        "standard_error": errors if scale.seeds > 1 else None,
        "ordering_holds": all(
            means[later] <= means[earlier] + math.hypot(errors[later], errors[earlier])
            for earlier, later in itertools.pairwise(scale.arms)
        ),
        "runs": scale.seeds,
    }


if __name__ == "__main__":
    args = parse_arguments(__doc__)
    emit(run_to_end(measure(args)), args)
