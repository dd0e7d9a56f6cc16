"""Live and simulated side by side: the main job once in each world, from one configuration, trace and seed.

The live run has real processes and real kills; engines are paced. The machine's own times (boots, pulls, training,
environments) come from a profile that is measured in another live run, of a seed that is not compared. Of the
run that is compared, the simulation gets the trajectories' turn lengths and rewards and nothing else. Errors are
relative to the live figure: of the mean step time, of tokens per second over the whole run, of the allocation
overhead; and for tokens by provider the sum of the differences over all tokens.
"""

import statistics
from pathlib import Path

from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._runs import EXAMPLE, prepare, run
from elastic.compose.plan import resolve
from elastic.compose.runs import new_run_dir
from elastic.config import load_config
from elastic.report import as_json, summarise
from elastic.runtime.journal import RunDirectory
from elastic.simulation import run as simulation
from elastic.simulation.calibration import profile_run
from elastic.simulation.performance import load_profile

CALIBRATION_SEED = 100
SEEDS = (7, 8, 9)
QUICK_STEPS = 4
STEPS = 30
PROVIDERS = "serving,spot"
SLOWED = (
    "engine.pacing.prefill_tokens_per_s=3200",
    "engine.pacing.decode_step_s={1=0.035,8=0.045,16=0.06}",
    "providers.spot.max_workers=2",
)
"""Devices so slow that two cores carry all of them: where the cores are the bottleneck, no model of devices holds."""
KEYS = ("step_time", "throughput", "tokens_by_provider", "allocation_overhead")


def compare(live: Figures, simulated: Figures) -> dict[str, float]:
    """Relative errors between two summaries."""
    names = live["providers"].keys() | simulated["providers"].keys()
    tokens = [_tokens(summary, name) for name in names for summary in (live, simulated)]
    differences = sum(abs(one - other) for one, other in zip(tokens[::2], tokens[1::2], strict=True))
    return {
        "step_time": _error(_step_s(live), _step_s(simulated)),
        "throughput": _error(_throughput(live), _throughput(simulated)),
        "tokens_by_provider": differences / live["total"]["tokens"],
        "allocation_overhead": _error(live["total"]["overhead_share"], simulated["total"]["overhead_share"]),
    }


def _error(live: float, simulated: float) -> float:
    return abs(simulated - live) / live


def _step_s(summary: Figures) -> float:
    return statistics.mean(step["duration_s"] for step in summary["steps"])


def _throughput(summary: Figures) -> float:
    return summary["total"]["tokens"] / summary["wall_s"]


def _tokens(summary: Figures, provider: str) -> int:
    return summary["providers"].get(provider, {"tokens": 0})["tokens"]


def simulated(directory: Path, live_dir: Path, seed: int, steps: int, profile: Path) -> Figures:
    """The summary of the simulation that stands beside a live run."""
    overrides = [f"run.directory={directory}", f"run.seed={seed}", f"run.steps={steps}", "run.name=simulated", *SLOWED]
    config = load_config(EXAMPLE, overrides)
    plan = resolve(config, PROVIDERS.split(","), str(EXAMPLE))
    run_dir = new_run_dir(config)
    simulation.simulate(plan, run_dir, simulation.Experiment(profile=str(profile), turns=str(live_dir)))
    return as_json(summarise(RunDirectory(run_dir)))


def main(arguments: Arguments) -> Figures:
    prepare()
    steps = QUICK_STEPS if arguments.quick else STEPS
    seeds = SEEDS[:1] if arguments.quick else SEEDS
    directory = arguments.scratch
    profile = directory / "machine.toml"
    calibration, _ = run(directory, PROVIDERS, [f"run.steps={steps}", *SLOWED], CALIBRATION_SEED)
    profile_run(calibration, profile)
    rows: list[Figures] = []
    for seed in seeds:
        live_dir, live = run(directory, PROVIDERS, [f"run.steps={steps}", *SLOWED], seed)
        model = simulated(directory, live_dir, seed, steps, profile)
        rows.append(
            {
                "seed": seed,
                **compare(live, model),
                "live": _shown(live),
                "simulated": _shown(model),
                "cpu_saturated_share": live["cpu_saturated_share"],
            }
        )
    boot_s = load_profile(str(profile)).boot_s
    worst = {key: max(row[key] for row in rows) for key in KEYS}
    return worst | {"steps": steps, "boot_s": boot_s, "seeds": rows}


def _shown(summary: Figures) -> Figures:
    return {
        "step_s": _step_s(summary),
        "tokens_per_s": _throughput(summary),
        "tokens": {name: usage["tokens"] for name, usage in summary["providers"].items()},
        "overhead_share": summary["total"]["overhead_share"],
        "accounts_s": {
            name: {account: round(spent_s, 2) for account, spent_s in usage["accounts_s"].items() if spent_s}
            for name, usage in summary["providers"].items()
        },
    }


if __name__ == "__main__":
    benchmark(__doc__, main)
