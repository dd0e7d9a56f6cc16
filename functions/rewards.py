"""The contract of a reward: a stateless function of a finished trajectory. Source: docs/design.md, `Reward`.

A reward is installed under the entry point group `elastic.rewards`. It is called with a `FinishedTrajectory` as a
mapping and returns a finite number; anything else it may return is no score.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from elastic.system.plain_values import number, shown
from functions.base import BadResult

ENTRY_POINTS = "elastic.rewards"


class FinishedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward is a function of.

    `trained[i]` says whether the policy sampled `token_ids[i]`. `seed` and `environment_settings` are those that
    the episode began with, `environment_reward` is what the environment gave; `settings` are the reward's own.
    `truncated`: a limit of turns or tokens ended the episode, not its environment (gymnasium's word).
    """

    trajectory: str
    token_ids: list[int]
    trained: list[int]
    seed: int
    environment_settings: dict[str, Any]
    environment_reward: float
    settings: dict[str, Any]
    truncated: bool = False


class Reward(Protocol):
    def __call__(self, trajectory: Mapping[str, Any]) -> float: ...


def finished_trajectory(trajectory: Mapping[str, Any]) -> FinishedTrajectory:
    """The typed form, for a reward's first line. Raises `msgspec.ValidationError`."""
    return msgspec.convert(trajectory, FinishedTrajectory)


def score(result: Any) -> float:
    """A reward's result as a score. Raises `BadResult` for what is not a finite number."""
    found = number(result)
    if found is None:
        raise BadResult(f"a reward must be a finite number; found {shown(result)}")
    return found
