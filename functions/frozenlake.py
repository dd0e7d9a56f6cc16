"""FrozenLake's own reward, recomputed from a trajectory's tokens: whether its moves lead to the goal."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from elastic.environments.frozenlake import FrozenLakeSettings, Lake, decode
from functions.rewards import finished_trajectory


def reward(trajectory: Mapping[str, Any]) -> float:
    """1 at the goal, 0 anywhere else. Raises `ValueError` where the prompt is not that of the seed's lake."""
    finished = finished_trajectory(trajectory)
    lake = Lake(FrozenLakeSettings.model_validate(finished.environment_settings), finished.seed)
    spoken = list(_spoken(finished.token_ids, finished.trained))
    if not spoken or spoken[0] != (False, lake.prompt):
        raise ValueError(f"the trajectory does not begin with the lake of seed {finished.seed}, {lake.prompt}")
    for by_policy, text in spoken:
        if by_policy:
            _, done, reached = lake.move(text[-1])
            if done:
                return reached
    return 0.0


def _spoken(token_ids: list[int], trained: list[int]) -> Iterator[tuple[bool, str]]:
    """Prompt, turns and answers in order: (whether the policy said it, the text)."""
    for by_policy, tokens in groupby(zip(trained, token_ids, strict=True), key=lambda token: bool(token[0])):
        yield by_policy, decode(token_id for _, token_id in tokens)
