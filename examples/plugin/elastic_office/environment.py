"""An environment in token ids: guess a digit. The policy says one, and hears whether the secret is lower or higher."""

import random
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from elastic.environments.base import StepResult

DIGITS = tuple("0123456789")
ASK, LOWER, HIGHER = 10, 11, 12


class GuessSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    highest: int = Field(9, ge=1, le=9, description="the secret is a digit up to this one")


class Guess:
    """The reward is 1 for a first guess that is right, and less for each guess before that."""

    Settings: ClassVar[type[BaseModel]] = GuessSettings
    vocabulary: ClassVar[tuple[str, ...]] = (*DIGITS, "?", "<", ">")
    stop_token_ids: ClassVar[tuple[int, ...]] = tuple(range(len(DIGITS)))

    def __init__(self, settings: BaseModel) -> None:
        assert isinstance(settings, GuessSettings)
        self._highest = settings.highest
        self._secret = self._guesses = 0

    async def reset(self, seed: int) -> list[int]:
        self._secret = random.Random(seed).randint(0, self._highest)
        self._guesses = 0
        return [ASK, self._highest]

    async def step(self, token_ids: list[int]) -> StepResult:
        self._guesses += 1
        guess = token_ids[-1] if token_ids else ASK
        if guess == self._secret:
            return StepResult([], done=True, reward=1 / self._guesses)
        if guess >= len(DIGITS):
            return StepResult([ASK], done=False)
        return StepResult([LOWER if self._secret < guess else HIGHER], done=False)

    async def truncate(self) -> float:
        return 0.0

    async def aclose(self) -> None:
        pass
