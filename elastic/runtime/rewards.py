"""Rewards on functions: one call of the pool for each attempt that the core orders, and what it came to.

An answer that is no score, and a call without one, are told to the core as such; what follows is its decision.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from elastic.core import commands as c
from elastic.core import events as e
from functions.base import Call, FunctionError, FunctionPool, Meter
from functions.rewards import FinishedTrajectory, score


class MakePool(Protocol):
    def __call__(self, meter: Meter) -> FunctionPool: ...


class FunctionUse:
    """What the calls of a run come to so far."""

    def __init__(self) -> None:
        self.calls = 0
        self.usd = 0.0

    def count(self, call: Call) -> None:
        self.calls += 1
        self.usd += call.usd


class RewardDispatch:
    """A trajectory is its calls' key: however often it is asked for, the function scores it once."""

    def __init__(self, pool: FunctionPool, timeout_s: float, feed: Callable[[e.Event], None]) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._feed = feed

    async def start(self) -> None:
        """Raises `FunctionError` when the reward can never be computed."""
        await self._pool.start()

    async def aclose(self) -> None:
        await self._pool.aclose()

    def score(self, order: c.ScoreTrajectory, finished: FinishedTrajectory, tasks: asyncio.TaskGroup) -> None:
        work = self._score(order, msgspec.to_builtins(finished))
        tasks.create_task(work, name=f"reward of {order.trajectory}")

    async def _score(self, order: c.ScoreTrajectory, payload: Any) -> None:
        try:
            reward = score(await self._pool.invoke(order.trajectory, payload, self._timeout_s))
        except FunctionError as error:
            cause = f"{error.outcome}: {error}"
            answer = e.RewardFailed(
                trajectory=order.trajectory, attempt=order.attempt, cause=cause, retry_helps=error.retry_helps
            )
        else:
            answer = e.RewardScored(trajectory=order.trajectory, attempt=order.attempt, reward=reward)
        self._feed(answer)
