"""A reward: what the environment gave, less a little for each token that the policy sampled."""

from collections.abc import Mapping
from typing import Any

from functions.rewards import finished_trajectory

PER_TOKEN = 0.001


def few_tokens(trajectory: Mapping[str, Any]) -> float:
    """`rewards.settings` may have `per_token`, and `elastic run` passes the rest."""
    finished = finished_trajectory(trajectory)
    per_token = float(finished.settings.get("per_token", PER_TOKEN))
    return finished.environment_reward - per_token * sum(finished.trained)
