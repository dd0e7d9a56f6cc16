"""Rollout throughput as workers are lent, and a run on borrowed capacity against the reserved trainer alone.

Live: real processes, real tokens; engines are paced to a modelled device, slow enough that two cores carry four of them
and the trainer's, which only trains. Trajectories are short and many, so that it is engines that limit a step, and not
its longest trajectory. `rollout_tokens_per_s` counts accepted tokens over the rollout time of a step, `cpu_use` is the
machine's meanwhile; the first step, in which workers still boot, is left out. The second part runs the example with and
without providers, same seed, and compares the time of a step.
"""

import statistics
from pathlib import Path

from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._runs import prepare, run
from elastic.runtime.journal import RunDirectory, SampleRow, StepRow, TrajectoryRow

WORKERS = (1, 2, 4)
DEVICE = [
    'engine.pacing={prefill_tokens_per_s=1600, decode_step_s={"1"=0.05, "4"=0.075}}',
    "engine.max_batch=4",
]
"""So slow that two cores carry five of them, and so small that a step's trajectories fill the largest number of workers
several times: 64 of the quick run, four times; 192 of the full one, twelve times."""
SHORT = "rollout.max_turns=2"
SEED = 7


def rollout(directory: Path, workers: int, steps: int, groups: int) -> Figures:
    """Tokens per second of rollout time and the CPU's use, with `workers` dedicated workers."""
    settings = [
        f"run.steps={steps}",
        f"rollout.groups={groups}",
        SHORT,
        "seeding.policy=fixed",
        "seeding.window_s=0",
        *DEVICE,
        f"providers.reserved.max_workers={workers}",
    ]
    run_dir, _ = run(directory, "reserved", settings, SEED)
    with RunDirectory(run_dir).newest_journal() as journal:
        steps_done = list(journal.rows(StepRow))
        times_s = {row.step: row.record.rollout_ns / 1e9 for row in steps_done}
        tokens = dict.fromkeys(times_s, 0)
        for row in journal.rows(TrajectoryRow):
            tokens[row.step] += row.policy_tokens
        samples = [row for row in journal.rows(SampleRow) if steps_done[0].t_ns < row.t_ns <= steps_done[-1].t_ns]
        cpu = statistics.mean(row.status.cpu_share for row in samples)
    rates = [tokens[step] / time_s for step, time_s in times_s.items() if step > 0]
    return {"tokens_per_s": statistics.median(rates), "cpu_use": cpu}


def against_reserved(directory: Path, steps: int) -> Figures:
    """The example on serving and spot capacity, and on the trainer's device alone."""
    figures: Figures = {}
    for name, providers in (("elastic", "serving,spot"), ("reserved_only", "")):
        run_dir, summary = run(directory, providers, [f"run.steps={steps}"], SEED)
        with RunDirectory(run_dir).newest_journal() as journal:
            step_s = statistics.median(row.record.duration_ns / 1e9 for row in journal.rows(StepRow))
        figures[name] = {"step_s": step_s, "wall_s": summary["wall_s"], "usd": summary["total"]["usd"]}
    figures["speedup"] = figures["reserved_only"]["step_s"] / figures["elastic"]["step_s"]
    return figures


def main(arguments: Arguments) -> Figures:
    prepare()
    steps, groups = (2, 8) if arguments.quick else (6, 24)
    directory = arguments.scratch
    measured = WORKERS[::2] if arguments.quick else WORKERS
    by_workers = {n: rollout(directory, n, steps, groups) for n in measured}
    nothing = {"tokens_per_s": None, "cpu_use": None}
    return {
        "rollout_tokens_per_s": {str(n): by_workers.get(n, nothing)["tokens_per_s"] for n in WORKERS},
        "cpu_use": {str(n): by_workers.get(n, nothing)["cpu_use"] for n in WORKERS},
        "against_reserved": None if arguments.quick else against_reserved(directory, 20),
    }


if __name__ == "__main__":
    benchmark(__doc__, main)
