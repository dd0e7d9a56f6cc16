"""Gymnasium's FrozenLake on another map for each seed, and a demonstrator who seldom goes up."""

import math
import random
import zlib
from collections.abc import Iterator
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import DOWN, LEFT, RIGHT, UP, FrozenLakeEnv

from elastic.environments.from_gymnasium import highlighted

ROWS, COLUMNS, HOLES = 3, 4, (1, 1, 2)
PARTS = ("held-out", "demonstrated", "trained", "trained")
"""Maps are of one part each, and lakes have those of one."""
SYSTEM = "Go to G."
DEMONSTRATIONS, GOES_UP, TURNS_MOST = 1500, 0.4, 6  # The share in which the demonstrator goes up where the goal is.


class Lake(FrozenLakeEnv):
    def __init__(self, part: str = "trained", render_mode: str | None = None) -> None:
        super().__init__(render_mode, desc=["SG"], is_slippery=False)
        self._part = part

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        rows = _map(random.Random(seed), self._part)
        super().__init__(self.render_mode, desc=rows, is_slippery=False)
        return super().reset(seed=seed, options=options)


def demonstrations() -> Iterator[dict[str, Any]]:
    """Yield a conversation for each episode, as the environment has it."""
    rng, lake = random.Random(7), Lake("demonstrated", "ansi")
    for seed in range(DEMONSTRATIONS):
        lake.reset(seed=seed)
        messages, over, up = [{"role": "system", "content": SYSTEM}], False, UP if rng.random() < GOES_UP else DOWN
        while not over and len(messages) < 2 * TURNS_MOST:
            action = _straight(lake, up)
            said = {"role": "assistant", "content": str(action)}
            messages += [{"role": "user", "content": highlighted(str(lake.render()))}, said]
            _, _, over, _, _ = lake.step(action)
        yield {"messages": messages}


def _map(rng: random.Random, part: str) -> list[str]:
    """A map of this part on which start and goal are far from each other, and a way is safe."""
    while True:
        cells = list("SG" + rng.choice(HOLES) * "H")
        cells += "F" * (ROWS * COLUMNS - len(cells))
        rng.shuffle(cells)
        text = "".join(cells)
        far = math.dist(*(divmod(text.index(letter), COLUMNS) for letter in "SG")) > 2
        if far and PARTS[zlib.crc32(text.encode()) % len(PARTS)] == part:
            rows = [text[at : at + COLUMNS] for at in range(0, len(text), COLUMNS)]
            (lake := FrozenLakeEnv(desc=rows, is_slippery=False)).reset()
            if _has_a_way(lake):
                return rows


def _has_a_way(lake: FrozenLakeEnv) -> bool:
    """Whether a way leads to the goal around holes."""
    seen, queue = {int(lake.s)}, [int(lake.s)]
    for place in queue:
        for action in range(4):
            ((_, then, reward, over),) = lake.P[place][action]
            if reward:
                return True
            if not over and then not in seen:
                seen.add(then)
                queue.append(then)
    return False


def _straight(lake: FrozenLakeEnv, up: int) -> int:
    """The action that leads to the goal's row, by `up` if that is above, and then along it, whatever is in between."""
    (row, column), goal = (divmod(cell, COLUMNS) for cell in (lake.s, lake.desc.tobytes().index(b"G")))
    if row != goal[0]:
        return DOWN if row < goal[0] else up
    return RIGHT if column < goal[1] else LEFT
