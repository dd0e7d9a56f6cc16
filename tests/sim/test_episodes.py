"""Where turn lengths come from: always within the run's limits, a group's members from one prompt."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.simulation.performance.episodes import (
    DrawnEpisodes,
    Episode,
    EpisodeLimits,
    Episodes,
    EpisodeTurn,
    RecordedEpisodes,
)

TURNS = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 300)), min_size=1, max_size=8)
SOURCES = st.lists(TURNS, min_size=1, max_size=5)


def episode(turns: list[tuple[int, int]]) -> Episode:
    return Episode(tuple(EpisodeTurn(observation, tokens, 1.0) for observation, tokens in turns), 1.0)


def within(limits: EpisodeLimits, episodes: Episodes) -> None:
    for member in range(8):
        turns = episodes.episode(f"0/0/{member}").turns
        assert 1 <= len(turns) <= limits.max_turns
        context = 0
        for turn in turns:
            context += turn.observation_tokens
            assert 1 <= turn.tokens <= limits.max_tokens_per_turn
            assert context + limits.max_tokens_per_turn <= limits.max_context_tokens
            context += turn.tokens


@given(SOURCES, st.integers(1, 6), st.integers(1, 200), st.integers(1, 500))
def test_every_source_keeps_to_the_limits(
    sources: list[list[tuple[int, int]]], max_turns: int, max_tokens: int, more: int
) -> None:
    limits = EpisodeLimits(max_turns=max_turns, max_tokens_per_turn=max_tokens, max_context_tokens=max_tokens + more)
    recorded = {f"0/0/{number}": episode(turns) for number, turns in enumerate(sources)}
    within(limits, RecordedEpisodes(recorded, limits))
    within(limits, DrawnEpisodes(1, limits, list(recorded.values())))
    within(limits, DrawnEpisodes(1, limits))


@given(SOURCES)
def test_what_fits_is_taken_as_it_is(sources: list[list[tuple[int, int]]]) -> None:
    limits = EpisodeLimits(max_turns=8, max_tokens_per_turn=300, max_context_tokens=10_000)
    recorded = {f"0/0/{number}": episode(turns) for number, turns in enumerate(sources)}
    episodes = RecordedEpisodes(recorded, limits)
    assert {name: episodes.episode(name) for name in recorded} == recorded
    assert episodes.notes() == []


@given(SOURCES)
def test_members_of_a_group_begin_alike(sources: list[list[tuple[int, int]]]) -> None:
    limits = EpisodeLimits(max_turns=8, max_tokens_per_turn=300, max_context_tokens=10_000)
    episodes = DrawnEpisodes(1, limits, [episode(turns) for turns in sources])
    assert len({episodes.episode(f"0/3/{member}").turns[0].observation_tokens for member in range(8)}) == 1
