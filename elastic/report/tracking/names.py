"""What figures are called in loggers: the one table.

Where verl, prime-rl or TRL have a name for a figure, it is theirs, in this order; other names begin with `elastic/`. A
trainer's own figure that is not in the table is `trainer/NAME`.
"""

from collections.abc import Mapping

NAMES: Mapping[str, str] = {
    # Rewards, of trajectories that were scored: a failure is no reward of 0.
    "reward_mean": "critic/rewards/mean",
    "reward_max": "critic/rewards/max",
    "reward_min": "critic/rewards/min",
    "reward_std": "reward_std",
    "same_rewards_share": "frac_reward_zero_std",
    "success_rate": "elastic/success_rate",
    # Lengths.
    "tokens_mean": "response_length/mean",
    "tokens_max": "response_length/max",
    "tokens_min": "response_length/min",
    "turns_mean": "num_turns/mean",
    "turns_max": "num_turns/max",
    "turns_min": "num_turns/min",
    "truncated_share": "is_truncated/mean",
    "failed_share": "has_error/mean",
    # Learning.
    "loss": "actor/pg_loss",
    "gradient_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "clip_fraction": "actor/pg_clipfrac",
    "learning_rate": "actor/lr",
    "ratio_mean": "sampling/importance_sampling_ratio/mean",
    "ratio_max": "sampling/importance_sampling_ratio/max",
    "mismatch_mean": "sampling/sampling_logp_difference/mean",
    "truncated_fraction": "elastic/importance_truncated_share",
    "tokens": "batch/trained_tokens_per_step",
    # Staleness.
    "staleness_mean": "off_policy/mean",
    "staleness_max": "off_policy/max",
    "groups_stale": "off_policy/dropped",
    "dropped_tokens_mean": "elastic/dropped_response_length/mean",
    # Time.
    "step_s": "time/step",
    "train_wait_s": "time/wait_for_batch",
    "rollout_s": "timing_s/gen",
    "train_s": "timing_s/update_actor",
    "seeding_s": "elastic/seeding_s",
    "trainer_idle_share": "fully_async/trainer/idle_ratio",
    "trained_tokens_per_s": "perf/throughput",
    "rollout_tokens_per_s": "elastic/rollout_tokens_per_s",
    # What it took.
    "groups_trained": "elastic/groups_trained",
    "groups_dropped": "elastic/groups_dropped",
    "workers_mean": "elastic/workers_mean",
    "gpus": "elastic/gpus",
    "usd": "elastic/usd",
    "preemptions": "elastic/preemptions",
    "weights_changed_share": "elastic/weights_changed_share",
}


def named(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures of a step under the names that loggers show."""
    return {NAMES.get(figure, f"trainer/{figure}"): value for figure, value in figures.items()}


def of_environment(metric: str) -> str:
    """The name of what an environment measures besides rewards; TRL's, where it is what one of several functions says
    of the reward."""
    return f"{metric}/mean" if metric.startswith("rewards/") else f"metrics/{metric}/mean"


def in_environment(name: str, environment: str) -> str:
    """The name of a figure of one environment, where a run has several."""
    return f"{name}/{environment}"


def of_evaluation(metric: str, environment: str = "") -> str:
    """The name of what evaluations come to in an environment, or in all of several together."""
    return f"eval/{environment}/{metric}" if environment else f"eval/{metric}"


def of_provider(provider: str, figure: str) -> str:
    """The name of a figure of one provider."""
    return f"elastic/{figure}/{provider}"
