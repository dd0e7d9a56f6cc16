"""What an answer of the policy names: the action that it says last."""

from collections.abc import Sequence
from typing import Any

import numpy
import pytest
from gymnasium import spaces

from elastic.environments.from_gymnasium import Actions, highlighted
from elastic.system.named_code import CodeUnusable

WAYS = ("left", "down", "right", "up")


@pytest.mark.parametrize(
    ("names", "text", "action"),
    [
        ((), "2", 2),
        ((), "Not 1, I go 3.", 3),
        ((), "4", None),
        ((), "-1", None),
        ((), "2.5", None),
        ((), "12", None),
        ((), "", None),
        (WAYS, "Up or down? I go LEFT.", 0),
        (WAYS, "upwards", None),
        (WAYS, "action 1", 1),
    ],
)
def test_of_a_discrete_space(names: Sequence[str], text: str, action: int | None) -> None:
    assert Actions(spaces.Discrete(4), names).read(text) == action


def test_numbers_begin_where_the_space_does() -> None:
    actions = Actions(spaces.Discrete(2, start=5), ("a", "b"))
    assert (actions.read("b"), actions.read("5"), actions.read("0")) == (6, 5, None)


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (spaces.Box(-1, 1, (2,), numpy.float32), "I think [0, 0], no: [0.5, -1]", [0.5, -1.0]),
        (spaces.Box(-1, 1, (2,), numpy.float32), "[2, 0]", None),
        (spaces.Box(-1, 1, (2,), numpy.float32), "[0.5]", None),
        (spaces.Box(-1, 1, (2,), numpy.float32), "[a, b]", None),
        (spaces.MultiDiscrete([3, 3]), "[2, 1]", [2, 1]),
        (spaces.MultiDiscrete([3, 3]), "[2, 1e999]", None),
    ],
)
def test_of_several_numbers(space: Any, text: str, action: list[float] | None) -> None:
    found = Actions(space, ()).read(text)
    assert (None if found is None else found.tolist()) == action


def test_what_no_text_names_is_refused() -> None:
    with pytest.raises(CodeUnusable, match="allowed: Discrete, Text"):
        Actions(spaces.Dict({"a": spaces.Discrete(2)}), ())
    with pytest.raises(CodeUnusable, match="found 1 names; allowed: 4"):
        Actions(spaces.Discrete(4), ("left",))


def test_what_is_coloured_stands_in_brackets() -> None:
    assert highlighted("  (Down)\n\x1b[41mS\x1b[0mFFF\n") == "  (Down)\n[S]FFF\n"
