"""What the trainers' conformance suite needs: trainers, and the orders of steps."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from elastic.protocol.wire import TrainGroupFrame
from elastic.testing.trajectories import PlainTrajectory
from elastic.worker.trainer.base import PolicyTrainer

GROUPS, VOCABULARY = 4, 32
"""The groups of each step of the suite's trainers, and the least vocabulary of their policy."""


@dataclass(frozen=True)
class TrainerUnderTest:
    """How the suite gets trainers of a kind: each equal to the one before, for steps of `GROUPS` groups."""

    name: str
    make: Callable[[], PolicyTrainer]
    float32: bool = False
    """Whether its policy's files are float32, and not bfloat16."""

    def __str__(self) -> str:
        return self.name


def step_of(step: int) -> list[TrainGroupFrame]:
    """The groups of a step: two rewarded trajectories and two that were not, sampled by two workers."""
    rng = random.Random(step)
    return [
        TrainGroupFrame(
            step,
            f"s{step}g{index}",
            index,
            [_trajectory(f"s{step}g{index}m{member}", step, float(member % 2), rng).packed() for member in range(4)],
        )
        for index in range(GROUPS)
    ]


def _trajectory(name: str, version: int, reward: float, rng: random.Random) -> PlainTrajectory:
    length = rng.randint(5, 30)
    trained = [0, 0, *(rng.randint(0, 1) for _ in range(length - 3)), 1]
    logprobs = [mine * rng.uniform(-4.0, -3.0) for mine in trained]
    ids = [rng.randrange(VOCABULARY) for _ in trained]
    half = sum(trained) // 2
    workers = [("reserved-1/w", half), ("spot-1/w", sum(trained) - half)]
    origins = [(worker, tokens) for worker, tokens in workers if tokens]
    return PlainTrajectory(name, ids, trained, logprobs, [version] * length, reward, origins)
