import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elastic.environments.frozenlake import ACTIONS, VOCABULARY, FrozenLake, FrozenLakeSettings, Lake, decode, encode
from elastic.environments.frozenlake_demonstrations import DemonstrationSettings, demonstrate, shortest_ways
from elastic.testing.episode_conformance import *  # noqa: F403
from elastic.testing.episodes import EpisodesUnderTest

seeds = st.integers(0, 2**63 - 1)
settings = st.builds(
    FrozenLakeSettings,
    sizes=st.lists(st.integers(2, 7), min_size=1, max_size=3).map(tuple),
    hole_probability=st.floats(0, 0.4),
    is_slippery=st.booleans(),
)
turns = st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=16)


@pytest.fixture
def episodes_under_test() -> EpisodesUnderTest:
    lake = FrozenLakeSettings(sizes=(4, 5))
    way = shortest_ways(Lake(lake, 3).board)[0, 0]
    return EpisodesUnderTest("frozenlake", lake.model_dump(), 3, [encode(action) for action in way])


def play(environment: FrozenLake, seed: int, actions: list[list[int]]) -> list[object]:
    async def episode() -> list[object]:
        history: list[object] = [await environment.reset(seed)]
        for action in actions:
            history.append(result := await environment.step(action))
            if result.done:
                break
        return history

    return asyncio.run(episode())


def walk(text: str, seed: int = 0) -> list[object]:
    return play(FrozenLake(FrozenLakeSettings()), seed, [encode(move) for move in text])


def test_vocabulary_has_32_distinct_single_characters():
    assert len(set(VOCABULARY)) == 32
    assert all(len(token) == 1 for token in VOCABULARY)
    assert decode(FrozenLake.stop_token_ids) == ACTIONS


@given(st.text(alphabet=VOCABULARY))
def test_text_survives_the_vocabulary(text: str):
    assert decode(encode(text)) == text


@given(settings, seeds, st.lists(turns, max_size=20))
def test_same_seed_and_actions_give_the_same_episode(lake: FrozenLakeSettings, seed: int, actions: list[list[int]]):
    environment = FrozenLake(lake)
    assert play(environment, seed, actions) == play(FrozenLake(lake), seed, actions)
    assert play(environment, seed, actions) == play(environment, seed, actions)


@given(settings, seeds)
def test_prompt_shows_a_solvable_map_of_an_allowed_size(lake: FrozenLakeSettings, seed: int):
    (prompt,) = play(FrozenLake(lake), seed, [])
    text = decode(prompt)  # type: ignore[arg-type]
    assert text[0] == "^"
    assert text[-4:] == "@00:"
    board = text[1:-4].split("/")
    assert len(board) in lake.sizes
    assert all(len(row) == len(board) for row in board)
    assert (board[0][0], board[-1][-1]) == ("S", "G")
    assert (0, 0) in shortest_ways(board)


@given(seeds, st.floats(0, 0.4))
def test_shortest_way_reaches_the_goal_and_is_rewarded(seed: int, holes: float):
    lake = FrozenLakeSettings(sizes=(4, 6), hole_probability=holes)
    way = shortest_ways(Lake(lake, seed).board)[0, 0]
    history = play(FrozenLake(lake), seed, [encode(action) for action in way])
    assert len(history) == 1 + len(way)
    assert history[-1].done  # type: ignore[attr-defined]
    assert history[-1].reward == 1.0  # type: ignore[attr-defined]


def test_a_hole_ends_the_episode_without_reward():
    seed = next(seed for seed in range(100) if Lake(FrozenLakeSettings(), seed).board[0][1] == "H")
    _, result = walk("R", seed)
    assert (result.token_ids, result.done, result.reward) == ([], True, 0.0)  # type: ignore[attr-defined]


def test_a_wall_leaves_the_agent_where_it_stands():
    _, result = walk("U")
    assert decode(result.token_ids) == "@00:"  # type: ignore[attr-defined]
    assert not result.done  # type: ignore[attr-defined]


@pytest.mark.parametrize("turn", ["", "ddr|dr", "Rr", "L:", "_"])
def test_a_turn_that_does_not_end_in_a_move_changes_nothing(turn: str):
    _, result = play(FrozenLake(FrozenLakeSettings()), 0, [encode(turn)])
    assert decode(result.token_ids) == "!00:"  # type: ignore[attr-defined]
    assert not result.done  # type: ignore[attr-defined]


def test_what_precedes_the_move_does_not_matter():
    assert walk("D") == play(FrozenLake(FrozenLakeSettings()), 0, [encode("rr|LUD")])


async def test_step_without_an_episode_is_an_error():
    environment = FrozenLake(FrozenLakeSettings())
    with pytest.raises(RuntimeError, match="reset first"):
        await environment.step(encode("L"))
    await environment.reset(0)
    await environment.aclose()
    with pytest.raises(RuntimeError, match="reset first"):
        await environment.step(encode("L"))


@pytest.mark.parametrize(
    "bad", [{"sizes": []}, {"sizes": [4, 11]}, {"sizes": [1]}, {"hole_probability": 0.9}, {"x": 1}]
)
def test_settings_refuse_what_cannot_be_drawn(bad: dict[str, object]):
    with pytest.raises(ValidationError):
        FrozenLakeSettings.model_validate(bad)


@given(settings, seeds, seeds)
def test_demonstrations_are_true_episodes_within_their_limits(lake: FrozenLakeSettings, seed: int, noise: int):
    limits = DemonstrationSettings(turns_max=6, turn_tokens_max=12)
    demonstration = demonstrate(lake, limits, seed, random.Random(noise))
    assert demonstration == demonstrate(lake, limits, seed, random.Random(noise))
    segments = split(*demonstration)
    spoken, heard = segments[1::2], segments[2::2]
    history = play(FrozenLake(lake), seed, spoken)
    assert history[0] == segments[0]
    assert [answer.token_ids for answer in history[1:] if answer.token_ids] == heard  # type: ignore[attr-defined]
    assert len(spoken) <= limits.turns_max
    for turn in spoken:
        assert len(turn) <= limits.turn_tokens_max
        *thought, action = decode(turn)
        assert action in ACTIONS
        last_plan = "".join(thought).rpartition("|")[2]
        assert last_plan == "" or last_plan[0] == action.lower()


def split(token_ids: list[int], trained: list[int]) -> list[list[int]]:
    """Runs of one speaker: prompt, turn, observation, turn, …"""
    segments: list[list[int]] = []
    speaker = None
    for token_id, mine in zip(token_ids, trained, strict=True):
        if mine != speaker:
            segments.append([])
            speaker = mine
        segments[-1].append(token_id)
    return segments
