"""Rewards on a device of their own against rewards on functions, with the same number of devices in all.

RollArt's comparison (its Figure 14: 158 → 77 s of rollout, 6 → 88 % use of what rewards run on) at our scale: of three
paced devices, either one serves the reward model and two roll out, or all three roll out and the reward model runs
on functions, that start cold and scale to zero. The reward is computed for real; its model's time is paced, too.
Use is the time in which rewards were computed over the time that was held for it, cold starts included. Rollouts show
RollArt's order; use does not at this scale: a cold start (a Python process that imports the environment) takes several
times as long as a call and comes again after every pause, and the dedicated device is busy for most of a step, not for
6 % of it.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks._arms import by_name, in_turn
from benchmarks._common import Figures, benchmark
from benchmarks._configurations import configuration
from benchmarks._shapes import write_policy
from elastic.compose.execution import execute
from elastic.compose.plan import resolve
from elastic.compose.runs import save_run_config
from elastic.config import Config
from elastic.core.types import NS_PER_S
from elastic.runtime.journal import CallRow, RunDirectory, StepRow

DEVICES = 3
REWARD_S = 0.15
"""Of the reward model for one trajectory: a short answer of a judge."""
FUNCTIONS = 8
NEVER_S = 3600.0
FULL_RUNS = 3


def rewarded(checkpoint: Path, mode: str, steps: int) -> Config:
    dedicated = mode == "dedicated"
    return configuration(
        "unseeded",
        "all-capacity",
        "rewards",
        policy=checkpoint,
        run={"name": mode, "steps": steps},
        rewards={
            "pacing_s": REWARD_S,
            "concurrency": 1 if dedicated else FUNCTIONS,
            "idle_s": NEVER_S if dedicated else 1.0,
        },
        providers={"reserved": {"max_workers": DEVICES - 1 if dedicated else DEVICES}},
    )


async def measure(checkpoint: Path, mode: str, steps: int) -> tuple[float, float]:
    """(seconds of rollout, use of what rewards run on) in the last step, when every device has come."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / mode
        run_dir.mkdir()
        config = rewarded(checkpoint, mode, steps)
        save_run_config(run_dir, config)
        outcome = await execute(resolve(config, ["reserved"], "benchmark"), run_dir)
        if outcome.failed:
            raise RuntimeError(outcome.failed)
        with RunDirectory(run_dir).newest_journal() as journal:
            return last_step(journal.rows(StepRow)[-1], journal.rows(CallRow), mode)


def last_step(step: StepRow, calls: Sequence[CallRow], mode: str) -> tuple[float, float]:
    began_ns = step.t_ns - step.record.duration_ns
    rollout_s = step.record.rollout_ns / NS_PER_S
    mine = [call for call in calls if began_ns <= call.t_ns <= began_ns + step.record.rollout_ns]
    used_s = sum(call.duration_s for call in mine)
    held_s = rollout_s if mode == "dedicated" else used_s + sum(call.cold_start_s for call in mine)
    return rollout_s, used_s / held_s


async def compare(directory: Path, runs: int, steps: int) -> Figures:
    checkpoint = write_policy(directory)
    found = await in_turn(("dedicated", "serverless"), runs, lambda mode, _: measure(checkpoint, mode, steps))
    return by_name(found, ("rollout_s", "utilisation"))


if __name__ == "__main__":
    benchmark(__doc__, lambda a: compare(a.scratch, *((1, 2) if a.quick else (FULL_RUNS, 3))))
