"""What a run needs of quotas and budgets: GPUs by provider, and the money to make progress. Pure."""

import msgspec

from elastic.compose.plan import RunPlan, acquisitions, kind_of, longest_increment_s, reward_calls, rollout_gpus
from elastic.core.ledger import NANO_USD_PER_USD

SLICE_S = 900.0
"""How long a slice of a project's budget lasts at the least, with all that the run may hold."""


class ProviderNeeds(msgspec.Struct, frozen=True):
    """The needs of one provider section: the provider's kind, the most GPUs that it may hold, the GPUs of a lease, and
    whether the most that it costs is known."""

    kind: str
    gpus: int
    unit: int
    priced: bool = True


class RunNeeds(msgspec.Struct, frozen=True):
    """A run's trainer's GPUs, those of a worker if a pool's nodes generate, its other providers by the names of their
    sections, and one slice of its budget."""

    trainer_gpus: int = 1
    rollout_gpus: int = 1
    slice_nano_usd: int = 0
    providers: dict[str, ProviderNeeds] = {}


def needs_of(plan: RunPlan) -> RunNeeds:
    """A slice lasts long enough to begin whatever increments are billed, and to stop."""
    config = plan.config
    stopping_s = config.scheduler.drain_timeout_s + config.scheduler.release_timeout_s
    slice_s = max(SLICE_S, 2 * (longest_increment_s(plan) + stopping_s))
    acquired = {row.provider: row for row in acquisitions(plan)}
    usd = sum(row.usd_per_hour_max or 0.0 for row in acquired.values()) * slice_s / 3600
    if (calls := reward_calls(plan)) is not None:
        usd += calls.concurrency * (calls.usd_per_call + calls.usd_per_s * slice_s)
    return RunNeeds(
        trainer_gpus=config.trainer.gpus,
        rollout_gpus=rollout_gpus(config),
        slice_nano_usd=round(usd * NANO_USD_PER_USD),
        providers={
            name: ProviderNeeds(
                kind_of(config.providers, name),
                settings.max_workers * settings.gpus_per_worker,
                settings.gpus_per_worker,
                acquired[name].usd_per_hour_max is not None,
            )
            for name, settings in plan.providers.items()
        },
    )
