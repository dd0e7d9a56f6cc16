"""Rollout loops: what an environment does wrong ends its trajectory as failed, and what it did right stands."""

import asyncio
from typing import Any

import pytest

from elastic.core import events as e
from elastic.envs.base import StepResult
from elastic.runtime.rollout import Episode, RolloutLimits, Rollouts

LIMITS = RolloutLimits(max_turns=4, max_tokens_per_turn=8, max_context_tokens=64, environment_timeout_s=5.0)


class OneTurn:
    """An environment whose one turn earns `reward`, and which closes as `aclose` has it."""

    def __init__(self, reward: Any, closing: BaseException | None = None) -> None:
        self._reward = reward
        self._closing = closing

    async def reset(self, seed: int) -> list[int]:
        return [1, 2]

    async def step(self, token_ids: list[int]) -> StepResult:
        return StepResult([], True, reward=self._reward)

    async def aclose(self) -> None:
        if self._closing is not None:
            raise self._closing


async def play(environment: OneTurn) -> tuple[list[e.Event], list[tuple[str, str]]]:
    """What the core is told of one trajectory, and how it ended."""
    heard: list[e.Event] = []
    ended: list[tuple[str, str]] = []

    def feed(event: e.Event) -> None:
        heard.append(event)
        if isinstance(event, e.TurnRequested):
            asyncio.get_running_loop().call_soon(rollouts.finish_turn, event.turn)

    def on_end(episode: Episode, cause: str) -> None:
        ended.append((episode.trajectory, cause))

    def make_environment() -> Any:
        return environment

    rollouts = Rollouts(1, LIMITS, make_environment, feed, lambda: 0, on_end)
    async with asyncio.TaskGroup() as tasks:
        rollouts.start("0/0/0", tasks)
    return [event for event in heard if not isinstance(event, e.TurnRequested)], ended


@pytest.mark.parametrize("reward", [1, 0.5, -2.0])
async def test_a_finite_reward_is_the_trajectorys(reward: float) -> None:
    heard, ended = await play(OneTurn(reward))
    assert heard == [e.TrajectoryFinished(trajectory="0/0/0", reward=float(reward), tokens=0)]
    assert ended == [("0/0/0", "")]


@pytest.mark.parametrize("reward", ["1", None, float("nan"), float("inf"), True, [1.0]])
async def test_what_is_no_finite_number_is_never_a_score(reward: Any) -> None:
    heard, ended = await play(OneTurn(reward))
    (failed,) = heard
    assert isinstance(failed, e.TrajectoryFailed)
    assert failed.cause.startswith("a reward must be a finite number; found ")
    assert ended == [("0/0/0", failed.cause)]


async def test_an_episode_that_is_over_survives_an_environment_that_does_not_close() -> None:
    heard, _ = await play(OneTurn(1.0, closing=RuntimeError("still locked")))
    assert heard == [e.TrajectoryFinished(trajectory="0/0/0", reward=1.0, tokens=0)]
