"""What the episodes of an evaluation come to: avg@k, pass@k, their standard errors, and differences of pairs. Pure.

Sources: Chen et al., "Evaluating Large Language Models Trained on Code" (the unbiased estimator of pass@k); Abramowitz
and Stegun, "Handbook of Mathematical Functions", 26.7.5 (quantiles of Student's t).
"""

import math
import sys
from collections.abc import Sequence

import msgspec

PASSING = 0.0
"""An episode has passed whose reward is above this."""
LARGE = 1e100
"""Rewards may have any finite size: the squares of larger ones are not added up as they are."""
NORMAL_95 = 1.959963984540054
"""Standard deviations on either side of its mean within which 95 % of a normal distribution is."""
STUDENT_95 = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139)
"""The same of Student's t with 1 to 10 degrees of freedom."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over `tasks` tasks, and its standard error, None where there is but one task."""

    mean: float
    error: float | None
    tasks: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the mean of all such tasks is, in 95 of 100 cases by Student's t; None where it is one task alone."""
        if self.error is None:
            return None
        reach = student_95(self.tasks - 1) * self.error
        return _bounded(self.mean - reach), _bounded(self.mean + reach)


def student_95(degrees: int) -> float:
    """How many standard errors on either side of a mean the true one is within, in 95 of 100 cases. There is at least 1
    degree of freedom."""
    if degrees <= len(STUDENT_95):
        return STUDENT_95[degrees - 1]
    x = NORMAL_95
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / degrees**power for power, term in enumerate(terms, 1))


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The probability that one of k episodes passes, estimated without bias from `samples` of which so many `passed`.

    That is 1 - C(samples - passed, k) / C(samples, k), as a product, which does not overflow. Raises `ValueError`
    where there are fewer than k episodes, or more passed than there are.
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} of {samples} episodes, {passed} of which passed; allowed: k from 1 to {samples}")
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / number for number in range(samples - passed + 1, samples + 1))


def avg_at_k(rewards: Sequence[float]) -> float:
    """The mean reward of a task's episodes. Raises `ValueError` where there is none."""
    if not rewards:
        raise ValueError("avg@k of no episode; allowed: at least one")
    scale = _scale(rewards)
    return scale * _mean([reward / scale for reward in rewards])


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of one value a task, and its standard error over tasks; None where there is no task."""
    if not values:
        return None
    tasks, scale = len(values), _scale(values)
    scaled = [value / scale for value in values]
    mean = _mean(scaled)
    if tasks == 1:
        return Estimate(mean=scale * mean, error=None, tasks=1)
    variance = math.fsum((value - mean) ** 2 for value in scaled) / (tasks - 1)
    return Estimate(mean=scale * mean, error=scale * math.sqrt(variance / tasks), tasks=tasks)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _scale(values: Sequence[float]) -> float:
    """What values are divided by so that neither their sum nor their squares overflow: 1 for ordinary ones."""
    largest = max(map(abs, values))
    return largest if largest > LARGE else 1.0


def metrics(rewards: Sequence[Sequence[float]], samples: int, passes: Sequence[int]) -> dict[str, Estimate]:
    """avg@`samples`, and pass@k for each k of `passes`, of tasks whose finished episodes had these rewards.

    Failed episodes are not among them. A task without any counts in no metric, and one with fewer than k episodes not
    in pass@k. A metric without a task is left out.
    """
    found = {f"avg@{samples}": estimate([avg_at_k(task) for task in rewards if task])}
    for k in passes:
        tasks = [task for task in rewards if len(task) >= k]
        passed = [sum(reward > PASSING for reward in task) for task in tasks]
        found[f"pass@{k}"] = estimate([pass_at_k(len(task), n, k) for task, n in zip(tasks, passed, strict=True)])
    return {name: value for name, value in found.items() if value is not None}


def paired(ones: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Estimate | None:
    """How much higher `ones` are than `others`, task by task, in mean reward; None where no task has episodes of both.
    What is beyond any number is the largest one.

    Both are rewards of finished episodes by task, of the same tasks in the same order. Raises `ValueError` where they
    are of different numbers of tasks.
    """
    pairs = [(one, other) for one, other in zip(ones, others, strict=True) if one and other]
    half = estimate([avg_at_k(one) / 2 - avg_at_k(other) / 2 for one, other in pairs])
    if half is None:
        return None
    error = None if half.error is None else _bounded(2 * half.error)
    return Estimate(mean=_bounded(2 * half.mean), error=error, tasks=half.tasks)


def _bounded(value: float) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, value))
