"""An environment whose steps compute, as a third party would have it: benchmarks install it for env workers."""

import time
from typing import ClassVar

from pydantic import BaseModel

from elastic.environments.base import StepResult

WORDS = 64


class ComputingSettings(BaseModel):
    pass


class Computing:
    """A turn's first token says for how many milliseconds its step computes. Without an end; the reward follows from
    what was said so far, and the seed."""

    Settings: ClassVar[type[BaseModel]] = ComputingSettings
    vocabulary: ClassVar[tuple[str, ...]] = tuple(map(str, range(WORDS)))
    stop_token_ids: ClassVar[tuple[int, ...]] = ()

    def __init__(self, settings: BaseModel | None = None) -> None:
        self._said = 0

    async def reset(self, seed: int) -> list[int]:
        self._said = seed % WORDS
        return [self._said]

    async def step(self, token_ids: list[int]) -> StepResult:
        until_s = time.thread_time() + token_ids[0] / 1000
        while time.thread_time() < until_s:
            pass
        self._said = (self._said + sum(token_ids)) % WORDS
        return StepResult([self._said], False)

    async def truncate(self) -> float:
        return float(self._said)

    async def aclose(self) -> None:
        pass
