"""Rollout loops: what an environment does wrong ends its trajectory as failed, and what it did right stands."""

import asyncio
from typing import Any

import msgspec
import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import SamplingParameters
from elastic.envs.base import StepResult
from elastic.runtime.journal import TrajectoryRow
from elastic.runtime.rollout import RolloutLimits, Rollouts, RolloutTrajectory

LIMITS = RolloutLimits(
    max_turns=4,
    max_context_tokens=64,
    environment_timeout_s=5.0,
    sampling=SamplingParameters(max_new_tokens=8, noise_seed=0),
)


class OneTurn:
    """An environment whose one turn earns `reward`, and which closes as `aclose` has it."""

    def __init__(self, reward: Any, closing: BaseException | None = None) -> None:
        self._reward = reward
        self._closing = closing

    async def reset(self, seed: int) -> list[int]:
        return [1, 2]

    async def step(self, token_ids: list[int]) -> StepResult:
        return StepResult([], True, reward=self._reward)

    async def truncate(self) -> float:
        raise AssertionError("it was done")

    async def aclose(self) -> None:
        if self._closing is not None:
            raise self._closing


class Endless(OneTurn):
    """Never done; every turn earns `reward` once more."""

    def __init__(self, reward: Any, prompt_tokens: int = 2, observation_tokens: int = 1) -> None:
        super().__init__(reward)
        self._prompt_tokens, self._observation_tokens = prompt_tokens, observation_tokens
        self._turns = 0

    async def reset(self, seed: int) -> list[int]:
        return [1] * self._prompt_tokens

    async def step(self, token_ids: list[int]) -> StepResult:
        self._turns += 1
        return StepResult([3] * self._observation_tokens, False, reward=99.0)

    async def truncate(self) -> float:
        return self._reward * self._turns


def written(episode: RolloutTrajectory) -> TrajectoryRow:
    """As a journal has it."""
    return TrajectoryRow(
        trajectory=episode.trajectory,
        step=0,
        group="0/0",
        started_ns=episode.started_ns,
        ended_ns=0,
        reward=episode.reward,
        cause="",
        turns=episode.turns,
        policy_tokens=episode.policy_tokens,
        token_ids=msgspec.msgpack.encode(episode.token_ids),
        truncated=episode.truncated,
        sampled=msgspec.msgpack.encode(episode.sampled),
    )


async def play(environment: OneTurn) -> tuple[list[e.Event], list[RolloutTrajectory]]:
    """What the core is told of one trajectory, and the episodes that came with the events that end one."""
    return (await played(environment))[1:]


async def played(environment: OneTurn) -> tuple[Rollouts, list[e.Event], list[RolloutTrajectory]]:
    heard: list[e.Event] = []
    ended: list[RolloutTrajectory] = []

    def feed(event: e.Event, payload: Any = None) -> None:
        if isinstance(event, e.TurnRequested):
            asyncio.get_running_loop().call_soon(rollouts.finish_turn, event.turn)
        else:
            heard.append(event)
            ended.append(payload)

    def make_environment() -> Any:
        return environment

    async with asyncio.TaskGroup() as tasks:
        rollouts = Rollouts(
            1,
            LIMITS,
            make_environment,
            feed,
            lambda: 0,
            lambda work, name: tasks.create_task(work, name=name),
            stored=lambda name: written(next(episode for episode in ended if episode.trajectory == name)),
        )
        rollouts.start(c.StartGroup(step=0, group="0/0", index=0, trajectories=("0/0/0",)))
    return rollouts, heard, ended


@pytest.mark.parametrize("reward", [1, 0.5, -2.0])
async def test_a_finite_reward_is_the_trajectorys(reward: float) -> None:
    heard, ended = await play(OneTurn(reward))
    assert heard == [e.TrajectoryFinished(trajectory="0/0/0", reward=float(reward), tokens=0)]
    assert [episode.trajectory for episode in ended] == ["0/0/0"]


async def test_an_order_that_is_given_again_gets_the_same_episodes() -> None:
    """Its trainer may have gone away with the first."""
    rollouts, _, _ = await played(OneTurn(0.5))
    (first,), (again,) = rollouts.take(["0/0/0"]), rollouts.take(["0/0/0"])
    assert again is not first
    assert again.data() == first.data()


@pytest.mark.parametrize("reward", ["1", None, float("nan"), float("inf"), True, [1.0]])
async def test_what_is_no_finite_number_is_never_a_score(reward: Any) -> None:
    heard, ended = await play(OneTurn(reward))
    (failed,) = heard
    assert isinstance(failed, e.TrajectoryFailed)
    assert failed.cause.startswith("a reward must be a finite number; found ")
    assert [episode.trajectory for episode in ended] == ["0/0/0"]


@pytest.mark.parametrize(("observation_tokens", "turns"), [(1, LIMITS.max_turns), (20, 3)])
async def test_a_truncated_episode_is_worth_what_its_environment_says(observation_tokens: int, turns: int) -> None:
    """By the limit of turns, and by that of tokens."""
    heard, ended = await play(Endless(0.5, observation_tokens=observation_tokens))
    assert heard == [e.TrajectoryFinished(trajectory="0/0/0", reward=0.5 * turns, tokens=0)]
    assert [(episode.turns, episode.truncated) for episode in ended] == [(turns, True)]


async def test_an_episode_that_is_done_is_not_truncated() -> None:
    _, ended = await play(OneTurn(1.0))
    assert [episode.truncated for episode in ended] == [False]


@pytest.mark.parametrize("reward", ["1", float("nan")])
async def test_a_truncated_episode_without_a_finite_reward_fails(reward: Any) -> None:
    (failed,), _ = await play(Endless(reward))
    assert isinstance(failed, e.TrajectoryFailed)
    assert failed.cause.startswith("a reward must be a finite number; found ")


async def test_a_prompt_without_room_for_a_turn_is_a_failure() -> None:
    heard, _ = await play(Endless(1.0, prompt_tokens=57))
    (failed,) = heard
    assert isinstance(failed, e.TrajectoryFailed)
    assert failed.cause == "the prompt leaves no room for a turn of 8 tokens in a context of 64"


async def test_an_episode_that_is_over_survives_an_environment_that_does_not_close() -> None:
    heard, _ = await play(OneTurn(1.0, closing=RuntimeError("still locked")))
    assert heard == [e.TrajectoryFinished(trajectory="0/0/0", reward=1.0, tokens=0)]
