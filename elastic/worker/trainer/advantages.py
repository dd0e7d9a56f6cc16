"""What a trajectory is worth beside those of its group: rewards as advantages. Pure; keys have verl's names.

- Relative to the group, with ε beside the standard deviation: DeepSeekMath (arXiv 2402.03300), §4.1; `adv_estimator =
  "grpo"`, `advantage_epsilon`. Without the division, which favours groups whose rewards hardly differ: Dr. GRPO
  (arXiv 2503.20783), §3.1; `norm_adv_by_std_in_grpo = false`.
- Relative to the others of the group, which is unbiased: RLOO (arXiv 2402.14740), §3.2; `adv_estimator = "rloo"`.
- A penalty that grows with the tokens beyond a length: DAPO (arXiv 2503.14476), §3.4; `overlong_buffer`.
"""

import statistics
from collections.abc import Sequence

from elastic.config import LossConfig, OverlongBufferConfig


def group_advantages(rewards: Sequence[float], settings: LossConfig) -> list[float]:
    """Rewards relative to their group.

    All zero where rewards differ by no more than `advantage_epsilon`: that is rounding, and no signal.
    Raises `OverflowError` where rewards lie too far apart for floats.
    """
    if max(rewards) - min(rewards) <= settings.advantage_epsilon:
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    apart = [reward - mean for reward in rewards]
    if settings.adv_estimator == "rloo":
        # Relative to the mean of the others, which is that much farther away.
        return [one * len(rewards) / (len(rewards) - 1) for one in apart]
    if not settings.norm_adv_by_std_in_grpo:
        return apart
    deviation = statistics.stdev(rewards) + settings.advantage_epsilon
    return [one / deviation for one in apart]


def overlong_penalty(tokens: int, buffer: OverlongBufferConfig) -> float:
    """What is added to the reward of a trajectory in which the policy sampled so many tokens: 0 before the buffer
    begins, and at its end minus `penalty_factor`."""
    beyond = tokens - (buffer.max_resp_len - buffer.len)
    return -max(0, beyond) / buffer.len * buffer.penalty_factor
