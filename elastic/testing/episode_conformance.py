"""What every environment in token ids must do (`elastic.environments.base.Environment`), as tests of pytest.

A third party's environment, once its entry point is installed, passes the suite from one file, with
`asyncio_mode = "auto"` of pytest-asyncio:

    from elastic.testing.episode_conformance import *
    from elastic.testing.episodes import EpisodesUnderTest

    @pytest.fixture(params=[EpisodesUnderTest("mine", {"size": 4})], ids=str)
    def episodes_under_test(request):
        return request.param
"""

# pyright: basic

import asyncio

import pytest

from elastic.environments.hosting import EpisodeHost, facts
from elastic.protocol import front_messages as m
from elastic.protocol.sampled import ids_of, pack_ids
from elastic.testing import episodes

SEEDS = range(20)
TURNS = 8
LIMIT_S = 30.0


def test_it_says_what_a_run_must_know(episodes_under_test):
    kind = episodes_under_test.loaded
    ends = facts(kind).stop_token_ids
    assert ends, "no token ends a turn of the policy before it is as long as it may be"
    assert max(ends) < len(kind.vocabulary) == len(set(kind.vocabulary))


async def test_any_turns_are_answered_and_the_same_ones_in_the_same_way(episodes_under_test):
    """By an environment that has played before, too: an episode goes on with another process."""
    used = episodes_under_test.make()
    for seed in SEEDS:
        turns = episodes_under_test.turns(seed, TURNS)
        first = await episodes.play(episodes_under_test, episodes_under_test.make(), seed, turns)
        assert await episodes.play(episodes_under_test, used, seed, turns) == first, f"seed {seed}"
    await used.aclose()


async def test_episodes_at_once_do_not_see_each_other(episodes_under_test):
    turns = episodes_under_test.turns(1, TURNS)
    together = await asyncio.gather(
        *(episodes.play(episodes_under_test, episodes_under_test.make(), seed, turns) for seed in SEEDS)
    )
    for seed, one in zip(SEEDS, together, strict=True):
        assert await episodes.play(episodes_under_test, episodes_under_test.make(), seed, turns) == one, f"seed {seed}"


async def test_turns_that_end_an_episode_bring_its_reward(episodes_under_test):
    if not episodes_under_test.won:
        pytest.skip("nothing is said of turns that end an episode")
    environment = episodes_under_test.make()
    *before, last = await episodes.play(
        episodes_under_test, environment, episodes_under_test.seed, episodes_under_test.won
    )
    assert (last.done, last.reward) == (True, episodes_under_test.reward)
    assert len(before) == len(episodes_under_test.won)


async def test_an_env_worker_plays_it(episodes_under_test):
    """Order by order, as a run gives them; what it answers is what it answers here."""
    answers = asyncio.Queue()
    host = EpisodeHost(episodes_under_test.make, LIMIT_S, answers.put_nowait)
    words = len(episodes_under_test.loaded.vocabulary)
    turns = episodes_under_test.turns(2, TURNS)
    prompt, *rest = await episodes.play(episodes_under_test, episodes_under_test.make(), 2, turns)

    async def answer(order):
        host.hear(order)
        async with asyncio.timeout(LIMIT_S):
            return await answers.get()

    assert ids_of((await answer(m.ResetEpisode(0, 2, words))).token_ids) == prompt
    for turn, said in zip(turns, rest, strict=False):
        heard = await answer(m.StepEpisode(0, pack_ids(turn)))
        if isinstance(said, float):
            break
        assert (ids_of(heard.token_ids), heard.done, heard.reward) == (said.token_ids, said.done, said.reward)
    host.hear(m.CloseEpisode(0))


def test_settings_are_checked(episodes_under_test):
    settings = episodes_under_test.loaded.Settings
    assert settings.model_validate(episodes_under_test.settings).model_dump(mode="json") is not None
    with pytest.raises(ValueError, match="no_such_key"):
        settings.model_validate({**episodes_under_test.settings, "no_such_key": 1})
