"""Rewards on real function processes: every way to go wrong reaches the core as a failure, never as a score."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.runtime.rewards import RewardDispatch
from functions.base import Call, FunctionError
from functions.local import LocalFunctionPool
from functions.rewards import FinishedTrajectory

TIMEOUT_S = 20.0
REWARDS = """
import math, time

def good(trajectory): return sum(trajectory["trained"]) * trajectory["settings"]["weight"]
def undefined(_): return math.nan
def infinite(_): return -math.inf
def text(_): return "1.0"
def nothing(_): return None
def thing(_): return object()
def broken(_): return 1 / 0
def hangs(_): time.sleep(600)
"""

Score = Callable[..., Any]


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Score:
    """Have a reward of `REWARDS` score a trajectory on a pool of its own."""
    (tmp_path / "some_rewards.py").write_text(REWARDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def score(reward: str, timeout_s: float = TIMEOUT_S, attempts: int = 1) -> tuple[list[e.Event], list[Call]]:
        told: list[e.Event] = []
        calls: list[Call] = []
        pool = LocalFunctionPool(f"some_rewards:{reward}", meter=calls.append)
        group: asyncio.TaskGroup | None = None

        def feed(event: e.Event, payload: Any = None) -> None:
            told.append(event)

        def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
            assert group is not None
            return group.create_task(work, name=name)

        dispatch = RewardDispatch(pool, timeout_s, feed, spawn)
        await dispatch.start()
        finished = FinishedTrajectory(
            trajectory="0/1/2",
            token_ids=[1, 2, 3],
            trained=[0, 1, 1],
            seed=5,
            environment_settings={},
            environment_reward=0.0,
            settings={"weight": 0.25},
        )
        try:
            async with asyncio.TaskGroup() as group:
                for attempt in range(1, attempts + 1):
                    dispatch.score(c.ScoreTrajectory(trajectory="0/1/2", attempt=attempt), finished)
        finally:
            await dispatch.aclose()
        return told, calls

    return score


async def test_a_number_is_a_score(score: Score) -> None:
    told, _ = await score("good")
    assert told == [e.RewardScored(trajectory="0/1/2", attempt=1, reward=0.5)]


async def test_attempts_at_one_trajectory_share_one_call(score: Score) -> None:
    told, calls = await score("good", attempts=3)
    assert {event.attempt for event in told} == {1, 2, 3}
    assert {event.reward for event in told} == {0.5}
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("reward", "found", "retry_helps"),
    [
        ("undefined", "bad_result: a reward must be a finite number; found nan", False),
        ("infinite", "bad_result: a reward must be a finite number; found -inf", False),
        ("text", "bad_result: a reward must be a finite number; found '1.0' (str)", False),
        ("nothing", "bad_result: a reward must be a finite number; found None (NoneType)", False),
        ("thing", "bad_result: some_rewards:thing", False),
        ("broken", "raised: some_rewards:broken raised ZeroDivisionError: division by zero", True),
        ("hangs", "timed_out: some_rewards:hangs did not answer within 0.5 s", True),
    ],
)
async def test_what_is_no_score_says_why(score: Score, reward: str, found: str, retry_helps: bool) -> None:
    (failed,), _ = await score(reward, timeout_s=0.5 if reward == "hangs" else TIMEOUT_S)
    assert isinstance(failed, e.RewardFailed)
    assert failed.cause.startswith(found)
    assert failed.retry_helps is retry_helps


async def test_a_reward_that_cannot_be_loaded_is_found_at_the_start(score: Score) -> None:
    with pytest.raises(FunctionError, match="some_rewards:missing cannot be loaded"):
        await score("missing")
