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
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.front.tiny import write_tokenizer
from functions.base import BadResult
from functions.frozenlake import reward
from functions.rewards import FinishedBranch, FinishedTrajectory, finished_trajectory, score
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


def test_messages_are_what_the_tokens_of_the_policy_and_of_others_say(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    spoken = [("user", "<|im_start|>2+2=<|im_end|>"), ("assistant", "four"), ("user", "Sure?"), ("assistant", "Yes")]
    ids = [tokenizer.encode(text, special=True) for _, text in spoken]
    trained = [int(role == "assistant") for (role, _), of in zip(spoken, ids, strict=True) for _ in of]
    finished = FinishedTrajectory(
        trajectory="0/0/0",
        token_ids=[token for of in ids for token in of],
        trained=trained,
        seed=0,
        environment_settings={},
        environment_reward=0.0,
        settings={},
        task={"id": 3},
        branches=[FinishedBranch(token_ids=ids[0], trained=[0] * len(ids[0]), policy="critic")],
        checkpoint=str(tmp_path),
    )
    told = finished_trajectory(msgspec.to_builtins(finished))
    assert told == finished
    assert [(one["role"], one["content"]) for one in told.messages] == spoken
    elsewhere = msgspec.structs.replace(finished, checkpoint=str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="tokens would become messages"):
        _ = elsewhere.messages
