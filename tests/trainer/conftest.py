import random
from collections.abc import Callable, Iterator

import pytest
import torch

from elastic.config import TrainerConfig
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.protocol.wire import TrainGroupFrame, TrajectoryData
from elastic.testing.trajectories import PlainTrajectory
from elastic.worker.trainer.embedded.trainer import GRPOTrainer

TINY = Qwen3Config(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_model(seed: int = 0, config: Qwen3Config = TINY) -> Qwen3:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3(config)


def random_group(index: int, rng: random.Random, rewards: list[float] | None = None) -> TrainGroupFrame:
    """A group as rollouts would send it, with log-probabilities near those of an untrained model."""
    rewards = [float(rng.random() < 0.5) for _ in range(4)] if rewards is None else rewards
    return TrainGroupFrame(
        0, f"g{index}", index, [random_trajectory(f"g{index}.{i}", rng, r) for i, r in enumerate(rewards)]
    )


def random_trajectory(name: str, rng: random.Random, reward: float) -> TrajectoryData:
    length = rng.randint(5, 30)
    trained = [0, 0, *(rng.randint(0, 1) for _ in range(length - 3)), 1]
    logprobs = [mine * rng.uniform(-4.0, -3.0) for mine in trained]
    ids = [rng.randrange(32) for _ in trained]
    return PlainTrajectory(name, ids, trained, logprobs, [0] * length, reward).packed()


@pytest.fixture
def model() -> Callable[..., Qwen3]:
    return tiny_model


@pytest.fixture
def group() -> Callable[..., TrainGroupFrame]:
    return random_group


@pytest.fixture
def trainer() -> Callable[..., GRPOTrainer]:
    """Makes trainers of equal fresh models."""

    def make(
        groups: int = 6, temperature: float = 1.0, seed: int = 0, frozen: Qwen3 | None = None, **settings: object
    ) -> GRPOTrainer:
        keys = TrainerConfig.model_validate(settings)
        return GRPOTrainer(keys, tiny_model(seed), groups, temperature, reference=frozen)

    return make
