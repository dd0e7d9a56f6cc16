"""Rewards: what counts as a score, and FrozenLake's against the environment itself."""

import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.environments.frozenlake import ACTIONS, VOCABULARY, FrozenLake, FrozenLakeSettings, encode
from functions.base import BadResult
from functions.frozenlake import reward
from functions.rewards import FinishedTrajectory, score
from tests.functions.conftest import TIMEOUT_S, MakePool


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53))
def test_finite_numbers_are_scores(value: float) -> None:
    assert score(value) == value
    assert isinstance(score(value), float)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1.0", None, [1.0], {"reward": 1.0}, "x" * 99])
def test_anything_else_is_no_score(value: Any) -> None:
    with pytest.raises(BadResult, match="a reward must be a finite number; found ") as caught:
        score(value)
    assert len(str(caught.value)) < 120


async def play(settings: FrozenLakeSettings, seed: int) -> FinishedTrajectory:
    """An episode of a random policy that also thinks and babbles."""
    rng, lake = random.Random(seed), FrozenLake(settings)
    token_ids = await lake.reset(seed)
    trained = [0] * len(token_ids)
    environment_reward = 0.0
    for _ in range(12):
        thought = [rng.choice(VOCABULARY[1:]) for _ in range(rng.randint(0, 3))]
        turn = encode("".join(t for t in thought if t not in ACTIONS) + rng.choice(f"{ACTIONS}|"))
        result = await lake.step(turn)
        token_ids += turn + result.token_ids
        trained += [1] * len(turn) + [0] * len(result.token_ids)
        environment_reward = result.reward
        if result.done:
            break
    return FinishedTrajectory(
        trajectory=f"0/{seed}/0",
        token_ids=token_ids,
        trained=trained,
        seed=seed,
        environment_settings=settings.model_dump(mode="json"),
        environment_reward=environment_reward,
        settings={},
    )


@pytest.mark.parametrize("slippery", [False, True])
async def test_frozen_lakes_reward_is_what_the_environment_gave(slippery: bool) -> None:
    settings = FrozenLakeSettings(sizes=(2, 3), hole_probability=0.1, is_slippery=slippery)
    episodes = [await play(settings, seed) for seed in range(60)]
    found = [reward(msgspec.to_builtins(episode)) for episode in episodes]
    assert found == [episode.environment_reward for episode in episodes]
    assert {0.0, 1.0} == set(found)


async def test_a_trajectory_of_another_lake_is_refused() -> None:
    episode = await play(FrozenLakeSettings(), 1)
    with pytest.raises(ValueError, match="does not begin with the lake of seed 2"):
        reward(msgspec.to_builtins(msgspec.structs.replace(episode, seed=2)))


async def test_it_runs_on_a_pool(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool("functions.frozenlake:reward")
    episodes = [await play(FrozenLakeSettings(sizes=(2,)), seed) for seed in range(8)]
    for episode in episodes:
        found = await pool.invoke(episode.trajectory, msgspec.to_builtins(episode), TIMEOUT_S)
        assert score(found) == episode.environment_reward
