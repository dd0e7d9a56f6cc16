"""Serving, spot and serverless capacity in one run: what each cost, and how much of its time went into having it.

Live: real processes, real tokens, engines paced to a modelled device; spot workers are killed as a real trace says,
each serverless call ends by its time limit. `allocation_overhead` has each provider's share of GPU time in two
definitions: `accounts` counts time booting, loading, applying, recomputing, lost or unattributed; `preemption` is
the papers', preempted GPUs × recovery time, where a call that ends by its time limit is preempted too (ROSE §6.1).
`cost_per_mtoken` is the run's cost per million trained tokens, beside it what the same GPU time would have cost on
demand. Figures are medians over the runs, with their range; the accounts that make up the last run are given in
GPU-seconds. Serving GPUs cost nothing here, since their cluster pays for them either way.

`ray` is another run, on a real Ray cluster of this machine (a head and three raylets) whose nodes are killed under its
workers, with a relay in the cluster: twenty kills, or as many as a quick run, or `--within-s`, has time for. `accounts`
has each account's share of its workers' time, `tokens_lost` is judged by replaying the journal, `actors_left` counts
actors that have a name after the run's end. `--only ray` measures nothing else. Where Ray is missing:
`skipped_because`.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._arms import median_range
from benchmarks._common import Arguments, Figures, benchmark, option
from benchmarks._live import run_to_end
from benchmarks._ray_nodes import LEFT_S, kill_nodes, why_not
from benchmarks._runs import prepare, run
from elastic.report import Summary, summarise
from elastic.runtime.journal import RunDirectory

KILLS = 20
QUICK_S, RAY_BOOT_S = 50.0, 15.0
PROVIDERS = ("serving", "spot", "serverless")
SEEDS = (7, 8, 9)
DEVICES = [
    'engine.pacing={prefill_tokens_per_s=3200, decode_step_s={"1"=0.035, "8"=0.045, "16"=0.06}}',
    "providers.spot.max_workers=2",
    "providers.spot.speed=45",
    "providers.serverless.max_workers=1",
    "providers.serverless.lease_s=40",
    "providers.serverless.cold_start_s=1",
    "providers.serverless.usd_per_gpu_hour=3.95",
]
"""Few and slow enough for two processors to boot and to run; calls so short that several end within the run."""


def measure(directory: Path, seed: int, steps: int, groups: int) -> Summary:
    settings = [f"run.steps={steps}", f"rollout.groups={groups}", *DEVICES]
    run_dir, _ = run(directory, ",".join(PROVIDERS), settings, seed)
    return summarise(RunDirectory(run_dir))


def overheads(summaries: Sequence[Summary]) -> dict[str, dict[str, dict[str, float] | None]]:
    found = {name: [s.providers[name] for s in summaries if name in s.providers] for name in summaries[0].providers}
    return {
        name: {
            "accounts": median_range(usage.overhead_share for usage in usages),
            "preemption": median_range(usage.preempted_share for usage in usages),
        }
        for name, usages in found.items()
    }


def on_ray(directory: Path, within_s: float, began_s: float) -> Figures:
    if why := why_not():
        return {"skipped_because": why}
    until_s = began_s + within_s - LEFT_S
    if until_s - time.monotonic() < RAY_BOOT_S:
        return {"skipped_because": "a quick run has no time left for it: --only ray"}
    return run_to_end(kill_nodes(directory, KILLS, until_s))


def replayed(arguments: Arguments) -> Figures:
    prepare()
    seeds = SEEDS[:1] if arguments.quick else SEEDS
    steps, groups = (2, 8) if arguments.quick else (20, 16)
    summaries = [measure(arguments.scratch, seed, steps, groups) for seed in seeds]
    last = summaries[-1]
    return {
        "allocation_overhead": overheads(summaries),
        "cost_per_mtoken": median_range([s.usd_per_million_trained_tokens for s in summaries]),
        "on_demand_over_cost": median_range([s.on_demand_usd and s.on_demand_usd / s.usd for s in summaries]),
        "accounts_gpu_s": {
            name: {account: round(spent_s, 3) for account, spent_s in usage.accounts_s.items() if spent_s}
            for name, usage in last.providers.items()
        },
        "usd": {name: usage.usd for name, usage in last.providers.items()},
        "tokens": {name: usage.tokens for name, usage in last.providers.items()},
        "trained_tokens": last.batches.trained_tokens,
        "lease_ends": last.total.lease_ends,
        "ledger_imbalance_ns": sum(s.ledger_imbalance_ns for s in summaries),
        "runs": len(summaries),
        "wall_s": median_range([s.wall_s for s in summaries]),
        "cpu_saturated_share": median_range([s.cpu_saturated_share for s in summaries]),
    }


def main(parsed: Arguments) -> Figures:
    began_s = time.monotonic()
    figures = {} if parsed.only == "ray" else replayed(parsed)
    if parsed.only != "replayed":
        figures["ray"] = on_ray(parsed.scratch, QUICK_S if parsed.quick else parsed.within_s, began_s)
    return figures


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option("--only", choices=["replayed", "ray"], help="measure one of the two alone"),
        option("--within-s", type=float, default=math.inf, help="longest time for Ray's nodes to be killed in"),
    )
