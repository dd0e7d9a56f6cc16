"""Demonstrations for FrozenLake's base policy: shortest paths, walked by an unsteady hand.

They teach the format and what a plan is, and leave much to learn: random moves are frequent, and episodes that
end in a hole are shown as well.
"""

import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from elastic.environments.frozenlake import ACTIONS, FrozenLakeSettings, Lake, encode

Tile: TypeAlias = tuple[int, int]
"""Row and column."""

_OFFSETS = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}


class DemonstrationSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    random_action_probability: float = Field(default=0.4, ge=0, le=1)
    plan_probability: float = Field(default=0.5, ge=0, le=1, description="of a turn with a plan before its move")
    plan_moves_max: int = Field(default=7, ge=1, description="a plan is cut to a random length up to this")
    redraft_probability: float = Field(default=0.3, ge=0, lt=1, description="of one more draft before the plan")
    turns_max: int = Field(default=16, ge=1)
    turn_tokens_max: int = Field(default=16, ge=2)


class Demonstration(NamedTuple):
    """An episode's tokens; `trained[i]` is 1 where token i is the policy's."""

    token_ids: list[int]
    trained: list[int]


def demonstrate(
    lake_settings: FrozenLakeSettings, settings: DemonstrationSettings, seed: int, rng: random.Random
) -> Demonstration:
    """The episode of `seed` as the demonstrator plays it; a pure function of its arguments and `rng`'s state."""
    lake = Lake(lake_settings, seed)
    demonstrator = _Demonstrator(shortest_ways(lake.board), lake.size, settings, rng)
    token_ids = encode(lake.prompt)
    trained = [0] * len(token_ids)
    for _ in range(settings.turns_max):
        turn = demonstrator.turn(lake.position)
        observation, done, _ = lake.move(turn[-1])
        token_ids += encode(turn + observation)
        trained += [1] * len(turn) + [0] * len(observation)
        if done:
            break
    return Demonstration(token_ids, trained)


def shortest_ways(board: Sequence[str]) -> dict[Tile, str]:
    """For each tile from which the goal can be reached on steady ice, the moves of a shortest way there."""
    last = len(board) - 1
    ways = {(last, last): ""}
    queue = deque(ways)
    while queue:
        tile = queue.popleft()
        for action, (down, right) in _OFFSETS.items():
            before = (tile[0] - down, tile[1] - right)
            inside = 0 <= before[0] <= last and 0 <= before[1] <= last
            if inside and before not in ways and board[before[0]][before[1]] != "H":
                ways[before] = action + ways[tile]
                queue.append(before)
    return ways


class _Demonstrator(NamedTuple):
    ways: dict[Tile, str]
    size: int
    settings: DemonstrationSettings
    rng: random.Random

    def turn(self, tile: Tile) -> str:
        action = self._action(tile)
        return self._thought(tile, action) + action

    def _action(self, tile: Tile) -> str:
        if self.rng.random() < self.settings.random_action_probability:
            return self.rng.choice(ACTIONS)
        return self.ways[tile][0]

    def _thought(self, tile: Tile, action: str) -> str:
        """Nothing, or a plan that begins with `action`, after drafts that begin with any move."""
        if self.rng.random() >= self.settings.plan_probability:
            return ""
        thought = self._plan(tile, action)
        while self.rng.random() < self.settings.redraft_probability:
            thought = f"{self._plan(tile, self.rng.choice(ACTIONS))}|{thought}"
        return thought[-(self.settings.turn_tokens_max - 1) :].removeprefix("|")

    def _plan(self, tile: Tile, action: str) -> str:
        """`action` and a shortest way on from there (none out of a hole), cut."""
        row, column = (min(max(at + by, 0), self.size - 1) for at, by in zip(tile, _OFFSETS[action], strict=True))
        moves = action + self.ways.get((row, column), "")
        return moves[: self.rng.randint(1, self.settings.plan_moves_max)].lower()
