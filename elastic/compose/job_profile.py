"""A run's phases from a few timed steps of it alone: what a pool plans with where nobody has said how long they are."""

import math
from collections.abc import Sequence

from elastic.config import Config, JobPlanConfig
from elastic.core.events import LeaseGranted, WorkerJoined
from elastic.core.types import NS_PER_S, Nanoseconds, WorkerId
from elastic.engine import resolve_engine
from elastic.runtime.journal import GroupRow, JournalReader, RunDirectory, StepRow
from elastic.worker.trainer import trainer_engine

PROFILED_STEPS = 3
"""The first one, in which everything is loaded, does not count."""


class JobProfileError(Exception):
    """No phases can be read from the run; the message names it, and says why."""


def profile_overrides(config: Config, steps: int = PROFILED_STEPS) -> list[str]:
    """Return the overrides for a run of a few steps on local workers, as many as the job has rollout nodes. The
    trainer's device only trains, as in a pool."""
    return [
        f"run.steps={steps}",
        "run.budget_usd=1e9",
        f"providers.reserved.max_workers={config.job.rollout_nodes}",
        f"providers.reserved.usd_per_gpu_hour={config.trainer.usd_per_gpu_hour}",
        'seeding.policy="fixed"',
        "seeding.window_s=0.0",
        f"trainer.checkpoint_every_steps={steps}",
    ]


def plan_of_run(run: RunDirectory, config: Config) -> JobPlanConfig:
    """How long its phases last: at the token limit, or with `job.plan_quantile` as long as they did in that share of
    its steps. Of switching, a cold start of the rollouts' engine is in it: alone, nothing is parked.

    Raises `JobProfileError` for a run without a finished step, or whose trainer's device generated with another engine
    until its end, and `JournalError`.
    """
    with run.newest_journal() as journal:
        cold_s, parks = _cold_start(journal, config)
        steps = [row.record for row in journal.rows(StepRow)]
        lengths = [length for row in journal.rows(GroupRow) for length in row.lengths]
    if not steps:
        raise JobProfileError(f"run {run.path}: no step of it has finished, and none can be timed")
    engine, stand_in = config.engine.kind, trainer_engine(config).kind
    if not cold_s and engine != stand_in:
        raise JobProfileError(
            f"run {run.path}: its {len(steps)} steps were over before its engine {engine!r} had started, by "
            f"the trainer's {stand_in!r}; allowed: a job.plan, or more --steps of `elastic jobs profile`"
        )
    timed = steps[1:] or steps
    quantile = config.job.plan_quantile
    stretched, filled = (1.0, 1.0) if quantile is not None else _to_the_limit(config, lengths)
    share = 1.0 if quantile is None else quantile
    rollout_s = _quantile([step.rollout_ns / NS_PER_S for step in timed], share) * stretched
    train_s = _quantile([step.train_ns / NS_PER_S for step in timed], share) * filled
    sync_s = _quantile([(step.duration_ns - step.rollout_ns - step.train_ns) / NS_PER_S for step in timed], share)
    return JobPlanConfig(
        rollout_s=max(rollout_s, 1e-3),
        train_s=max(train_s, 1e-3),
        sync_s=max(0.0, sync_s),
        rollout_switch_s=0.0,
        train_switch_s=0.0,
        rollout_cold_s=cold_s,
        rollout_parks=parks,
    )


def _cold_start(journal: JournalReader, config: Config) -> tuple[float, bool]:
    """Return how long the slowest worker took to start, its process included, and whether its engine can park."""
    begun_ns: dict[WorkerId, Nanoseconds] = {}
    longest_ns, device = 0, ""
    for at_ns, event in journal.events_of(LeaseGranted.__name__, WorkerJoined.__name__):
        if isinstance(event, LeaseGranted) and event.lease.startswith("reserved-"):
            begun_ns |= dict.fromkeys(event.workers, at_ns)
        elif isinstance(event, WorkerJoined) and (since_ns := begun_ns.pop(event.worker, None)) is not None:
            longest_ns, device = max(longest_ns, at_ns - since_ns), event.capabilities.device
    kind, settings = resolve_engine(config.engine, "the engine's settings")
    return longest_ns / NS_PER_S, kind.parks(settings, device)


def _to_the_limit(config: Config, lengths: Sequence[int]) -> tuple[float, float]:
    """How much longer rollouts and training would last if every response went on to its limit: a rollout lasts as its
    longest response, training as all of them."""
    limit = min(config.rollout.max_turns * config.rollout.max_tokens_per_turn, config.engine.max_context_tokens)
    longest, mean = max(lengths, default=0), sum(lengths) / len(lengths) if lengths else 0.0
    return max(1.0, limit / longest) if longest else 1.0, max(1.0, limit / mean) if mean else 1.0


def _quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
