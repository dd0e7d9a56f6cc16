"""The queue of turns: oldest request first, whatever has happened since."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.transitions import IllegalTransition
from elastic.core.turns import Turns
from elastic.core.types import TurnState


def request(turns: Turns, turn: str, trajectory: str = "a") -> bool:
    return turns.request(turn, trajectory, 1, 10, 0) is not None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=80))
def test_head_is_the_oldest_queued_request(actions: list[tuple[int, int]]) -> None:
    turns, asked = Turns(), list[str]()
    for action, n in actions:
        name = f"t{n}"
        turn = turns.live.get(name)
        if action == 0:
            assert request(turns, name) is (name not in asked)
            asked += [name] if name not in asked else []
        elif turn is not None and turn.state is TurnState.QUEUED and action == 1:
            turns.move(turn, TurnState.RUNNING, 0, "test")
        elif turn is not None and turn.state is TurnState.RUNNING:
            turns.move(turn, TurnState.QUEUED if action == 2 else TurnState.FINISHED, 0, "test")
        queued = [t for t in asked if t in turns.live and turns.live[t].state is TurnState.QUEUED]
        head = turns.head()
        assert (head.id if head else None) == (queued[0] if queued else None)


def test_turn_is_requested_once_in_the_life_of_its_trajectory() -> None:
    turns = Turns()
    assert request(turns, "a#0")
    assert not request(turns, "a#0")
    turns.move(turns.live["a#0"], TurnState.CANCELLED, 0, "test")
    assert not request(turns, "a#0")
    turns.forget("a")
    assert request(turns, "a#0")


def test_live_turns_of_a_trajectory() -> None:
    turns = Turns()
    for name in ("a#0", "a#1", "a#2"):
        request(turns, name)
    request(turns, "b#0", "b")
    turns.move(turns.live["a#1"], TurnState.CANCELLED, 0, "test")
    assert [turn.id for turn in turns.live_of("a")] == ["a#0", "a#2"]
    assert turns.live_of("c") == []


def test_turn_that_nobody_has_cannot_move() -> None:
    turns = Turns()
    request(turns, "a#0")
    turn = turns.live["a#0"]
    with pytest.raises(IllegalTransition, match="a#0: queued → moving"):
        turns.move(turn, TurnState.MOVING, 0, "test")
    turns.move(turn, TurnState.RUNNING, 7, "w")
    assert [(at_ns, cause) for at_ns, _, _, cause, _ in turn.story.chapters] == [(7, "w")]
