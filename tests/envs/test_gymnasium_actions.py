"""What an answer of the policy names: the action that it says last."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest
from gymnasium import spaces

from elastic.environments.agent import EpisodeTask, Outcome, PlayedTrajectory
from elastic.environments.from_gymnasium import Actions, GymnasiumSettings, highlighted, load_gymnasium
from elastic.environments.kinds import KindMeans
from elastic.system.named_code import CodeUnusable, load

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
    assert highlighted("\x1b[1m\x1b[41mS\x1b[mF\x1b[0m\x1b[31mF") == "[S]F[F]"


def test_what_is_coloured_is_found_in_one_walk() -> None:
    assert highlighted("\x1b[41mS" * 300_000) == f"[{'S' * 300_000}]"


LAKES = """
import gymnasium

OPEN = set()


class Lake(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        OPEN.add(self)

    def reset(self, *, seed=None, options=None):
        return "ice", {}

    def step(self, action):
        if action:
            raise ValueError("the ice breaks")
        return "shore", 1.0, True, False, {}

    def close(self):
        OPEN.remove(self)
"""


async def test_environments_are_closed_once_they_raise_and_with_their_env_worker(tmp_path: Path) -> None:
    (tmp_path / "lakes.py").write_text(LAKES)
    opened = load(f"{tmp_path}/lakes.py:OPEN")
    said = iter(["0", "1", "0"])

    def answer(_: httpx.Request) -> httpx.Response:
        choice = {"message": {"role": "assistant", "content": next(said)}, "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice]})

    async def bind(*_: Any) -> None:
        raise AssertionError("sessions are verifiers'")

    async with contextlib.AsyncExitStack() as lasting, httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        means = KindMeans(http=http, model="tiny", checkpoint=Path(), seed=0, key="", bind=bind, lasting=lasting)
        play = await load_gymnasium(GymnasiumSettings.model_validate({"id": f"{tmp_path}/lakes.py:Lake"}), means)
        where = PlayedTrajectory(id="0-0-0", base_url="http://here/v1", key="", model="tiny", member=0)
        assert await play(EpisodeTask(number=0, seed=0), None, where) == Outcome(reward=1.0)
        assert len(opened) == 1
        with pytest.raises(ValueError, match="the ice breaks"):
            await play(EpisodeTask(number=0, seed=0), None, where)
        assert not opened
        assert await play(EpisodeTask(number=0, seed=0), None, where) == Outcome(reward=1.0)
        assert len(opened) == 1
    assert not opened
