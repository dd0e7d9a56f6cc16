"""The table of legal transitions is whole, and what it forbids is refused with the thing's story."""

from enum import StrEnum

import pytest

from elastic.core.transitions import LEGAL, STORY_LENGTH, IllegalTransition, Story, take_transition
from elastic.core.types import GroupState, LeaseState, ScoringState, TurnState, WorkerState

KINDS = (LeaseState, WorkerState, TurnState, GroupState, ScoringState)


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_is_covered_and_can_be_reached(kind: type[StrEnum]) -> None:
    assert set(LEGAL[kind]) == set(kind)
    first = next(iter(kind))
    reached, edge = {first}, [first]
    while edge:
        following = LEGAL[kind][edge.pop()]
        assert all(type(state) is kind for state in following)
        edge += following - reached
        reached |= following
    assert reached == set(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_life_can_end(kind: type[StrEnum]) -> None:
    ends = {state for state in kind if not LEGAL[kind][state]}
    assert ends
    for state in kind:
        seen, edge = {state}, [state]
        while edge:
            edge += LEGAL[kind][edge.pop()] - seen
            seen |= set(edge)
        assert seen & ends


def test_table_is_of_exactly_these_kinds() -> None:
    assert set(LEGAL) == set(KINDS)


def test_illegal_transition_tells_the_story() -> None:
    story = Story()
    take_transition("turn 7", TurnState.QUEUED, TurnState.RUNNING, story, 1_500_000_000, "worker 3", "token 0")
    with pytest.raises(IllegalTransition) as caught:
        take_transition("turn 7", TurnState.FINISHED, TurnState.RUNNING, story, 2_000_000_000, "a bug")
    assert "turn 7: finished → running" in str(caught.value)
    assert "1.500 s: queued → running at token 0 (worker 3)" in str(caught.value)
    assert len(story.chapters) == 1


def test_states_of_different_kinds_with_one_name_do_not_mix() -> None:
    assert TurnState.RUNNING == GroupState.RUNNING
    assert LEGAL[TurnState][TurnState.RUNNING] != LEGAL[GroupState][GroupState.RUNNING]


def test_story_keeps_the_last_chapters() -> None:
    story = Story()
    for n in range(STORY_LENGTH + 5):
        story.tell(n, TurnState.QUEUED, TurnState.RUNNING, "")
    assert [chapter[0] for chapter in story.chapters] == list(range(5, STORY_LENGTH + 5))
