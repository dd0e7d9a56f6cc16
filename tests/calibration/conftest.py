"""A small policy on disk, and settings of engines that are quickly measured."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elastic.config import Config
from elastic.model.checkpoint import model_tensors, write_checkpoint
from elastic.model.config import Qwen3Config
from elastic.model.qwen3 import Qwen3

TINY = Qwen3Config(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)
ENGINE = {"max_batch": 4, "max_context_tokens": 128, "prefill_chunk_tokens": 64, "kv_blocks": 64, "device": "cpu"}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "checkpoint"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write_checkpoint(directory, TINY, model_tensors(Qwen3(TINY)))
    return directory


@pytest.fixture
def configured(tmp_path: Path, checkpoint: Path) -> Callable[..., Config]:
    """A configuration with these engine settings on top of `ENGINE`."""

    def of(sections: dict[str, object] | None = None, **engine: object) -> Config:
        body = {
            "run": {"steps": 2, "directory": str(tmp_path / "runs"), "seed": 3},
            "model": {"checkpoint": str(checkpoint)},
            "rollout": {"groups": 3, "group_size": 4, "max_turns": 4, "max_tokens_per_turn": 16},
            "trainer": {"updates_per_step": 1},
            "engine": ENGINE | engine,
        }
        return Config.model_validate(body | (sections or {}))

    return of
