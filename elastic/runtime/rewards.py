"""Rewards on functions: one call of the pool for each attempt that the core orders, and what it came to.

An answer that is no score, and a call without one, are told to the core as such; what follows is its decision.
"""

from typing import Any, Protocol

import msgspec

from elastic.core import commands as c
from elastic.core import events as e
from elastic.runtime.ports import Feed
from elastic.runtime.tasks import Spawn
from functions.base import FunctionError, FunctionPool, Meter
from functions.rewards import FinishedTrajectory, score


class MakePool(Protocol):
    def __call__(self, meter: Meter) -> FunctionPool: ...


class RewardDispatch:
    """Has functions score trajectories. The trajectory is the key of the call, so repeated requests score it once.

    Without a pool there are no requests: the environments score.
    """

    def __init__(self, pool: FunctionPool | None, timeout_s: float, feed: Feed, spawn: Spawn) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._feed = feed
        self._spawn = spawn

    async def start(self) -> None:
        """Raises `FunctionError` when the reward can never be computed."""
        if self._pool is not None:
            await self._pool.start()

    async def aclose(self) -> None:
        if self._pool is not None:
            await self._pool.aclose()

    def score(self, order: c.ScoreTrajectory, finished: FinishedTrajectory) -> None:
        assert self._pool is not None
        self._spawn(self._score(self._pool, order, msgspec.to_builtins(finished)), f"reward of {order.trajectory}")

    async def _score(self, pool: FunctionPool, order: c.ScoreTrajectory, payload: Any) -> None:
        try:
            reward = score(await pool.invoke(order.trajectory, payload, self._timeout_s))
        except FunctionError as error:
            cause = f"{error.outcome}: {error}"
            answer = e.RewardFailed(
                trajectory=order.trajectory, attempt=order.attempt, cause=cause, retry_helps=error.retry_helps
            )
        else:
            answer = e.RewardScored(trajectory=order.trajectory, attempt=order.attempt, reward=reward)
        self._feed(answer)
