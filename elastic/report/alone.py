"""What a run on several providers would have cost on each of them alone.

An estimate from what was measured, under one assumption: all tokens that came from providers come from this one, at
the price that its GPU time was billed at, as fast, and with the same share of overhead. The trainer, with the tokens of
its seeding, and the functions stay as they were. Whether the provider would have had so many GPUs is not asked.
"""

from collections.abc import Mapping

import msgspec

from elastic.report.usage import Usage


class AloneCost(msgspec.Struct, frozen=True, kw_only=True):
    """`usd_per_gpu_hour` and `overhead_share` are the provider's in the run; None where it had no GPU time.

    `tokens_per_gpu_s` is over its time outside of overhead, idle time included. `gpu_s` is what all tokens would have
    taken, `gpus` how many GPUs that is all along a run that lasts as long, `usd` the whole run's bill; None where no
    token came from the provider.
    """

    provider: str
    usd_per_gpu_hour: float | None
    tokens_per_gpu_s: float | None
    overhead_share: float | None
    gpu_s: float | None
    gpus: float | None
    usd: float | None


def alone_costs(rollouts: Mapping[str, Usage], other_usd: float, wall_s: float) -> list[AloneCost]:
    """Return what the run would have cost on each provider of rollouts alone; empty unless tokens came from two at
    least. `other_usd` is the cost of the trainer and the functions."""
    if sum(usage.tokens > 0 for usage in rollouts.values()) < 2:
        return []
    tokens = sum(usage.tokens for usage in rollouts.values())
    return [_alone(name, usage, tokens, other_usd, wall_s) for name, usage in rollouts.items()]


def _alone(name: str, usage: Usage, tokens: int, other_usd: float, wall_s: float) -> AloneCost:
    price = usage.usd_per_gpu_hour
    working_s = usage.gpu_s * (1 - usage.overhead_share)
    gpu_s = tokens * usage.gpu_s / usage.tokens if usage.tokens and usage.gpu_s else None
    return AloneCost(
        provider=name,
        usd_per_gpu_hour=price,
        tokens_per_gpu_s=usage.tokens / working_s if usage.tokens and working_s > 0 else None,
        overhead_share=usage.overhead_share if usage.gpu_s else None,
        gpu_s=gpu_s,
        gpus=gpu_s / wall_s if gpu_s is not None and wall_s else None,
        usd=None if gpu_s is None or price is None else other_usd + gpu_s * price / 3600,
    )
