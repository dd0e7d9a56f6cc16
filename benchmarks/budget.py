"""What runs with a budget are billed: never more than that, and by the second nearly all of it.

Each run trains on four reserved GPUs and rolls out on spot instances that come and go as in RLBoost's trace, from a
place in it and with a budget that its seed draws; it has more steps than its budget lasts for, so that it ends as
`stopped`. The bill is made by `billed_usd` below from the providers' records of starts and ends, not from the core's
account, and leases are billed by the `BILLING` that names the row: each begun second, minute or hour. `used_share` is
the mean share of the budget that was billed, `over` how many runs cost more than their budgets. `--quick` has fewer
seeds.
"""

import math
from random import Random

from benchmarks._common import Figures, benchmark
from benchmarks._configurations import configuration
from elastic.compose.incarnations import configured_budget
from elastic.compose.plan import resolve
from elastic.compose.scheduling import limits, policies, run_plan
from elastic.config import Config
from elastic.core.controls import BUDGET_EXHAUSTED
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S
from elastic.runtime.journal import NullJournal
from elastic.simulation import run as simulation
from elastic.simulation.performance.run import SimulatedRun

INCREMENT_S = {"second": 1, "minute": 60, "hour": 3600}
SEEDS, QUICK_SEEDS = 20, 2
TRACE_END_S = 7200.0
BUDGET_USD = (80.0, 240.0)
"""Between one and a half and five hours of all that there is."""
FRAME_S = 60.0
"""How long tokens wait to be sent: turns take minutes here."""


def budgeted(seed: int, billing: str) -> tuple[Config, float]:
    """A run's configuration, and its budget in dollars."""
    draw = Random(seed)
    budget_usd = round(draw.uniform(*BUDGET_USD), 2)
    spot = {
        "kind": "spot-replay",
        "trace": draw.choice(("rlboost-a", "rlboost-b", "rlboost-c")),
        "start_s": draw.uniform(0.0, TRACE_END_S / 2),
        "repeat": True,
        "max_workers": 6,
        "usd_per_gpu_hour": 2.66,
        "billing": billing,
        "notice_s": draw.choice((0.0, 30.0, 120.0)),
    }
    run, trainer = {"seed": seed, "budget_usd": budget_usd}, {"billing": billing}
    made = configuration("budget", policy="Qwen3-8B", run=run, trainer=trainer, providers={"spot": spot})
    return made, budget_usd


def stopped_run(config: Config) -> SimulatedRun:
    """A run that has come to the end of its budget."""
    plan = resolve(config, ["spot"], "budget")
    scheduler = Scheduler(run_plan(plan), limits(config), policies(config), 0)
    experiment = simulation.Experiment(profile="H100/Qwen3-8B", frame_s=FRAME_S)
    run = simulation.build(plan, experiment, scheduler, NullJournal())
    failed = run.live(told=configured_budget(config))
    if failed or not scheduler.stopped.startswith(BUDGET_EXHAUSTED):
        raise RuntimeError(f"the run did not end for its budget: {failed or scheduler.stopped or 'it finished'}")
    return run


def billed_usd(run: SimulatedRun, increment_s: int) -> float:
    """The bill by the providers' records of starts and ends."""
    usd = 0.0
    for launcher in run.launchers.values():
        settings = launcher.market.settings
        for span in launcher.spans.values():
            assert span.ended_ns is not None, f"{span.lease} was never given back"
            increments = math.ceil((span.ended_ns - span.began_ns) / NS_PER_S / increment_s)
            gpu_hours = span.workers * settings.gpus_per_worker * increments * increment_s / 3600
            usd += gpu_hours * settings.usd_per_gpu_hour
    return usd


def measure(seeds: int) -> Figures:
    figures: Figures = {}
    for billing, increment_s in INCREMENT_S.items():
        budgets_usd, bills_usd, leases = [], [], 0
        for seed in range(seeds):
            config, budget_usd = budgeted(seed, billing)
            run = stopped_run(config)
            budgets_usd.append(budget_usd)
            bills_usd.append(billed_usd(run, increment_s))
            leases += sum(len(launcher.spans) for launcher in run.launchers.values())
        pairs = list(zip(bills_usd, budgets_usd, strict=True))
        figures[billing] = {
            "budget_usd": sum(budgets_usd),
            "billed_usd": sum(bills_usd),
            "over": sum(bill > budget for bill, budget in pairs),
            "used_share": sum(bill / budget for bill, budget in pairs) / seeds,
            "used_share_min": min(bill / budget for bill, budget in pairs),
            "leases": leases,
            "runs": seeds,
        }
    return figures


if __name__ == "__main__":
    benchmark(__doc__, lambda arguments: measure(QUICK_SEEDS if arguments.quick else SEEDS))
