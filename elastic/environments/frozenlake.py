"""FrozenLake in text: gymnasium's grid world on random solvable maps, one capital letter a move.

The prompt shows the map and where the agent stands, row then column; every later observation is the position
alone. A turn may write plans in small letters first, drafts of them apart by `|`; the capital is the move and
ends the turn. A turn without a move changes nothing and is answered with `!`.

    prompt  ^SFFF/FHFH/FFFH/HFFG@00:
    turn    rrd|ddrrdrD
    answer  @10:
"""

import random
from collections.abc import Iterable, Sequence
from typing import ClassVar

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from pydantic import BaseModel, ConfigDict, Field, field_validator

from elastic.environments.base import StepResult

ACTIONS = "LDRU"
"""In gymnasium's order: the index is its action."""

VOCABULARY = ("_", *"^SFHG/@0123456789:!|", *ACTIONS.lower(), *ACTIONS, "#", "?", "*")
"""`_` is padding; the last three are spare."""

_TOKEN_ID = {token: index for index, token in enumerate(VOCABULARY)}

SIZE_MAX = 10
"""A row or a column is one digit."""


def encode(text: str) -> list[int]:
    """One token a character. Raises `KeyError` for a character outside the vocabulary."""
    return [_TOKEN_ID[character] for character in text]


def decode(token_ids: Iterable[int]) -> str:
    return "".join(VOCABULARY[token_id] for token_id in token_ids)


class FrozenLakeSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    sizes: tuple[int, ...] = Field(
        default=(4,), min_length=1, description="side lengths; one is drawn for each episode"
    )
    hole_probability: float = Field(default=0.2, ge=0, le=0.4, description="of a tile; maps without a way are redrawn")
    is_slippery: bool = Field(default=False, description="a move goes sideways two times out of three")

    @field_validator("sizes")
    @classmethod
    def _drawable(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if any(not 2 <= size <= SIZE_MAX for size in sizes):
            raise ValueError(f"each size must be from 2 to {SIZE_MAX}")
        return sizes


class Lake:
    """One episode: the map and the agent on it, spoken to in text."""

    def __init__(self, settings: FrozenLakeSettings, seed: int) -> None:
        self.size = random.Random(seed).choice(settings.sizes)
        self.board: list[str] = generate_random_map(self.size, 1 - settings.hole_probability, seed)
        self._env = FrozenLakeEnv(desc=self.board, is_slippery=settings.is_slippery)
        self._position, _ = self._env.reset(seed=seed)

    @property
    def position(self) -> tuple[int, int]:
        """Row and column of the agent, from the upper left."""
        return divmod(self._position, self.size)

    @property
    def prompt(self) -> str:
        return f"^{'/'.join(self.board)}{self._observation('@')}"

    def move(self, action: str) -> tuple[str, bool, float]:
        """Answer one of `ACTIONS`, or anything else: (observation, done, reward)."""
        if len(action) != 1 or action not in ACTIONS:
            return self._observation("!"), False, 0.0
        self._position, reward, done, _, _ = self._env.step(ACTIONS.index(action))
        return ("", True, float(reward)) if done else (self._observation("@"), False, 0.0)

    def _observation(self, mark: str) -> str:
        row, column = self.position
        return f"{mark}{row}{column}:"


class FrozenLake:
    """`environments.base.Environment`: reward 1 at the goal, 0 in a hole and on the way; limits are the caller's."""

    Settings: ClassVar[type[BaseModel]] = FrozenLakeSettings
    vocabulary: ClassVar[tuple[str, ...]] = VOCABULARY
    stop_token_ids: ClassVar[tuple[int, ...]] = tuple(encode(ACTIONS))
    in_process: ClassVar[bool] = True

    def __init__(self, settings: BaseModel) -> None:
        if not isinstance(settings, FrozenLakeSettings):
            raise TypeError(f"FrozenLake takes FrozenLakeSettings, not {type(settings).__name__}")
        self._settings = settings
        self._lake: Lake | None = None

    async def reset(self, seed: int) -> list[int]:
        self._lake = Lake(self._settings, seed)
        return encode(self._lake.prompt)

    async def step(self, token_ids: Sequence[int]) -> StepResult:
        """One turn; its last token counts. Raises `RuntimeError` when no episode runs."""
        if self._lake is None:
            raise RuntimeError("FrozenLake.step: no episode is running; reset first")
        observation, done, reward = self._lake.move(decode(token_ids[-1:]))
        if done:
            self._lake = None
        return StepResult(encode(observation), done, reward)

    async def truncate(self) -> float:
        """Scores 0: the goal was not reached."""
        self._lake = None
        return 0.0

    async def aclose(self) -> None:
        self._lake = None
