"""A run beside another of the same seed, as a rule the measured one on reserved capacity only."""

import msgspec

from elastic.report.summary import Summary


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Ratios are this run's figure over the `other` one's; None where either measured nothing."""

    other: str
    same_seed: bool
    other_usd: float
    other_wall_s: float
    other_tokens_per_s: float
    other_usd_per_million_trained_tokens: float | None
    throughput_ratio: float | None
    step_time_ratio: float | None
    cost_ratio: float | None
    """The ratio of the costs of a million trained tokens."""


def compare(summary: Summary, other: Summary) -> Comparison:
    return Comparison(
        other=other.run,
        same_seed=summary.seed == other.seed,
        other_usd=other.usd,
        other_wall_s=other.wall_s,
        other_tokens_per_s=other.total.tokens_per_s,
        other_usd_per_million_trained_tokens=other.usd_per_million_trained_tokens,
        throughput_ratio=_ratio(summary.total.tokens_per_s, other.total.tokens_per_s),
        step_time_ratio=_ratio(_step_s(summary), _step_s(other)),
        cost_ratio=_ratio(summary.usd_per_million_trained_tokens, other.usd_per_million_trained_tokens),
    )


def _step_s(summary: Summary) -> float | None:
    """Mean duration of a step."""
    return sum(step.duration_s for step in summary.steps) / len(summary.steps) if summary.steps else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None
