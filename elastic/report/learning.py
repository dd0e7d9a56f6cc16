"""What a policy's learning looked like, step by step: how sure it was, how far its engines computed from the trainer,
how long its answers were, what they were worth, and how many groups had anything to teach."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

from elastic.runtime.journal import StepRow, TrajectoryRow

SAME = 1e-6
"""Rewards that differ by no more are equal, as they are to the trainer by default (`trainer.advantage_epsilon`)."""


class StepLearning(msgspec.Struct, frozen=True, kw_only=True):
    """A step's figures of learning; None where nothing was measured.

    `entropy` is of a token, in nats; `mismatch_mean` the mean |log-ratio| of engines and trainer with the same weights,
    `mismatch_kl` the KL of all that was trained on, in nats a token. `score` is the mean reward of the trajectories
    launched in the step, 0 being the lowest and 1 the highest that the run has seen in the same environment. Of
    `groups` with rewards to compare, all members of the `solved` ones had the highest, and all members of the
    `unsolved` ones the same lower one.

    `length_correlation` is that of tokens a turn and reward within groups, from -1 to 1.
    """

    step: int
    entropy: float | None = None
    mismatch_mean: float | None = None
    mismatch_kl: float | None = None
    score: float | None = None
    tokens_a_turn: float | None = None
    length_correlation: float | None = None
    groups: int = 0
    solved: int = 0
    unsolved: int = 0


class _Scored(msgspec.Struct, frozen=True):
    group: str
    tokens_a_turn: float
    score: float


def learning_of(steps: Iterable[StepRow], scored: Sequence[TrajectoryRow]) -> list[StepLearning]:
    """Figures of each finished step. `scored` trajectories are those with a finite reward."""
    ranges = _ranges(scored)
    by_step: dict[int, list[_Scored]] = {}
    for row in scored:
        by_step.setdefault(row.step, []).append(
            _Scored(
                row.group, row.policy_tokens / max(1, row.turns), _score(row.reward or 0.0, *ranges[row.environment])
            )
        )
    return [_step(row.step, row.trainer, by_step.get(row.step, [])) for row in steps]


def _ranges(scored: Sequence[TrajectoryRow]) -> dict[str, tuple[float, float]]:
    """The lowest and the highest reward of each environment."""
    rewards: dict[str, list[float]] = {}
    for row in scored:
        rewards.setdefault(row.environment, []).append(row.reward or 0.0)
    return {name: (min(found), max(found)) for name, found in rewards.items()}


def _score(reward: float, low: float, high: float) -> float:
    """Where all rewards are equal, they are success if they are above 0."""
    return (reward - low) / (high - low) if high - low > SAME else float(high > 0)


def _step(step: int, trainer: Mapping[str, float | None], scored: Sequence[_Scored]) -> StepLearning:
    groups: dict[str, list[_Scored]] = {}
    for one in scored:
        groups.setdefault(one.group, []).append(one)
    compared = [members for members in groups.values() if len(members) > 1]
    equal = [fmean(one.score for one in members) for members in compared if _spread(members) <= SAME]
    return StepLearning(
        step=step,
        entropy=trainer.get("entropy"),
        mismatch_mean=trainer.get("mismatch_mean"),
        mismatch_kl=trainer.get("mismatch_kl"),
        score=fmean(one.score for one in scored) if scored else None,
        tokens_a_turn=fmean(one.tokens_a_turn for one in scored) if scored else None,
        length_correlation=_length_correlation(compared),
        groups=len(compared),
        solved=sum(score >= 1 - SAME for score in equal),
        unsolved=sum(score < 1 - SAME for score in equal),
    )


def _spread(members: Sequence[_Scored]) -> float:
    scores = [one.score for one in members]
    return max(scores) - min(scores)


def _length_correlation(groups: Iterable[Sequence[_Scored]]) -> float | None:
    """Pearson's, of what members differ by from their group's means; None where either does not differ."""
    lengths, scores, both = 0.0, 0.0, 0.0
    for members in groups:
        length, score = fmean(one.tokens_a_turn for one in members), fmean(one.score for one in members)
        for one in members:
            far, better = one.tokens_a_turn - length, one.score - score
            lengths, scores, both = lengths + far * far, scores + better * better, both + far * better
    return both / math.sqrt(lengths * scores) if lengths > 0 and scores > 0 else None
